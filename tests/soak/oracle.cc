#include "soak/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "soak/values.h"

namespace halfwire::soak {
namespace {

struct TypeFacts {
  double unit;           // half an ulp, relative
  double tiny;           // half of the smallest denormal (of fp64: the whole)
  double largest;        // X(T)
  long double overflow;  // O(T)
};

TypeFacts factsOf(ncclDataType_t type) {
  switch (type) {
    case ncclBfloat16:
      return {0x1p-8, 0x1p-134, 255 * 0x1p120, 255.5 * 0x1p120};
    case ncclFloat16:
      return {0x1p-11, 0x1p-25, 65504, 65520};
    case ncclFloat32:
      return {0x1p-24, 0x1p-150, (2 - 0x1p-23) * 0x1p127, (2 - 0x1p-24) * 0x1p127};
    default:
      return {0x1p-53, 0x1p-1074, 1.7976931348623157e308, (2 - 0x1p-53L) * 0x1p1023L};
  }
}

// |code(z) - z| <= max(relative * |z|, absolute) for |z| up to a few ulps above `max`: half the distance of
// codes.
struct CodeFacts {
  double max;
  double relative;
  double absolute;
};

CodeFacts nearestFacts(ElementFormat format) {
  switch (format) {
    case ElementFormat::kE4M3:
      return {448, 0x1p-4, 0x1p-10};  // 3 mantissa bits; denormals are multiples of 2^-9
    case ElementFormat::kE5M2:
      return {57344, 0x1p-3, 0x1p-17};  // 2 mantissa bits; denormals are multiples of 2^-16
    case ElementFormat::kInt8:
      return {127, 0, 0.5};
    case ElementFormat::kE3M4:
      return {30, 0x1p-5, 0x1p-7};  // 4 mantissa bits; denormals are multiples of 2^-6
  }
  return {};
}

// Stochastic rounding may take the farther neighbour.
CodeFacts codeFacts(const Reduction& r) {
  CodeFacts facts = nearestFacts(r.format.element);
  if (!r.stochastic) return facts;
  facts.relative *= 2;
  facts.absolute *= 2;
  return facts;
}

// An upper bound of the scale of a block whose largest finite magnitude is at most `amax`: RN(amax / M), or
// the smallest power of two not below it, which is less than twice as much; never below 2^-126.
double scaleBound(const WireFormat& format, const CodeFacts& code, double amax) {
  const double r = amax / code.max * (1 + 0x1p-22) + 0x1p-149;
  return std::max(0x1p-126, format.scale == ScaleFormat::kE8M0 ? 2 * r : r);
}

// |decode(encode(y)) - y|: the code's own rounding plus the roundings of 1/s, y * v and q * s (each 2^-24
// relative).
double quantizeBound(const CodeFacts& code, double scale, double magnitude) {
  return std::max(code.relative * magnitude, code.absolute * scale) + magnitude * 0x1p-21 + 0x1p-148;
}

std::string describeElement(uint64_t index, double got, double expected, double bound, const char* what) {
  char text[200];
  snprintf(text, sizeof text, "element %llu is %.9g, expected %.9g +- %.3g (%s)",
           static_cast<unsigned long long>(index), got, expected, bound, what);
  return text;
}

double roundTo(ncclDataType_t type, double value) {
  if (type == ncclFloat64) return value;
  char bytes[8];
  store(type, bytes, 0, value);
  return load(type, bytes, 0);
}

void judge(Verdict* verdict, const Reduction& r, uint64_t i, double got, double expected, double bound) {
  ++verdict->finite_elements;
  const double error = std::fabs(got - expected);
  if (bound > 0) verdict->worst = std::max(verdict->worst, error / bound);
  if (got != roundTo(r.type, expected)) ++verdict->rounded;
  if (error > bound && verdict->error.empty())
    verdict->error = describeElement(i, got, expected, bound, "outside its bound");
}

template <class Int, class Unsigned>
Verdict checkIntegers(const Reduction& r, const void* output) {
  Verdict verdict;
  for (uint64_t i = 0; i < r.count; ++i) {
    Int result{};
    for (size_t k = 0; k < r.inputs.size(); ++k) {
      Int x;
      memcpy(&x, static_cast<const char*>(r.inputs[k]) + (r.first + i) * sizeof(Int), sizeof(Int));
      if (k == 0) {
        result = x;
      } else if (r.op == Reduction::kMax) {
        result = std::max(result, x);
      } else if (r.op == Reduction::kMin) {
        result = std::min(result, x);
      } else {
        result =
            static_cast<Int>(static_cast<Unsigned>(static_cast<Unsigned>(result) + static_cast<Unsigned>(x)));
      }
    }
    Int got;
    memcpy(&got, static_cast<const char*>(output) + i * sizeof(Int), sizeof(Int));
    if (got != result && verdict.error.empty()) {
      verdict.error = describeElement(i, static_cast<double>(got), static_cast<double>(result), 0, "integer");
    }
  }
  verdict.finite_elements = r.count;
  return verdict;
}

Verdict checkExtremes(const Reduction& r, const void* output) {
  Verdict verdict;
  for (uint64_t i = 0; i < r.count; ++i) {
    double expected = load(r.type, r.inputs[0], r.first + i);
    for (size_t k = 1; k < r.inputs.size(); ++k) {
      const double x = load(r.type, r.inputs[k], r.first + i);
      expected = r.op == Reduction::kMax ? std::max(expected, x) : std::min(expected, x);
    }
    judge(&verdict, r, i, load(r.type, output, i), expected, 0);
  }
  return verdict;
}

// Sums in NCCL's own arithmetic, whatever the order and wherever it rounds: every product, partial sum and
// the result rounded to the type.
Verdict checkExactSum(const Reduction& r, const void* output) {
  Verdict verdict;
  const TypeFacts facts = factsOf(r.type);
  const size_t ranks = r.inputs.size();
  const long double average = r.op == Reduction::kAvg ? 1.0L / static_cast<long double>(ranks) : 1.0L;
  for (uint64_t i = 0; i < r.count; ++i) {
    long double sum = 0;
    long double magnitude = 0;
    bool finite = true;
    for (size_t k = 0; k < ranks; ++k) {
      const double x = load(r.type, r.inputs[k], r.first + i);
      const long double y = static_cast<long double>(x) * (r.scalars.empty() ? 1.0L : r.scalars[k]);
      finite = finite && std::isfinite(x);
      sum += y;
      magnitude += std::fabs(y);
    }
    const double got = load(r.type, output, i);
    if (!finite) {
      if (std::isfinite(got) && verdict.error.empty())
        verdict.error = describeElement(i, got, NAN, 0, "a bad number got lost");
      continue;
    }
    const double steps = static_cast<double>(ranks) + 3;
    const long double expected = sum * average;
    const long double bound = magnitude * average * steps * facts.unit + steps * facts.tiny;
    if (!std::isfinite(got)) {
      // Some order of summation reaches infinity. Averages may be divided before or after the sum.
      if (magnitude * (1 + steps * facts.unit) < facts.overflow && verdict.error.empty()) {
        verdict.error = describeElement(i, got, static_cast<double>(expected), static_cast<double>(bound),
                                        "finite numbers became a bad one");
      }
      continue;
    }
    if (std::fabs(expected) - bound > facts.overflow) {
      if (verdict.error.empty()) {
        verdict.error = describeElement(i, got, static_cast<double>(expected), static_cast<double>(bound),
                                        "an overflow got lost");
      }
      continue;
    }
    judge(&verdict, r, i, got, static_cast<double>(expected), static_cast<double>(bound));
  }
  return verdict;
}

// One block of a compressed sum.
class CompressedBlock {
 public:
  CompressedBlock(const Reduction& r) : r_(r), facts_(factsOf(r.type)), code_(codeFacts(r)) {}

  void check(uint64_t start, uint64_t n, const void* output, Verdict* verdict) {
    sum(start, n);
    double second_scale = 0;
    if (r_.travel == Travel::kTwoShot) {
      double amax = 0;
      for (uint64_t i = 0; i < n; ++i) {
        if (elements_[i].finite)
          amax =
              std::max(amax, std::min(std::fabs(elements_[i].sum) + elements_[i].error, overflowOf(r_.type)));
      }
      second_scale = scaleBound(r_.format, code_, amax);
    }
    for (uint64_t i = 0; i < n; ++i)
      judgeElement(start + i, elements_[i], second_scale, load(r_.type, output, start + i), verdict);
  }

 private:
  struct Element {
    double sum = 0;
    double error = 0;         // |what the reducer holds - sum|
    double largest_part = 0;  // bound of the partial sums' magnitude
    bool finite = true;       // finite on every rank
  };

  // Step by step what docs/wire-format.md does to the block, with bounds instead of bits.
  void sum(uint64_t start, uint64_t n) {
    const size_t ranks = r_.inputs.size();
    const double average = r_.op == Reduction::kAvg ? 1.0 / static_cast<double>(ranks) : 1.0;
    elements_.assign(n, {});
    values_.resize(n);
    for (size_t k = 0; k < ranks; ++k) {
      double amax = 0;
      for (uint64_t i = 0; i < n; ++i) {
        double y = load(r_.type, r_.inputs[k], r_.first + start + i);
        if (!r_.scalars.empty())
          y = static_cast<float>(static_cast<float>(y) * static_cast<float>(r_.scalars[k]));
        values_[i] = y;
        if (!(std::fabs(y) < facts_.overflow)) {
          elements_[i].finite = false;
        } else {
          amax = std::max(amax, std::fabs(y));
        }
      }
      const double scale = scaleBound(r_.format, code_, amax);
      for (uint64_t i = 0; i < n; ++i) {
        Element& e = elements_[i];
        if (!e.finite) continue;
        const double magnitude = std::fabs(values_[i]);
        double error = quantizeBound(code_, scale, magnitude);
        if (magnitude > facts_.largest) error += magnitude - facts_.largest;  // decoders clamp
        e.sum += values_[i] * average;
        // RN(s * a) may be denormal: an absolute error of 2^-150 times the code.
        e.error += error * average + magnitude * average * 0x1p-22 + (average < 1 ? code_.max * 0x1p-149 : 0);
        // The additions' own rounding, relative to everything added so far.
        e.largest_part += (magnitude + error) * average;
        e.error += e.largest_part * 0x1p-23;
      }
    }
  }

  void judgeElement(uint64_t index, const Element& e, double second_scale, double got, Verdict* verdict) {
    if (!e.finite) {
      if (std::isfinite(got) && verdict->error.empty())
        verdict->error = describeElement(index, got, NAN, 0, "a bad number got lost");
      return;
    }
    const double magnitude = std::fabs(e.sum);
    double bound = e.error;
    if (r_.travel == Travel::kTwoShot) bound += quantizeBound(code_, second_scale, magnitude + e.error);
    bound += (magnitude + bound) * facts_.unit + facts_.tiny;
    // The sum is kept in fp32 in rank order; where a part of it may overflow, the order decides.
    const bool part_may_overflow = e.largest_part * (1 + 0x1p-20) >= factsOf(ncclFloat32).overflow;
    const bool must_be_finite = magnitude + e.error < facts_.overflow && !part_may_overflow;
    const bool must_overflow = magnitude - e.error > facts_.overflow;
    if (!std::isfinite(got)) {
      if (must_be_finite && verdict->error.empty())
        verdict->error = describeElement(index, got, e.sum, bound, "finite numbers became a bad one");
      return;
    }
    if (must_overflow) {
      if (verdict->error.empty())
        verdict->error = describeElement(index, got, e.sum, bound, "an overflow got lost");
      return;
    }
    judge(verdict, r_, index, got, e.sum, bound);
  }

  const Reduction& r_;
  const TypeFacts facts_;
  const CodeFacts code_;
  std::vector<Element> elements_;
  std::vector<double> values_;
};

}  // namespace

double overflowOf(ncclDataType_t type) { return static_cast<double>(factsOf(type).overflow); }
double largestOf(ncclDataType_t type) { return factsOf(type).largest; }

Verdict checkReduction(const Reduction& r, const void* output) {
  if (r.type == ncclInt8) return checkIntegers<int8_t, uint8_t>(r, output);
  if (r.type == ncclInt32) return checkIntegers<int32_t, uint32_t>(r, output);
  if (r.op == Reduction::kMax || r.op == Reduction::kMin) return checkExtremes(r, output);
  if (r.travel == Travel::kExact) return checkExactSum(r, output);
  Verdict verdict;
  CompressedBlock block(r);
  for (uint64_t start = 0; start < r.count; start += r.format.block) {
    block.check(start, std::min<uint64_t>(r.format.block, r.count - start), output, &verdict);
  }
  return verdict;
}

Verdict checkGathered(ncclDataType_t type, const WireFormat& format, bool stochastic, const void* input,
                      uint64_t count, const void* output) {
  Reduction r;
  r.type = type;
  r.inputs = {input};
  r.count = count;
  r.travel = Travel::kGather;
  r.format = format;
  r.stochastic = stochastic;
  return checkReduction(r, output);
}

}  // namespace halfwire::soak
