#include "parity/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace halfwire::parity {
namespace {

// The continued fraction of the incomplete beta function; converges fast for x < (a + 1) / (a + b + 2).
double betaFraction(double a, double b, double x) {
  constexpr double kTiny = 1e-300;
  constexpr double kEpsilon = 1e-16;
  double c = 1;
  double d = 1 - (a + b) * x / (a + 1);
  if (std::fabs(d) < kTiny) d = kTiny;
  d = 1 / d;
  double h = d;
  for (int m = 1; m < 10'000; ++m) {
    const double m2 = 2.0 * m;
    const auto turn = [&](double numerator) {
      d = 1 + numerator * d;
      if (std::fabs(d) < kTiny) d = kTiny;
      c = 1 + numerator / c;
      if (std::fabs(c) < kTiny) c = kTiny;
      d = 1 / d;
      h *= d * c;
    };
    turn(m * (b - m) * x / ((a + m2 - 1) * (a + m2)));
    const double before = h;
    turn(-(a + m) * (a + b + m) * x / ((a + m2) * (a + m2 + 1)));
    if (std::fabs(h - before) < kEpsilon * std::fabs(h)) break;
  }
  return h;
}

// Where a function that rises crosses `target`.
template <class F>
double bisect(F f, double target, double low, double high) {
  for (int i = 0; i < 200 && high - low > 1e-15 * (std::fabs(low) + std::fabs(high)); ++i) {
    const double middle = 0.5 * (low + high);
    (f(middle) < target ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

}  // namespace

double incompleteBeta(double a, double b, double x) {
  if (!(x > 0)) return 0;
  if (x >= 1) return 1;
  const double front =
      std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x));
  if (x < (a + 1) / (a + b + 2)) return front * betaFraction(a, b, x) / a;
  return 1 - front * betaFraction(b, a, 1 - x) / b;
}

double studentCdf(double t, double df) {
  if (std::isnan(t) || !(df > 0)) return std::numeric_limits<double>::quiet_NaN();
  if (std::isinf(t)) return t > 0 ? 1 : 0;
  // The smaller tail directly, so that it keeps its digits.
  const double tail = 0.5 * incompleteBeta(df / 2, 0.5, df / (df + t * t));
  return t > 0 ? 1 - tail : tail;
}

double studentQuantile(double p, double df) {
  if (p == 0.5) return 0;
  if (p > 0.5) return -studentQuantile(1 - p, df);
  if (!(p > 0)) return -std::numeric_limits<double>::infinity();
  double low = -1;
  while (studentCdf(low, df) > p && low > -1e300) low *= 2;
  return bisect([&](double t) { return studentCdf(t, df); }, p, low, 0);
}

double normalQuantile(double p) {
  return bisect([](double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); }, p, -40, 40);
}

Moments moments(std::span<const double> values) {
  Moments m;
  m.n = values.size();
  if (m.n == 0) return m;
  double sum = 0;
  for (const double v : values) sum += v;
  m.mean = sum / static_cast<double>(m.n);
  if (m.n < 2) return m;
  double squares = 0;
  for (const double v : values) squares += (v - m.mean) * (v - m.mean);
  m.variance = squares / static_cast<double>(m.n - 1);
  return m;
}

Estimate welch(const Moments& a, const Moments& b) {
  const double va = a.variance / static_cast<double>(a.n);
  const double vb = b.variance / static_cast<double>(b.n);
  Estimate e;
  e.value = b.mean - a.mean;
  e.standard_error = std::sqrt(va + vb);
  const double below = va * va / static_cast<double>(a.n - 1) + vb * vb / static_cast<double>(b.n - 1);
  e.df = below > 0 ? (va + vb) * (va + vb) / below : static_cast<double>(a.n + b.n - 2);
  return e;
}

double equivalenceP(const Estimate& e, double margin) {
  if (!(margin > 0)) return 1;
  if (e.standard_error == 0) return std::fabs(e.value) < margin ? 0 : 1;
  const double above = studentCdf(-(e.value + margin) / e.standard_error, e.df);  // against value <= -margin
  const double below = studentCdf((e.value - margin) / e.standard_error, e.df);   // against value >= margin
  return std::max(above, below);
}

Interval confidence(const Estimate& e, double level) {
  const double half = studentQuantile(0.5 + level / 2, e.df) * e.standard_error;
  return {e.value - half, e.value + half};
}

std::optional<size_t> runsNeeded(double sd, double margin, double power, size_t most) {
  if (!(margin > 0) || !std::isfinite(sd)) return std::nullopt;
  for (size_t n = 3; n <= most; ++n) {
    const double df = 2.0 * static_cast<double>(n) - 2;
    const double error = sd * std::sqrt(2.0 / static_cast<double>(n));
    if (error == 0) return n;
    // With no true difference both tests pass when |t| < margin / error - quantile.
    const double room = margin / error - studentQuantile(0.95, df);
    if (room > 0 && 2 * studentCdf(room, df) - 1 >= power) return n;
  }
  return std::nullopt;
}

std::optional<size_t> runsNeededToDiffer(double sd, double difference, double margin, double power,
                                         size_t most) {
  const double room = std::fabs(difference) - margin;
  if (!(room > 0) || !std::isfinite(sd)) return std::nullopt;
  for (size_t n = 3; n <= most; ++n) {
    const double df = 2.0 * static_cast<double>(n) - 2;
    const double error = sd * std::sqrt(2.0 / static_cast<double>(n));
    if (room >= error * (studentQuantile(0.9975, df) + studentQuantile(power, df))) return n;
  }
  return std::nullopt;
}

double autocorrelationTime(std::span<const double> values) {
  constexpr size_t kLongest = 8192;
  if (values.size() > 2 * kLongest) {
    const size_t piece = values.size() / kLongest;
    std::vector<double> means;
    for (size_t i = 0; i + piece <= values.size(); i += piece) {
      means.push_back(moments(values.subspan(i, piece)).mean);
    }
    const double tau = autocorrelationTime(means);
    // Averages that are still correlated measure tau in pieces. Where they are not, all that is known is that
    // tau is at most a piece; its start is looked at as it is.
    if (tau > 2) return tau * static_cast<double>(piece);
    return std::max(autocorrelationTime(values.first(kLongest)),
                    tau > 1.2 ? tau * static_cast<double>(piece) : 1.0);
  }
  const size_t n = values.size();
  if (n < 4) return 1;
  const Moments m = moments(values);
  if (!(m.variance > 0)) return 1;
  std::vector<double> centred(values.begin(), values.end());
  for (double& v : centred) v -= m.mean;
  double zero = 0;
  for (const double v : centred) zero += v * v;
  double tau = 1;
  for (size_t lag = 1; lag < n / 2; ++lag) {
    double sum = 0;
    for (size_t i = lag; i < n; ++i) sum += centred[i] * centred[i - lag];
    tau += 2 * sum / zero;
    if (static_cast<double>(lag) >= 5 * tau) break;
  }
  return std::max(1.0, tau);
}

std::optional<BatchMeans> batchMeans(std::span<const double> values, size_t least) {
  BatchMeans b;
  b.tau = autocorrelationTime(values);
  b.length = static_cast<size_t>(std::ceil(2 * b.tau));
  b.batches = values.size() / std::max<size_t>(1, b.length);
  if (b.batches < least || b.batches < 2) return std::nullopt;
  // No more batches than are useful: longer ones are closer to independent.
  constexpr size_t kMost = 64;
  if (b.batches > kMost) b.batches = kMost;
  b.length = values.size() / b.batches;
  std::vector<double> means;
  const size_t skip = values.size() - b.batches * b.length;  // of the start
  for (size_t i = 0; i < b.batches; ++i) {
    means.push_back(moments(values.subspan(skip + i * b.length, b.length)).mean);
  }
  const Moments m = moments(means);
  b.mean.value = m.mean;
  b.mean.standard_error = std::sqrt(m.variance / static_cast<double>(m.n));
  b.mean.df = static_cast<double>(m.n - 1);
  return b;
}

double median(std::span<const double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::vector<double> sorted(values.begin(), values.end());
  const size_t half = sorted.size() / 2;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(half), sorted.end());
  if (sorted.size() % 2 == 1) return sorted[half];
  const double high = sorted[half];
  return 0.5 * (high + *std::max_element(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(half)));
}

}  // namespace halfwire::parity
