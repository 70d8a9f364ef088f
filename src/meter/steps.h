// Where steps begin, where the program does not say so: from the sequence of its collectives, which repeats.
#pragma once

#include <cstdint>
#include <vector>

namespace halfwire::meter {

// Not thread-safe. Allocates only when it is made.
class StepFinder {
 public:
  StepFinder();

  // The next collective, as a hash of what it is, made at `now_ns`. True if a step begins with it.
  bool onCollective(uint64_t hash, int64_t now_ns);

  // Calls since a period was first found, and those of them that came as it said.
  uint64_t checked() const { return checked_; }
  uint64_t predicted() const { return predicted_; }
  bool found() const { return period_ != 0; }
  // Collectives in a step, 0 while none is found.
  uint32_t period() const { return period_; }

 private:
  struct Call {
    uint64_t hash = 0;
    int64_t gap_ns = 0;  // host time since the call before
  };
  const Call& ago(uint64_t n) const { return history_[(count_ - 1 - n) % kHistory]; }
  bool repeats(uint32_t period, uint64_t window) const;
  void search();

  static constexpr uint64_t kHistory = 4096;
  static constexpr uint32_t kRepeats = 3;
  static constexpr uint64_t kMostDoubt = 512;
  std::vector<Call> history_;
  uint64_t count_ = 0;
  int64_t last_ns_ = 0;
  uint32_t period_ = 0;
  uint64_t anchor_ = 0;    // a step begins at calls anchor_ + k period_
  uint64_t held_ = 0;      // calls for which the period has held, those that showed it included
  uint64_t doubt_ = 16;    // a new period must have held for so many calls
  uint64_t next_try_ = 0;  // when to search again
  uint64_t checked_ = 0;
  uint64_t predicted_ = 0;
};

}  // namespace halfwire::meter
