#include "model.h"

#include <cmath>

namespace train_lm {

namespace nn = torch::nn;

DenseImpl::DenseImpl(int64_t inputs, int64_t outputs, double scale) {
  const double bound = scale / std::sqrt(static_cast<double>(inputs));
  weight_ = register_parameter("weight", torch::empty({inputs, outputs}).uniform_(-bound, bound));
  bias_ = register_parameter("bias", torch::zeros({outputs}));
}

BlockImpl::BlockImpl(const ModelShape& s) : heads_(s.heads), context_(s.context) {
  // Residual branches start small, or their sum grows with depth.
  const double scale = 1.0 / std::sqrt(2.0 * static_cast<double>(s.layers));
  norm1_ = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({s.width})));
  norm2_ = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({s.width})));
  qkv_ = register_module("qkv", Dense(s.width, 3 * s.width));
  project_ = register_module("project", Dense(s.width, s.width, scale));
  expand_ = register_module("expand", Dense(s.width, 4 * s.width));
  contract_ = register_module("contract", Dense(4 * s.width, s.width, scale));
}

torch::Tensor BlockImpl::forward(torch::Tensor x, const torch::Tensor& mask) {
  const int64_t rows = x.size(0), width = x.size(1), batch = rows / context_;
  const auto c = qkv_(norm1_(x)).view({batch, context_, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  auto scores = torch::matmul(c[0], c[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(width / heads_));
  scores = (scores + mask).softmax(-1);
  x = x + project_(torch::matmul(scores, c[2]).transpose(1, 2).reshape({rows, width}));
  return x + contract_(torch::gelu(expand_(norm2_(x))));
}

LowerImpl::LowerImpl(const ModelShape& s) {
  token_ = register_module("token", nn::Embedding(s.vocabulary, s.width));
  position_ = register_module("position", nn::Embedding(s.context, s.width));
  const torch::NoGradGuard guard;
  token_->weight.mul_(0.1);
  position_->weight.mul_(0.1);
  for (int64_t i = 0; i < s.layers / 2; ++i) {
    blocks_.push_back(register_module("block" + std::to_string(i), Block(s)));
  }
}

torch::Tensor LowerImpl::forward(const torch::Tensor& bytes, const torch::Tensor& mask) {
  auto x = (token_(bytes) + position_->weight.unsqueeze(0)).view({bytes.numel(), -1});
  for (Block& block : blocks_) x = block(x, mask);
  return x;
}

UpperImpl::UpperImpl(const ModelShape& s) {
  for (int64_t i = s.layers / 2; i < s.layers; ++i) {
    blocks_.push_back(register_module("block" + std::to_string(i), Block(s)));
  }
  norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({s.width})));
  output_ = register_module("output", Dense(s.width, s.vocabulary));
}

torch::Tensor UpperImpl::forward(torch::Tensor x, const torch::Tensor& mask, const torch::Tensor& targets) {
  for (Block& block : blocks_) x = block(x, mask);
  return nn::functional::cross_entropy(output_(norm_(x)), targets.view({-1}));
}

torch::Tensor causalMask(int64_t context) { return torch::full({context, context}, -1e30).triu(1); }

}  // namespace train_lm
