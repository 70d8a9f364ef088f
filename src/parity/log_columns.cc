#include "parity/log_columns.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace halfwire::parity {
namespace {

struct Known {
  std::string_view name;
  LogField field;
};

// In order: of several columns for one field the first named here is taken.
constexpr Known kNames[] = {
    {"step", LogField::kStep},
    {"global_step", LogField::kStep},
    {"trainer/global_step", LogField::kStep},
    {"_step", LogField::kStep},
    {"iteration", LogField::kStep},
    {"iter", LogField::kStep},
    {"train/global_step", LogField::kStep},
    {"loss", LogField::kLoss},
    {"lm loss", LogField::kLoss},
    {"lm_loss", LogField::kLoss},
    {"train/loss", LogField::kLoss},
    {"train_loss", LogField::kLoss},
    {"training_loss", LogField::kLoss},
    {"training loss", LogField::kLoss},
    {"loss/train", LogField::kLoss},
    {"train/lm loss", LogField::kLoss},
    {"lm-loss-training/lm loss", LogField::kLoss},
    {"train_loss_step", LogField::kLoss},
    {"reduced_train_loss", LogField::kLoss},
    {"loss_metrics/global_avg_loss", LogField::kLoss},
    {"lr", LogField::kRate},
    {"learning_rate", LogField::kRate},
    {"learning-rate", LogField::kRate},
    {"learning rate", LogField::kRate},
    {"train/lr", LogField::kRate},
    {"train/learning_rate", LogField::kRate},
    {"learning-rate/learning-rate", LogField::kRate},
    {"grad_norm", LogField::kGradNorm},
    {"grad-norm", LogField::kGradNorm},
    {"grad norm", LogField::kGradNorm},
    {"gradient_norm", LogField::kGradNorm},
    {"train/grad_norm", LogField::kGradNorm},
    {"grad-norm/grad-norm", LogField::kGradNorm},
    {"loss_scale", LogField::kLossScale},
    {"loss-scale", LogField::kLossScale},
    {"loss scale", LogField::kLossScale},
    {"train/loss_scale", LogField::kLossScale},
    {"loss-scale/loss-scale", LogField::kLossScale},
    {"number of skipped iterations", LogField::kSkipped},
    {"skipped", LogField::kSkipped},
    {"consumed samples", LogField::kSamples},
    {"consumed_samples", LogField::kSamples},
    {"samples", LogField::kSamples},
};

float toShort(double v) {
  const double most = std::numeric_limits<float>::max();
  return std::isinf(v) ? static_cast<float>(v) : static_cast<float>(std::clamp(v, -most, most));
}

}  // namespace

std::optional<LogName> logName(std::string_view name) {
  // "run - train/loss" of Weights & Biases.
  const size_t dash = name.rfind(" - ");
  if (dash != std::string_view::npos) name.remove_prefix(dash + 3);
  std::string lower;
  for (const char c : name.substr(0, 100)) lower += c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  while (!lower.empty() && lower.back() == ' ') lower.pop_back();
  lower.erase(0, lower.find_first_not_of(' '));
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (lower == kNames[i].name) return LogName{kNames[i].field, static_cast<int>(i)};
  }
  return std::nullopt;
}

std::optional<double> parseLogNumber(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t' || text.front() == '+'))
    text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t' || text.back() == '\r'))
    text.remove_suffix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size() || text.empty()) return std::nullopt;
  // Too small for 64 bits is 0, too large is not a number anyone wrote.
  if (error == std::errc::result_out_of_range) return std::nullopt;
  if (error != std::errc()) return std::nullopt;
  // NaN is kept as infinity: see record.h.
  return std::isnan(value) ? std::numeric_limits<double>::infinity() : value;
}

void LogBuilder::add(uint32_t step, LogField field, double value) { values_.push_back({step, field, value}); }

Result<Run> LogBuilder::finish(const std::string& path, Source source, const std::string& what_is_needed) {
  std::stable_sort(values_.begin(), values_.end(),
                   [](const Value& a, const Value& b) { return a.step < b.step; });
  RankRecord rank;
  rank.groups.resize(1);
  Group& group = rank.groups.front();
  bool any_loss = false;
  const size_t rows = values_.size();
  for (const Value& v : values_) {
    if (rank.step.empty() || rank.step.back() != v.step) rank.step.push_back(v.step);
    const size_t row = rank.step.size() - 1;
    switch (v.field) {
      case LogField::kStep:
        break;
      case LogField::kLoss:
        rank.loss.set(row, v.value, rows);
        any_loss = true;
        break;
      case LogField::kRate:
        group.lr.set(row, v.value, rows);
        break;
      case LogField::kGradNorm:
        group.grad_norm.set(row, toShort(v.value), rows);
        break;
      case LogField::kLossScale:
        rank.loss_scale.set(row, toShort(v.value), rows);
        break;
      case LogField::kSkipped:
        rank.skipped.set(row, v.value > 0 ? 1 : 0, rows);
        break;
      case LogField::kSamples:
        if (v.value >= 0 && v.value < 9e18) rank.samples.set(row, static_cast<int64_t>(v.value), rows);
        break;
    }
  }
  if (!any_loss) return Status(StatusCode::kInvalidData, fmt::format("{}: {}", path, what_is_needed));
  Run run;
  run.path = path;
  run.source = source;
  run.ranks.push_back(std::move(rank));
  return run;
}

Result<bool> LineReader::next(std::string_view* line) {
  while (true) {
    const size_t end = buffer_.find('\n', from_);
    if (end != std::string::npos || (at_end_ && from_ < buffer_.size())) {
      const size_t stop = std::min(end, buffer_.size());
      ++number_;
      if (stop - from_ > kMostBytes) break;
      *line = std::string_view(buffer_).substr(from_, stop - from_);
      if (!line->empty() && line->back() == '\r') line->remove_suffix(1);
      from_ = std::min(stop + 1, buffer_.size());
      return true;
    }
    if (at_end_) return false;
    if (buffer_.size() - from_ > kMostBytes) {
      ++number_;
      break;
    }
    buffer_.erase(0, from_);
    from_ = 0;
    const size_t have = buffer_.size();
    buffer_.resize(have + (1 << 18));
    const Result<size_t> got = source_->read(buffer_.data() + have, buffer_.size() - have);
    if (!got.ok()) return got.status();
    at_end_ = got.value() < buffer_.size() - have;
    buffer_.resize(have + got.value());
    if (progress_) progress_(name_, source_->position(), source_->size());
  }
  return Status(StatusCode::kInvalidData, fmt::format("{}: line {} is longer than {} bytes; this is no log",
                                                      name_, number_, kMostBytes));
}

}  // namespace halfwire::parity
