#include "parity/findings/bias_grows.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace halfwire::parity {
namespace {

constexpr size_t kWindows = 5;
using Windows = std::array<double, kWindows>;

// Means of five windows of equal length over the last four fifths: the start is where curves fall fastest.
std::optional<Windows> windowsOf(const Subject& s, const Range& range) {
  Windows w{};
  const uint64_t span = range.end - range.first;
  for (size_t i = 0; i < kWindows; ++i) {
    const auto at = [&](size_t k) {
      return static_cast<uint32_t>(range.first + span / 5 + (span - span / 5) * k / kWindows);
    };
    const auto part = s.losses.between(at(i), at(i + 1));
    double sum = 0;
    size_t n = 0;
    for (const double v : part.loss) {
      if (!std::isfinite(v)) continue;
      sum += v;
      ++n;
    }
    if (n < 5) return std::nullopt;
    w[i] = sum / static_cast<double>(n);
  }
  return w;
}

double slope(const Windows& w) {
  double sum = 0;
  for (size_t i = 0; i < kWindows; ++i) sum += (static_cast<double>(i) - 2) * w[i];
  return sum / 10;
}

}  // namespace

void findBiasGrows(const std::vector<const Subject*>& baseline, const std::vector<const Subject*>& candidate,
                   const std::vector<const Subject*>& partners, const Range& range, const NoiseFloor& noise,
                   double margin, Findings* out) {
  Windows mean{};
  std::vector<double> slopes[2];
  for (const bool side : {false, true}) {
    const auto& runs = side ? candidate : baseline;
    for (const Subject* s : runs) {
      const auto w = windowsOf(*s, range);
      if (!w) return;
      slopes[side].push_back(slope(*w));
      for (size_t i = 0; i < kWindows; ++i)
        mean[i] += (side ? 1 : -1) * (*w)[i] / static_cast<double>(runs.size());
    }
  }
  const double last = mean[kWindows - 1];
  const double change = slope(mean) * (kWindows - 1);
  // The difference ends past half of the margin, on the side it grows to, and most of it came with the steps.
  if (std::fabs(last) < margin / 2 || last * change <= 0 || std::fabs(change) < std::fabs(last) / 2) return;
  Finding f{"bias-grows", Severity::kWarning, candidate.front()->label,
            range.first + (range.end - range.first) / 5, std::nullopt};
  f.evidence =
      fmt::format("candidate - baseline by fifths of the steps: {:.3g}, {:.3g}, {:.3g}, {:.3g}, {:.3g}",
                  mean[0], mean[1], mean[2], mean[3], mean[4]);
  const bool paired = !partners.empty();
  if (slopes[0].size() >= 3 && slopes[1].size() >= 3) {
    Estimate e = welch(moments(slopes[0]), moments(slopes[1]));
    if (paired) {
      std::vector<double> gaps;
      for (size_t i = 0; i < candidate.size(); ++i) {
        const size_t of = std::find(baseline.begin(), baseline.end(), partners[i]) - baseline.begin();
        gaps.push_back(slopes[1][i] - slopes[0][of]);
      }
      const Moments m = moments(gaps);
      e = {m.mean, std::sqrt(m.variance / static_cast<double>(m.n)), static_cast<double>(m.n - 1)};
    }
    if (!(e.standard_error > 0)) return;
    const double p = 2 * studentCdf(-std::fabs(e.value) / e.standard_error, e.df);
    if (p > 0.01) return;
    f.evidence += fmt::format("; its slope is not chance (p = {:.1g})", p);
  } else if (noise.source == NoiseFloor::Source::kNoiseRuns && noise.sd > 0) {
    const double t = std::fabs(last) / (noise.sd * std::sqrt(1.0 / static_cast<double>(baseline.size()) +
                                                             1.0 / static_cast<double>(candidate.size())));
    if (2 * studentCdf(-t, noise.df) > 0.002) return;
    f.evidence += fmt::format("; {:.1f} times the noise between runs", t);
  } else {
    // One run a side: what grows may be chance that lasts, so this is no more than worth knowing.
    bool monotone = true;
    for (size_t i = 1; i < kWindows; ++i) monotone = monotone && (mean[i] - mean[i - 1]) * change > 0;
    if (!paired || !monotone || std::fabs(last) < 2 * margin) return;
    f.severity = Severity::kNote;
    f.evidence += "; one run a side cannot tell this from chance";
  }
  f.cause =
      "rounding that leans one way (quantization without error feedback, stochastic rounding with a bias), "
      "or a rate or decay "
      "that differs a little";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
