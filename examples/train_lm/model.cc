#include "model.h"

#include <cmath>

namespace train_lm {

namespace nn = torch::nn;

BlockImpl::BlockImpl(const ModelShape& s) : heads_(s.heads) {
  norm1_ = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({s.width})));
  norm2_ = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({s.width})));
  qkv_ = register_module("qkv", nn::Linear(s.width, 3 * s.width));
  project_ = register_module("project", nn::Linear(s.width, s.width));
  expand_ = register_module("expand", nn::Linear(s.width, 4 * s.width));
  contract_ = register_module("contract", nn::Linear(4 * s.width, s.width));
  // Residual branches start small, or their sum grows with depth.
  const torch::NoGradGuard guard;
  const double scale = 1.0 / std::sqrt(2.0 * static_cast<double>(s.layers));
  project_->weight.mul_(scale);
  contract_->weight.mul_(scale);
}

torch::Tensor BlockImpl::forward(torch::Tensor x, const torch::Tensor& mask) {
  const int64_t batch = x.size(0), context = x.size(1), width = x.size(2);
  const auto c = qkv_(norm1_(x)).view({batch, context, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  auto scores = torch::matmul(c[0], c[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(width / heads_));
  scores = (scores + mask).softmax(-1);
  x = x + project_(torch::matmul(scores, c[2]).transpose(1, 2).reshape({batch, context, width}));
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
  auto x = token_(bytes) + position_->weight.unsqueeze(0);
  for (Block& block : blocks_) x = block(x, mask);
  return x;
}

UpperImpl::UpperImpl(const ModelShape& s) {
  for (int64_t i = s.layers / 2; i < s.layers; ++i) {
    blocks_.push_back(register_module("block" + std::to_string(i), Block(s)));
  }
  norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({s.width})));
  output_ = register_module("output", nn::Linear(s.width, s.vocabulary));
}

torch::Tensor UpperImpl::forward(torch::Tensor x, const torch::Tensor& mask, const torch::Tensor& targets) {
  for (Block& block : blocks_) x = block(x, mask);
  const auto logits = output_(norm_(x));
  return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}));
}

torch::Tensor causalMask(int64_t context) { return torch::full({context, context}, -1e30).triu(1); }

}  // namespace train_lm
