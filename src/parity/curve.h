// A loss curve's tail mean, and how many steps earlier the curve was at another loss.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "parity/series.h"

namespace halfwire::parity {

class Curve {
 public:
  // Finite losses of [first, end); `window` of them, the last, are the tail.
  Curve(LossSeries::Part part, uint32_t tail_from);

  bool usable() const { return window_ >= 1 && loss_.size() > window_; }
  double tail() const;
  // How many steps before its end the running mean over the tail's length was last at `delta` above the tail
  // mean. Below it (the curve never got there): the negative number of steps it would take at the slope of
  // its end. Nothing where the curve has no such place or does not fall.
  std::optional<double> stepsTo(double delta) const;
  // The running mean so many steps before the end, less the tail mean.
  std::optional<double> above(uint64_t steps) const;

 private:
  double mean(size_t end) const;  // of the window that ends before `end`
  std::vector<uint32_t> step_;
  std::vector<double> loss_, sums_;
  size_t window_ = 0;
};

}  // namespace halfwire::parity
