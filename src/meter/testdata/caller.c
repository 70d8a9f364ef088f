/* A library that was linked against one version of the CUDA runtime. Returns the version that answered all its calls, or
   -1 if they differ. */
int cudaEventRecord(void*, void*);
int cudaEventRecordWithFlags(void*, void*, unsigned);
int cudaStreamWaitEvent(void*, void*, unsigned);
int cudaStreamSynchronize(void*);
int cudaEventSynchronize(void*);
int cudaDeviceSynchronize(void);
int cudaLaunchKernel(const void*, unsigned long, unsigned long, void**, unsigned long, void*);
int cudaEventRecord_ptsz(void*, void*);
int cudaMemcpy_ptds(void*, const void*, unsigned long, int);
int CALLER(void) {
  const int first = cudaEventRecord(0, 0);
  const int all[] = {cudaEventRecordWithFlags(0, 0, 0), cudaStreamWaitEvent(0, 0, 0), cudaStreamSynchronize(0),
                     cudaEventSynchronize(0), cudaDeviceSynchronize(), cudaLaunchKernel(0, 0, 0, 0, 0, 0),
                     cudaEventRecord_ptsz(0, 0), cudaMemcpy_ptds(0, 0, 0, 0)};
  for (unsigned i = 0; i < sizeof all / sizeof *all; ++i) {
    if (all[i] != first) return -1;
  }
  return first;
}
