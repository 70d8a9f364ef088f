#include "parity/curve.h"

#include <cmath>

namespace halfwire::parity {

Curve::Curve(LossSeries::Part part, uint32_t tail_from) {
  sums_.push_back(0);
  for (size_t i = 0; i < part.step.size(); ++i) {
    if (!std::isfinite(part.loss[i])) continue;
    step_.push_back(part.step[i]);
    loss_.push_back(part.loss[i]);
    sums_.push_back(sums_.back() + part.loss[i]);
    window_ += part.step[i] >= tail_from;
  }
}

double Curve::mean(size_t end) const {
  return (sums_[end] - sums_[end - window_]) / static_cast<double>(window_);
}

double Curve::tail() const { return window_ == 0 ? kAbsent : mean(loss_.size()); }

std::optional<double> Curve::stepsTo(double delta) const {
  if (!usable()) return std::nullopt;
  const size_t n = loss_.size();
  const double end = tail();
  if (delta == 0) return 0;
  if (delta < 0) {
    const size_t back = std::min(window_, n - window_);
    const double steps = static_cast<double>(step_[n - 1]) - step_[n - 1 - back];
    const double slope = (mean(n - back) - end) / steps;  // fall for a step
    if (!(slope > 0)) return std::nullopt;
    return delta / slope;
  }
  // A curve with noise crosses a level many times: half-way between the first time below and the last time
  // above.
  const double level = end + delta, stop = step_[n - 1];
  std::optional<double> first, last;
  for (size_t at = window_; at <= n && !first; ++at) {
    if (mean(at) < level) first = step_[at - 1];
  }
  for (size_t at = n; at >= window_ && !last; --at) {
    if (mean(at) >= level) last = step_[at - 1];
  }
  if (!first || !last) return std::nullopt;
  return stop - 0.5 * (*first + *last);
}

std::optional<double> Curve::above(uint64_t steps) const {
  if (!usable()) return std::nullopt;
  const size_t n = loss_.size();
  for (size_t at = n; at >= window_; --at) {
    if (static_cast<uint64_t>(step_[n - 1] - step_[at - 1]) >= steps) return mean(at) - tail();
  }
  return std::nullopt;
}

}  // namespace halfwire::parity
