// How far a compressed result is from the exact one: sums that give relative error, signal to noise, cosine
// and what was flushed to zero. On the host and in a kernel the same quantities; sums are in fp64 and differ
// by their order alone.
#pragma once

#include <cstdint>

#include "wire/format.h"

namespace halfwire {

// Elements of a block whose relative error is looked at by itself.
inline constexpr uint32_t kCompareBlock = 128;

// Sums over the elements that are finite in both results.
struct ErrorSums {
  double exact_squares = 0;
  double other_squares = 0;
  double error_squares = 0;
  double product = 0;
  uint64_t elements = 0;
  uint64_t flushed = 0;     // zero in the other, not zero in the exact result
  uint64_t not_finite = 0;  // elements left out, not finite in one or both
  double worst_block =
      0;  // largest relative rms error of a block of kCompareBlock elements from the buffers' start
};

// Adds to `sums`, which lives where the device's jobs can write. `exact` and `other` are aligned to their
// element type.
struct CompareJob {
  DataType type = DataType::kBf16;
  const void* exact = nullptr;
  const void* other = nullptr;
  uint64_t elements = 0;
  ErrorSums* sums = nullptr;
};

// On the host. Thread-safe for different sums.
void compare(const CompareJob& job);

// What the sums say. SNR in dB; relative error is rms error over rms of the exact result. 0 elements give
// zeros.
struct ErrorFigures {
  double relative_rms = 0;
  double snr_db = 0;
  double cosine = 0;
  double flushed_share = 0;
  double worst_block = 0;
};
ErrorFigures errorFigures(const ErrorSums& sums);

}  // namespace halfwire
