// Driver calls of the check program.
#include "wire/cuda_check/gpu.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace halfwire::check {

void Gpu::must(const char* what, CUresult error) const {
  if (error == cuda::kSuccess) return;
  std::fprintf(stderr, "%s\n", driver.check(what, error).message().c_str());
  std::fflush(stdout);
  std::_Exit(3);
}

bool openGpu(Gpu* gpu, std::string* why) {
  void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    *why = dlerror();
    return false;
  }
  Result<cuda::Driver> driver = cuda::findDriver();
  if (!driver.ok()) {
    *why = driver.status().message();
    return false;
  }
  gpu->driver = driver.value();
  bool complete = true;
  const auto take = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    complete = complete && function != nullptr;
  };
  CUresult (*cuInit)(unsigned) = nullptr;
  CUresult (*cuDriverGetVersion)(int*) = nullptr;
  CUresult (*cuDeviceGet)(int*, int) = nullptr;
  CUresult (*cuDeviceGetName)(char*, int, int) = nullptr;
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, int) = nullptr;
  take(cuInit, "cuInit");
  take(cuDriverGetVersion, "cuDriverGetVersion");
  take(cuDeviceGet, "cuDeviceGet");
  take(cuDeviceGetName, "cuDeviceGetName");
  take(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  take(gpu->cuCtxSetCurrent, "cuCtxSetCurrent");
  take(gpu->cuCtxSynchronize, "cuCtxSynchronize");
  take(gpu->cuMemcpyHtoD, "cuMemcpyHtoD_v2");
  take(gpu->cuMemcpyDtoH, "cuMemcpyDtoH_v2");
  take(gpu->cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
  take(gpu->cuMemsetD8Async, "cuMemsetD8Async");
  take(gpu->cuEventElapsedTime, "cuEventElapsedTime");
  take(gpu->cuStreamBeginCapture, "cuStreamBeginCapture_v2");
  take(gpu->cuStreamEndCapture, "cuStreamEndCapture");
  take(gpu->cuGraphInstantiate, "cuGraphInstantiateWithFlags");
  take(gpu->cuGraphLaunch, "cuGraphLaunch");
  take(gpu->cuGraphExecDestroy, "cuGraphExecDestroy");
  take(gpu->cuGraphDestroy, "cuGraphDestroy");
  if (!complete) {
    *why = "the CUDA driver lacks functions of CUDA 11.4";
    return false;
  }
  if (const CUresult error = cuInit(0); error != cuda::kSuccess) {
    *why = gpu->driver.check("cuInit", error).message();
    return false;
  }
  int device = 0;
  if (const CUresult error = cuDeviceGet(&device, 0); error != cuda::kSuccess) {
    *why = gpu->driver.check("cuDeviceGet", error).message();
    return false;
  }
  char name[256] = {};
  gpu->must("cuDeviceGetName", cuDeviceGetName(name, sizeof(name) - 1, device));
  gpu->name = name;
  gpu->must("cuDriverGetVersion", cuDriverGetVersion(&gpu->driver_version));
  gpu->must("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&gpu->context, device));
  gpu->must("cuCtxSetCurrent", gpu->cuCtxSetCurrent(gpu->context));
  int major = 0;
  int minor = 0;
  constexpr int kMultiprocessorCount = 16;
  gpu->must("attribute", gpu->driver.cuDeviceGetAttribute(&major, cuda::kComputeCapabilityMajor, device));
  gpu->must("attribute", gpu->driver.cuDeviceGetAttribute(&minor, cuda::kComputeCapabilityMinor, device));
  gpu->must("attribute",
            gpu->driver.cuDeviceGetAttribute(&gpu->multiprocessors, kMultiprocessorCount, device));
  gpu->capability = 10 * major + minor;
  size_t free = 0;
  gpu->must("cuMemGetInfo", gpu->driver.cuMemGetInfo(&free, &gpu->memory));
  return true;
}

Buffer::Buffer(const Gpu& gpu, size_t bytes) : gpu_(gpu), bytes_(bytes) {
  gpu.must("cuMemAlloc", gpu.driver.cuMemAlloc(&pointer_, bytes));
}
Buffer::~Buffer() { (void)gpu_.driver.cuMemFree(pointer_); }
void Buffer::upload(const void* from, size_t bytes, size_t at) const {
  if (bytes == 0) return;
  gpu_.must("cuMemcpyHtoD", gpu_.cuMemcpyHtoD(pointer_ + at, from, bytes));
  // From pageable memory the call returns when the bytes are staged; streams of our own do not wait for the
  // rest.
  gpu_.must("cuStreamSynchronize", gpu_.driver.cuStreamSynchronize(nullptr));
}
void Buffer::download(void* to, size_t bytes, size_t at) const {
  if (bytes != 0) gpu_.must("cuMemcpyDtoH", gpu_.cuMemcpyDtoH(to, pointer_ + at, bytes));
}

Stream::Stream(const Gpu& gpu) : gpu_(gpu) {
  gpu.must("cuStreamCreate", gpu.driver.cuStreamCreate(&stream_, cuda::kStreamNonBlocking));
}
Stream::~Stream() { (void)gpu_.driver.cuStreamDestroy(stream_); }
void Stream::synchronize() const {
  gpu_.must("cuStreamSynchronize", gpu_.driver.cuStreamSynchronize(stream_));
}

Timers::Timers(const Gpu& gpu, size_t count) : gpu_(gpu), events_(count) {
  for (CUevent& event : events_) gpu.must("cuEventCreate", gpu.driver.cuEventCreate(&event, 0));
}
Timers::~Timers() {
  for (CUevent event : events_) (void)gpu_.driver.cuEventDestroy(event);
}
void Timers::record(size_t i, CUstream stream) const {
  gpu_.must("cuEventRecord", gpu_.driver.cuEventRecord(events_[i], stream));
}
double Timers::seconds(size_t from, size_t to) const {
  float milliseconds = 0;
  gpu_.must("cuEventElapsedTime", gpu_.cuEventElapsedTime(&milliseconds, events_[from], events_[to]));
  return 1e-3 * static_cast<double>(milliseconds);
}

Module::Module(const Gpu& gpu, const void* image) : gpu_(gpu) {
  gpu.must("cuModuleLoadData", gpu.driver.cuModuleLoadData(&module_, image));
}
CUfunction Module::function(const std::string& name) const {
  CUfunction out = nullptr;
  gpu_.must(name.c_str(), gpu_.driver.cuModuleGetFunction(&out, module_, name.c_str()));
  return out;
}
bool Module::has(const std::string& name) const {
  CUfunction out = nullptr;
  return gpu_.driver.cuModuleGetFunction(&out, module_, name.c_str()) == cuda::kSuccess;
}

}  // namespace halfwire::check
