#include <algorithm>
#include <nlohmann/json.hpp>

#include "page/page.h"
#include "parity/reports.h"

namespace halfwire::parity {

extern const char* const kParityHtml;

namespace {

using nlohmann::json;

constexpr size_t kPoints = 800;    // of a curve; a screen has hardly more
constexpr size_t kDrawnRuns = 12;  // of a side

// Means of bins of equal numbers of steps; bins are the same for all curves, so that they can be subtracted.
class Bins {
 public:
  Bins(uint32_t first, uint32_t end) : first_(first) {
    const uint64_t steps = std::max<uint64_t>(1, uint64_t{end} - first);
    width_ = (steps + kPoints - 1) / kPoints;
    count_ = (steps + width_ - 1) / width_;
  }
  uint64_t width() const { return width_; }
  json steps() const {
    json j = json::array();
    for (size_t i = 0; i < count_; ++i)
      j.push_back(static_cast<double>(first_) + static_cast<double>(i * width_) +
                  static_cast<double>(width_ - 1) / 2);
    return j;
  }
  // `value(i)` of the steps given; absent and infinite ones are left out.
  template <class Value>
  std::vector<double> means(const std::vector<uint32_t>& steps, Value value) const {
    std::vector<double> sums(count_, 0);
    std::vector<size_t> n(count_, 0);
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i] < first_) continue;
      const size_t bin = (steps[i] - first_) / width_;
      if (bin >= count_) break;
      const double v = value(i);
      if (!std::isfinite(v)) continue;
      sums[bin] += v;
      ++n[bin];
    }
    for (size_t b = 0; b < count_; ++b) sums[b] = n[b] > 0 ? sums[b] / static_cast<double>(n[b]) : kAbsent;
    return sums;
  }

 private:
  uint32_t first_;
  uint64_t width_ = 1, count_ = 1;
};

json numbers(const std::vector<double>& values) {
  json j = json::array();
  for (const double v : values) {
    if (std::isfinite(v)) {
      j.push_back(static_cast<float>(v));
    } else {
      j.push_back(nullptr);
    }
  }
  return j;
}

json draw(const Comparison& c, const Inputs& inputs) {
  uint32_t first = ~uint32_t{0}, end = 0;
  for (const auto* runs : {&inputs.baseline, &inputs.candidate}) {
    for (const Run& run : *runs) {
      first = std::min(first, firstStep(run));
      end = std::max(end, lastStep(run) + 1);
    }
  }
  const Bins bins(first, end);
  json j;
  j["steps"] = bins.steps();
  j["bin"] = bins.width();
  j["curves"] = json::array();
  std::vector<double> mean[2];
  std::vector<size_t> n[2];
  for (const bool candidate : {false, true}) {
    const std::vector<Run>& runs = candidate ? inputs.candidate : inputs.baseline;
    for (size_t i = 0; i < runs.size(); ++i) {
      const Run& run = runs[i];
      const LossSeries losses = lossSeries(run);
      const std::vector<double> loss = bins.means(losses.step, [&](size_t k) { return losses.loss[k]; });
      auto& m = mean[candidate];
      m.resize(loss.size(), 0);
      n[candidate].resize(loss.size(), 0);
      for (size_t b = 0; b < loss.size(); ++b) {
        if (std::isnan(loss[b])) continue;
        m[b] += loss[b];
        ++n[candidate][b];
      }
      if (i >= kDrawnRuns) continue;
      const auto norm = [&](ShortColumn Group::* column) {
        const RankRecord& rank = run.ranks.front();
        return bins.means(rank.step, [&](size_t k) { return joinedNorm(run, rank.step[k], column); });
      };
      j["curves"].push_back({{"side", candidate ? "candidate" : "baseline"},
                             {"label", c.runs[(candidate ? inputs.baseline.size() : 0) + i].label},
                             {"loss", numbers(loss)},
                             {"grad_norm", numbers(norm(&Group::grad_norm))},
                             {"update_norm", numbers(norm(&Group::update_norm))}});
    }
  }
  for (const bool side : {false, true}) {
    for (size_t b = 0; b < mean[side].size(); ++b)
      mean[side][b] = n[side][b] > 0 ? mean[side][b] / static_cast<double>(n[side][b]) : kAbsent;
  }
  j["baseline_mean"] = numbers(mean[0]);
  j["difference"] = nullptr;
  if (!mean[1].empty()) {
    std::vector<double> d(mean[0].size());
    for (size_t b = 0; b < d.size(); ++b) d[b] = mean[1][b] - mean[0][b];
    j["difference"] = numbers(d);
  }
  return j;
}

}  // namespace

std::string parityHtml(const Comparison& c, const Inputs& inputs) {
  const std::string data = "{\"report\":" + parityJson(c) + ",\"draw\":" +
                           draw(c, inputs).dump(-1, ' ', false, json::error_handler_t::replace) + "}";
  return fillPage(kParityHtml, data);
}

}  // namespace halfwire::parity
