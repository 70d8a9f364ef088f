// A byte-level transformer decoder (Radford et al. 2019: pre-norm blocks, GELU, learned positions) in two
// halves, so that the gradients of the upper half can travel while the lower half still runs backward.
#pragma once

#include <torch/torch.h>

#include <vector>

namespace train_lm {

struct ModelShape {
  int64_t width = 240;
  int64_t heads = 6;
  int64_t layers = 6;
  int64_t context = 64;
  int64_t vocabulary = 256;  // bytes
};

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const ModelShape& shape);
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& mask);

 private:
  int64_t heads_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, project_{nullptr}, expand_{nullptr}, contract_{nullptr};
};
TORCH_MODULE(Block);

// Embeddings and the first half of the blocks.
class LowerImpl : public torch::nn::Module {
 public:
  explicit LowerImpl(const ModelShape& shape);
  torch::Tensor forward(const torch::Tensor& bytes, const torch::Tensor& mask);

 private:
  torch::nn::Embedding token_{nullptr}, position_{nullptr};
  std::vector<Block> blocks_;
};
TORCH_MODULE(Lower);

// The other blocks, the last norm and the output; returns the mean cross entropy in nats.
class UpperImpl : public torch::nn::Module {
 public:
  explicit UpperImpl(const ModelShape& shape);
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& mask, const torch::Tensor& targets);

 private:
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear output_{nullptr};
};
TORCH_MODULE(Upper);

// Added to attention scores: 0 for what a position may see, a large negative number for what comes after it.
torch::Tensor causalMask(int64_t context);

}  // namespace train_lm
