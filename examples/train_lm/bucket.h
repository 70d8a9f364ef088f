// The parameters of one half of the model as one flat fp32 buffer, their gradients as one bf16 message, and
// the Adam state between them (Kingma and Ba 2015). Identical inputs give identical bits on every rank.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "abi/cuda_runtime.h"
#include "abi/nccl.h"

namespace train_lm {

struct AdamSettings {
  float rate = 1e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
};

class Bucket {
 public:
  // Moves the parameters into one buffer; they stay the model's, as views of it.
  explicit Bucket(const std::vector<torch::Tensor>& parameters);
  ~Bucket();
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;

  uint64_t elements() const { return elements_; }
  float* master() const { return master_; }

  // Rounds the gradients that backward left to bf16, averages them over the ranks behind `stream`, and
  // forgets them.
  ncclResult_t startAverage(ncclComm_t comm, cudaStream_t stream);

  // Blocks until the average is there, then updates the parameters. `step` counts from 1.
  void update(const AdamSettings& settings, float rate, int step);

 private:
  std::vector<torch::Tensor> parameters_;
  uint64_t elements_ = 0;
  float* master_ = nullptr;
  uint16_t* gradients_ = nullptr;  // bf16
  std::vector<float> mean_, square_;
  cudaEvent_t arrived_ = nullptr;
};

}  // namespace train_lm
