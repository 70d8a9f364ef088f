// The statistics a verdict rests on. Pure functions of numbers; tests hold them against published values.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

namespace halfwire::parity {

// I_x(a, b), a and b above 0: by its continued fraction (DLMF 8.17.22, modified Lentz).
double incompleteBeta(double a, double b, double x);
// P(T <= t) for Student's t with `df` > 0 degrees of freedom (not only whole ones), and its inverse.
double studentCdf(double t, double df);
double studentQuantile(double p, double df);
// The standard normal distribution's inverse.
double normalQuantile(double p);

struct Moments {
  size_t n = 0;
  double mean = 0;
  double variance = 0;  // with n - 1; 0 for one value
};
Moments moments(std::span<const double> values);

// An estimate of a difference with its standard error.
struct Estimate {
  double value = 0;
  double standard_error = 0;
  double df = 0;
};

// b - a with Welch's standard error and the Welch-Satterthwaite degrees of freedom. Needs two values a side.
Estimate welch(const Moments& a, const Moments& b);

// The larger p value of the two one-sided tests that `e` lies within (-margin, margin): Schuirmann 1987.
double equivalenceP(const Estimate& e, double margin);

struct Interval {
  double low = 0;
  double high = 0;
};
Interval confidence(const Estimate& e, double level);

// Runs a side for which a true difference of 0 passes the equivalence test at 95 % with the given power, the
// standard deviation of one run being `sd`. At most `most`; nothing where even those are too few.
std::optional<size_t> runsNeeded(double sd, double margin, double power = 0.8, size_t most = 1000);
// The same for a true difference past the margin to be found so at 99.5 %.
std::optional<size_t> runsNeededToDiffer(double sd, double difference, double margin, double power = 0.8,
                                         size_t most = 1000);

// tau = 1 + 2 sum of autocorrelations, summed up to the first lag W >= 5 tau (Sokal 1997, section 3). At
// least
// 1. Series longer than some thousands are averaged in pieces first, so that the time stays linear.
double autocorrelationTime(std::span<const double> values);

// The mean of a correlated series and its standard error from means of batches of at least two
// autocorrelation times. Nothing where that leaves fewer than `least` batches.
struct BatchMeans {
  Estimate mean;
  size_t batches = 0;
  size_t length = 0;  // of one batch
  double tau = 1;
};
std::optional<BatchMeans> batchMeans(std::span<const double> values, size_t least = 20);

double median(std::span<const double> values);

}  // namespace halfwire::parity
