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
  int64_t context = 32;
  int64_t vocabulary = 256;  // bytes
};

// y = x W + b with W stored as [inputs, outputs]: its gradient comes out of the matrix product in that order
// and needs no transposed copy, as torch::nn::Linear's would.
class DenseImpl : public torch::nn::Module {
 public:
  DenseImpl(int64_t inputs, int64_t outputs, double scale = 1.0);
  torch::Tensor forward(const torch::Tensor& x) { return torch::addmm(bias_, x, weight_); }

 private:
  torch::Tensor weight_, bias_;
};
TORCH_MODULE(Dense);

// Takes and returns [batch * context, width].
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelShape& shape);
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& mask);

 private:
  int64_t heads_, context_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  Dense qkv_{nullptr}, project_{nullptr}, expand_{nullptr}, contract_{nullptr};
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
  Dense output_{nullptr};
};
TORCH_MODULE(Upper);

// Added to attention scores: 0 for what a position may see, a large negative number for what comes after it.
torch::Tensor causalMask(int64_t context);

}  // namespace train_lm
