#include "bucket.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace train_lm {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// To nearest even; a NaN stays one.
uint16_t toBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : 0x7fff);
}

float fromBf16(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Every element on its own and without fused operations: the wide version gives the bits of the narrow one.
#if defined(__x86_64__)
#define TRAIN_LM_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define TRAIN_LM_WIDE
#endif

TRAIN_LM_WIDE void roundAll(const float* __restrict in, uint64_t count, uint16_t* __restrict out) {
  for (uint64_t i = 0; i < count; ++i) out[i] = toBf16(in[i]);
}

struct AdamStep {
  float rate, beta1, beta2, epsilon, correct1, correct2;
};

TRAIN_LM_WIDE void adam(const AdamStep& step, uint64_t count, const uint16_t* __restrict gradients,
                        float* __restrict mean, float* __restrict square, float* __restrict weights) {
  const AdamStep s = step;
  for (uint64_t i = 0; i < count; ++i) {
    const float g = fromBf16(gradients[i]);
    const float m = s.beta1 * mean[i] + (1.0f - s.beta1) * g;
    const float v = s.beta2 * square[i] + (1.0f - s.beta2) * g * g;
    mean[i] = m;
    square[i] = v;
    weights[i] -= s.rate * (m * s.correct1) / (std::sqrt(v * s.correct2) + s.epsilon);
  }
}

}  // namespace

Bucket::Bucket(const std::vector<torch::Tensor>& parameters) : parameters_(parameters) {
  for (const torch::Tensor& p : parameters_) elements_ += static_cast<uint64_t>(p.numel());
  void* memory = nullptr;
  check(cudaMalloc(&memory, elements_ * sizeof(float)));
  master_ = static_cast<float*>(memory);
  check(cudaMalloc(&memory, elements_ * sizeof(uint16_t)));
  gradients_ = static_cast<uint16_t*>(memory);
  check(cudaEventCreateWithFlags(&arrived_, cudaEventDisableTiming));
  mean_.assign(elements_, 0.0f);
  square_.assign(elements_, 0.0f);
  uint64_t at = 0;
  for (torch::Tensor& p : parameters_) {
    auto view = torch::from_blob(master_ + at, p.sizes(), torch::kFloat32);
    view.copy_(p.detach());
    p.set_data(view);
    at += static_cast<uint64_t>(p.numel());
  }
}

Bucket::~Bucket() {
  cudaEventDestroy(arrived_);
  cudaFree(gradients_);
  cudaFree(master_);
}

ncclResult_t Bucket::startAverage(ncclComm_t comm, cudaStream_t stream) {
  uint64_t at = 0;
  for (torch::Tensor& p : parameters_) {
    const auto n = static_cast<uint64_t>(p.numel());
    const torch::Tensor gradient = p.grad().contiguous();
    roundAll(gradient.data_ptr<float>(), n, gradients_ + at);
    at += n;
    p.mutable_grad().reset();
  }
  const ncclResult_t result =
      ncclAllReduce(gradients_, gradients_, elements_, ncclBfloat16, ncclAvg, comm, stream);
  check(cudaEventRecord(arrived_, stream));
  return result;
}

void Bucket::update(const AdamSettings& s, float rate, int step) {
  check(cudaEventSynchronize(arrived_));
  const float correct1 = 1.0f / (1.0f - std::pow(s.beta1, static_cast<float>(step)));
  const float correct2 = 1.0f / (1.0f - std::pow(s.beta2, static_cast<float>(step)));
  adam({rate, s.beta1, s.beta2, s.epsilon, correct1, correct2}, elements_, gradients_, mean_.data(),
       square_.data(), master_);
}

}  // namespace train_lm
