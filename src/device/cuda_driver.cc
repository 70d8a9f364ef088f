// Finds libcuda.so.1 among the loaded objects and takes its functions by the names that its ABI has.
#include "device/cuda_driver.h"

#include <dlfcn.h>

namespace halfwire::cuda {

Status Driver::check(const char* call, CUresult error) const {
  if (error == kSuccess) return {};
  const char* text = nullptr;
  if (cuGetErrorString(error, &text) != kSuccess || text == nullptr) text = "unknown error";
  return Status(error == kErrorOutOfMemory ? StatusCode::kOutOfMemory : StatusCode::kInternal,
                std::string(call) + ": " + text + " (CUDA driver error " + std::to_string(error) + ")");
}

Result<Driver> findDriver() {
  void* handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr)
    return Status(StatusCode::kUnavailable, "this process has not loaded the CUDA driver (libcuda.so.1)");
  Driver driver{};
  const char* missing = nullptr;
  const auto take = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr && missing == nullptr) missing = name;
  };
  take(driver.cuGetErrorString, "cuGetErrorString");
  take(driver.cuCtxGetCurrent, "cuCtxGetCurrent");
  take(driver.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  take(driver.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
  take(driver.cuDeviceGet, "cuDeviceGet");
  take(driver.cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId");
  take(driver.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  take(driver.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
  take(driver.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  take(driver.cuModuleLoadData, "cuModuleLoadData");
  take(driver.cuModuleGetFunction, "cuModuleGetFunction");
  take(driver.cuModuleUnload, "cuModuleUnload");
  take(driver.cuLaunchKernel, "cuLaunchKernel");
  take(driver.cuMemAlloc, "cuMemAlloc_v2");
  take(driver.cuMemFree, "cuMemFree_v2");
  take(driver.cuMemHostAlloc, "cuMemHostAlloc");
  take(driver.cuMemFreeHost, "cuMemFreeHost");
  take(driver.cuMemcpyAsync, "cuMemcpyAsync");
  take(driver.cuMemsetD8Async, "cuMemsetD8Async");
  take(driver.cuMemGetInfo, "cuMemGetInfo_v2");
  take(driver.cuStreamCreate, "cuStreamCreate");
  take(driver.cuStreamDestroy, "cuStreamDestroy_v2");
  take(driver.cuStreamSynchronize, "cuStreamSynchronize");
  take(driver.cuStreamWaitEvent, "cuStreamWaitEvent");
  take(driver.cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo");
  take(driver.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  take(driver.cuEventCreate, "cuEventCreate");
  take(driver.cuEventDestroy, "cuEventDestroy_v2");
  take(driver.cuEventRecord, "cuEventRecord");
  take(driver.cuEventRecordWithFlags, "cuEventRecordWithFlags");
  take(driver.cuEventSynchronize, "cuEventSynchronize");
  take(driver.cuEventQuery, "cuEventQuery");
  take(driver.cuEventElapsedTime, "cuEventElapsedTime");
  dlclose(handle);  // the reference that RTLD_NOLOAD took; the driver stays as long as who loaded it keeps it
  if (missing != nullptr)
    return Status(StatusCode::kUnavailable, std::string("the loaded CUDA driver has no ") + missing +
                                                "; a driver of CUDA 11 or later is needed");
  return driver;
}

}  // namespace halfwire::cuda
