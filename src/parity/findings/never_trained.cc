// never-trained: a loss that did not move. Any two runs that learn nothing look equivalent.
#include <fmt/format.h>

#include <vector>

#include "parity/findings/findings.h"
#include "parity/statistics.h"

namespace halfwire::parity {

std::optional<LossDrop> lossDrop(LossSeries::Part part) {
  std::vector<double> finite;
  finite.reserve(part.loss.size());
  for (const double v : part.loss) {
    if (std::isfinite(v)) finite.push_back(v);
  }
  if (finite.size() < 20) return std::nullopt;
  const size_t head = std::max<size_t>(5, finite.size() / 20);
  const size_t tail = std::max<size_t>(5, finite.size() / 5);
  const std::span<const double> first = std::span(finite).first(head);
  const std::span<const double> last = std::span(finite).last(tail);
  const Moments a = moments(first), b = moments(last);
  const double tau = autocorrelationTime(last);
  LossDrop d{a.mean, b.mean, a.mean - b.mean, 0};
  d.standard_error =
      std::sqrt(a.variance / static_cast<double>(a.n) + b.variance * tau / static_cast<double>(b.n));
  return d;
}

void findNeverTrained(const Subject& s, Findings* out) {
  // What went on from a checkpoint may have little left to learn.
  if (s.run->ranks.front().header.resumed_from.value_or(0) > 0) return;
  const auto d = lossDrop({s.losses.step, s.losses.loss});
  if (!d || (d->drop > 0 && d->drop > 3 * d->standard_error)) return;
  Finding f{"never-trained", Severity::kRefusal, s.label, std::nullopt, std::nullopt};
  f.evidence = fmt::format("the loss went from {:.6g} to {:.6g}: {:.2g} with a standard error of {:.2g}",
                           d->head, d->tail, -d->drop, d->standard_error);
  f.cause = "the run is too short or too noisy to show learning, its rate is far off, or nothing is trained";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
