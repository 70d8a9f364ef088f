// The SSE control register for the length of a scope. The bits of a packet must not depend on what rounding
// or flush-to-zero mode the training program has set in the calling thread.
#pragma once

#include <xmmintrin.h>

#include <cstdint>

namespace halfwire {

inline constexpr uint32_t kIeeeArithmetic = 0x1f80;  // all exceptions masked, nearest even, subnormals kept
inline constexpr uint32_t kFlushSubnormals = 0x1f80 | 0x8040;  // the same with FTZ and DAZ

// Sets the mode and restores the caller's, exception flags included. The compiler does not know that
// arithmetic depends on this register, so the arithmetic must sit in a function that is not inlined into the
// guarded scope.
class FpEnvironment {
 public:
  explicit FpEnvironment(uint32_t mode) : saved_(_mm_getcsr()) { _mm_setcsr(mode); }
  ~FpEnvironment() { _mm_setcsr(saved_); }
  FpEnvironment(const FpEnvironment&) = delete;
  FpEnvironment& operator=(const FpEnvironment&) = delete;

 private:
  uint32_t saved_;
};

}  // namespace halfwire
