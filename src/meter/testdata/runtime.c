/* Stands for one version of the CUDA runtime: every function says which one it is. */
#define NAME(name) int name(void) { return VERSION; }
NAME(cudaEventRecord) NAME(cudaEventRecordWithFlags) NAME(cudaStreamWaitEvent) NAME(cudaStreamSynchronize)
NAME(cudaEventSynchronize) NAME(cudaDeviceSynchronize) NAME(cudaLaunchKernel) NAME(cudaLaunchKernelExC)
NAME(cudaMemcpyAsync) NAME(cudaGraphLaunch) NAME(cudaStreamDestroy) NAME(cudaEventRecord_ptsz) NAME(cudaMemcpy_ptds)
