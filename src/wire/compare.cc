#include "wire/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "wire/convert.h"

namespace halfwire {
namespace {

float at(DataType type, const void* base, uint64_t i) {
  switch (type) {
    case DataType::kBf16:
      return bf16ToFloat(static_cast<const uint16_t*>(base)[i]);
    case DataType::kFp16:
      return fp16ToFloat(static_cast<const uint16_t*>(base)[i]);
    case DataType::kFp32:
      break;
  }
  return static_cast<const float*>(base)[i];
}

}  // namespace

void compare(const CompareJob& job) {
  ErrorSums& s = *job.sums;
  for (uint64_t first = 0; first < job.elements; first += kCompareBlock) {
    double exact_squares = 0, error_squares = 0;
    for (uint64_t i = first; i < std::min(job.elements, first + kCompareBlock); ++i) {
      const double x = at(job.type, job.exact, i), y = at(job.type, job.other, i);
      if (!std::isfinite(x) || !std::isfinite(y)) {
        ++s.not_finite;
        continue;
      }
      ++s.elements;
      if (y == 0 && x != 0) ++s.flushed;
      exact_squares += x * x;
      error_squares += (y - x) * (y - x);
      s.other_squares += y * y;
      s.product += x * y;
    }
    s.exact_squares += exact_squares;
    s.error_squares += error_squares;
    if (exact_squares > 0) s.worst_block = std::max(s.worst_block, std::sqrt(error_squares / exact_squares));
  }
}

ErrorFigures errorFigures(const ErrorSums& s) {
  ErrorFigures f;
  if (s.elements == 0) return f;
  f.flushed_share = static_cast<double>(s.flushed) / static_cast<double>(s.elements);
  f.worst_block = s.worst_block;
  if (s.exact_squares > 0) f.relative_rms = std::sqrt(s.error_squares / s.exact_squares);
  f.snr_db = s.error_squares > 0 && s.exact_squares > 0 ? 10 * std::log10(s.exact_squares / s.error_squares)
             : s.error_squares > 0                      ? -std::numeric_limits<double>::infinity()
                                                        : std::numeric_limits<double>::infinity();
  const double norms = std::sqrt(s.exact_squares) * std::sqrt(s.other_squares);
  f.cosine = norms > 0 ? s.product / norms : s.error_squares > 0 ? 0 : 1;
  return f;
}

}  // namespace halfwire
