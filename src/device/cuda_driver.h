// The CUDA driver of this process, found without linking or loading it, and the part of its API that is
// needed here, declared so that the tree builds without a CUDA toolkit. Names and types are those that cuda.h
// gives the ABI since CUDA 11; never include this beside the real cuda.h in one translation unit.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

// In the global namespace, where abi/cuda_runtime.h declares two of them as well.
struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;
struct CUevent_st;

namespace halfwire::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = ::CUctx_st*;
using CUmodule = ::CUmod_st*;
using CUfunction = ::CUfunc_st*;
using CUstream = ::CUstream_st*;
using CUevent = ::CUevent_st*;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kErrorOutOfMemory = 2;
inline constexpr CUresult kErrorNotFound = 500;
inline constexpr CUresult kErrorNotReady = 600;

inline constexpr int kComputeCapabilityMajor = 75;  // CUdevice_attribute
inline constexpr int kComputeCapabilityMinor = 76;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDefault = 0;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureStatusNone = 0;
inline constexpr unsigned kEventRecordExternal = 1;
inline constexpr unsigned kEventWaitExternal = 1;

// Function pointers into the driver. All are set once findDriver() has succeeded.
struct Driver {
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetPCIBusId)(char* id, int bytes, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuModuleLoadData)(CUmodule* module, const void* image);
  CUresult (*cuModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  CUresult (*cuModuleUnload)(CUmodule module);
  CUresult (*cuLaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                             CUstream stream, void** params, void** extra);
  CUresult (*cuMemAlloc)(CUdeviceptr* pointer, size_t bytes);
  CUresult (*cuMemFree)(CUdeviceptr pointer);
  CUresult (*cuMemHostAlloc)(void** pointer, size_t bytes, unsigned flags);
  CUresult (*cuMemFreeHost)(void* pointer);
  CUresult (*cuMemcpyAsync)(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
  CUresult (*cuMemsetD8Async)(CUdeviceptr pointer, unsigned char value, size_t bytes, CUstream stream);
  CUresult (*cuMemGetInfo)(size_t* free, size_t* total);
  CUresult (*cuStreamCreate)(CUstream* stream, unsigned flags);
  CUresult (*cuStreamDestroy)(CUstream stream);
  CUresult (*cuStreamSynchronize)(CUstream stream);
  CUresult (*cuStreamWaitEvent)(CUstream stream, CUevent event, unsigned flags);
  CUresult (*cuStreamGetCaptureInfo)(CUstream stream, int* status, unsigned long long* id);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CUresult (*cuEventCreate)(CUevent* event, unsigned flags);
  CUresult (*cuEventDestroy)(CUevent event);
  CUresult (*cuEventRecord)(CUevent event, CUstream stream);
  CUresult (*cuEventRecordWithFlags)(CUevent event, CUstream stream, unsigned flags);
  CUresult (*cuEventSynchronize)(CUevent event);
  CUresult (*cuEventQuery)(CUevent event);
  CUresult (*cuEventElapsedTime)(float* ms, CUevent start, CUevent end);

  // Ok, or "CALL: the driver's words"; kOutOfMemory for that error.
  Status check(const char* call, CUresult error) const;
};

// The driver that this process has already loaded. Never loads or initialises it: a process without CUDA
// stays so.
Result<Driver> findDriver();

}  // namespace halfwire::cuda
