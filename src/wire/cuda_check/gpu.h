// The GPU as the check program and `halfwire bench codec` drive it: the driver API found by dlopen, one primary context, and small
// owners for memory, streams and events. A failed driver call ends the program with its name; nothing here
// returns an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device/cuda_driver.h"

struct CUgraph_st;
struct CUgraphExec_st;

namespace halfwire::check {

using cuda::CUcontext;
using cuda::CUdeviceptr;
using cuda::CUevent;
using cuda::CUfunction;
using cuda::CUmodule;
using cuda::CUresult;
using cuda::CUstream;
using CUgraph = ::CUgraph_st*;
using CUgraphExec = ::CUgraphExec_st*;

// Everything the program uses beyond cuda::Driver. Filled by openGpu().
struct Gpu {
  cuda::Driver driver{};
  CUcontext context = nullptr;
  std::string name;
  int driver_version = 0;
  int capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  size_t memory = 0;

  CUresult (*cuCtxSetCurrent)(CUcontext);
  CUresult (*cuCtxSynchronize)();
  CUresult (*cuMemcpyHtoD)(CUdeviceptr, const void*, size_t);
  CUresult (*cuMemcpyDtoH)(void*, CUdeviceptr, size_t);
  CUresult (*cuMemcpyDtoDAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
  CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream);
  CUresult (*cuEventElapsedTime)(float*, CUevent, CUevent);
  CUresult (*cuStreamBeginCapture)(CUstream, int mode);
  CUresult (*cuStreamEndCapture)(CUstream, CUgraph*);
  CUresult (*cuGraphInstantiate)(CUgraphExec*, CUgraph, unsigned long long flags);
  CUresult (*cuGraphLaunch)(CUgraphExec, CUstream);
  CUresult (*cuGraphExecDestroy)(CUgraphExec);
  CUresult (*cuGraphDestroy)(CUgraph);

  // Ends the program with the driver's words unless `error` is success.
  void must(const char* what, CUresult error) const;
};

// Opens device 0 and makes its primary context current; false with the reason where there is none.
bool openGpu(Gpu* gpu, std::string* why);

// Device memory.
class Buffer {
 public:
  Buffer(const Gpu& gpu, size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <class T = void>
  T* at(size_t byte = 0) const {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(pointer_ + byte));
  }
  CUdeviceptr address(size_t byte = 0) const { return pointer_ + byte; }
  size_t size() const { return bytes_; }
  // Synchronous; the work that made or will use the bytes must be ordered by the caller.
  void upload(const void* from, size_t bytes, size_t at = 0) const;
  void download(void* to, size_t bytes, size_t at = 0) const;

 private:
  const Gpu& gpu_;
  CUdeviceptr pointer_ = 0;
  size_t bytes_;
};

class Stream {
 public:
  explicit Stream(const Gpu& gpu);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream get() const { return stream_; }
  void synchronize() const;

 private:
  const Gpu& gpu_;
  CUstream stream_ = nullptr;
};

// Timing events, reused.
class Timers {
 public:
  Timers(const Gpu& gpu, size_t count);
  ~Timers();
  Timers(const Timers&) = delete;
  Timers& operator=(const Timers&) = delete;
  void record(size_t i, CUstream stream) const;
  double seconds(size_t from, size_t to) const;

 private:
  const Gpu& gpu_;
  std::vector<CUevent> events_;
};

// A module of this program's own kernels.
class Module {
 public:
  Module(const Gpu& gpu, const void* image);
  CUfunction function(const std::string& name) const;
  bool has(const std::string& name) const;

 private:
  const Gpu& gpu_;
  CUmodule module_ = nullptr;
};

// Launches a kernel of a module; arguments must have exactly the types of its parameters.
template <class... Args>
void launch(const Gpu& gpu, CUfunction function, uint64_t grid, unsigned threads, CUstream stream,
            Args... args) {
  void* params[] = {&args...};
  gpu.must("cuLaunchKernel", gpu.driver.cuLaunchKernel(function, static_cast<unsigned>(grid), 1, 1, threads,
                                                       1, 1, 0, stream, params, nullptr));
}

}  // namespace halfwire::check
