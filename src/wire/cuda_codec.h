// From a job to the launches of the kernels in kernels.cu that carry it out: kernel, grid, arguments. Pure
// functions of the job; nothing here talks to CUDA.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "wire/codec.h"
#include "wire/cuda_params.h"

namespace halfwire {

// Number of kernels that an image may hold; kernels are known by their index below this.
inline constexpr uint32_t kCudaKernels = 115;

// The name of kernel `index` in the image, for example "halfwire_quantize_e4m3_bf16_hardware_1".
const std::string& cudaKernelName(uint32_t index);

// The path that the kernel belongs to, none where hardware and software share it. Images for GPUs below compute
// capability 8.9 hold no kernel of the hardware path.
std::optional<CodecPath> cudaKernelPath(uint32_t index);

// One kernel launch. `params` is the kernel's single argument.
struct CudaLaunch {
  uint32_t kernel = 0;
  uint32_t grid_x = 0;
  uint32_t grid_y = 1;
  uint32_t threads = 0;
  std::variant<QuantizeParams, DequantizeParams, ReduceParams, PerturbParams, CompareParams> params;

  // Address of the argument as cuLaunchKernel wants it.
  void* argument() {
    return std::visit([](auto& p) -> void* { return &p; }, params);
  }
};

// Launch number `part` of the job, which must have passed checkJob; false when there are no more. Almost
// every job is one launch: more are needed beyond 65,535 segments, none for a job without elements.
bool cudaLaunch(const QuantizeJob& job, CodecPath path, uint32_t part, CudaLaunch* out);
bool cudaLaunch(const DequantizeJob& job, CodecPath path, uint32_t part, CudaLaunch* out);
bool cudaLaunch(const ReduceJob& job, CodecPath path, uint32_t part, CudaLaunch* out);
bool cudaLaunch(const PerturbJob& job, CodecPath path, uint32_t part, CudaLaunch* out);
bool cudaLaunch(const CompareJob& job, CodecPath path, uint32_t part, CudaLaunch* out);

// A launch of kernel `index` that reads and writes nothing, to have it loaded.
CudaLaunch cudaEmptyLaunch(uint32_t index);

}  // namespace halfwire
