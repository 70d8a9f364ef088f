// What both programs feed to a collective and hold its result against: normally distributed numbers that
// every rank can make for every rank, an error in fp64, and a hash of the bits.
#pragma once

#include <cuda_bf16.h>

#include "pair.h"

namespace halfwire::two_gpu {

__host__ __device__ inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Element `i` of rank `rank`, N(0, 1) times `scale` rounded to bf16: the same wherever it is computed.
__device__ inline __nv_bfloat16 element(int rank, uint64_t i, float scale) {
  const uint64_t h = mix(i * 2 + static_cast<uint64_t>(rank) + 0x9e3779b97f4a7c15ull);
  const float u = (static_cast<float>(h >> 40) + 0.5f) * 0x1p-24f;
  const float v = static_cast<float>((h >> 16) & 0xffffff) * 0x1p-24f;
  return __float2bfloat16_rn(scale * sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
}

__global__ void fillKernel(__nv_bfloat16* out, int rank, uint64_t n, float scale) {
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += uint64_t{gridDim.x} * blockDim.x) {
    out[i] = element(rank, i, scale);
  }
}

// Which inputs make element i of the result: the sum of both ranks' element `first + i`, or the element
// (first + i % part) of rank i / part.
struct Expected {
  bool sum = true;
  uint64_t first = 0;
  uint64_t part = 0;
};

struct ErrorSums {
  double error = 0;
  double total = 0;
  unsigned long long hash = 0;
};

__global__ void compareKernel(const __nv_bfloat16* got, uint64_t n, Expected e, float scale, ErrorSums* out) {
  double error = 0;
  double total = 0;
  unsigned long long hash = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += uint64_t{gridDim.x} * blockDim.x) {
    double want = 0;
    if (e.sum) {
      for (int rank = 0; rank < kRanks; ++rank)
        want += static_cast<double>(__bfloat162float(element(rank, e.first + i, scale)));
    } else {
      want = static_cast<double>(
          __bfloat162float(element(static_cast<int>(i / e.part), e.first + i % e.part, scale)));
    }
    const double difference = static_cast<double>(__bfloat162float(got[i])) - want;
    error += difference * difference;
    total += want * want;
    hash += mix((i << 16) + __bfloat16_as_ushort(got[i]));
  }
  atomicAdd(&out->error, error);
  atomicAdd(&out->total, total);
  atomicAdd(&out->hash, hash);
}

inline void fill(void* out, int rank, uint64_t n, float scale = 1.0f) {
  fillKernel<<<1056, 256>>>(static_cast<__nv_bfloat16*>(out), rank, n, scale);
  check(cudaDeviceSynchronize(), "cannot make the input");
}

// Of this rank's result alone.
inline ErrorSums compare(const void* got, uint64_t n, const Expected& expected, float scale = 1.0f) {
  static ErrorSums* sums = [] {
    ErrorSums* p = nullptr;
    check(cudaMalloc(&p, sizeof(ErrorSums)), "no memory");
    return p;
  }();
  check(cudaMemset(sums, 0, sizeof(ErrorSums)), "cannot clear");
  compareKernel<<<1056, 256>>>(static_cast<const __nv_bfloat16*>(got), n, expected, scale, sums);
  ErrorSums host;
  check(cudaMemcpy(&host, sums, sizeof host, cudaMemcpyDeviceToHost), "cannot compare");
  return host;
}

}  // namespace halfwire::two_gpu
