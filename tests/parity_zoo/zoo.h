// The faults of the zoo, each as the change of a run that makes it, and what counts as fault-free.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "trainer.h"

namespace halfwire::zoo {

// How a fault is looked for.
enum class Question {
  kAlone,     // `halfwire parity RUN`
  kOneByOne,  // one run of the baseline, one candidate, the same seed
  kThree,     // three a side, the same three seeds
};

struct Case {
  std::string name;     // of the finding
  std::string variant;  // how the mistake is made
  Question question;
  // Makes the mistake in a fault-free configuration; may also change both sides so that it can be made.
  std::function<void(Config* baseline, Config* candidate)> make;
  bool only_warning = false;  // what is done on purpose often enough: a hard finding would be a false alarm
  bool uncertain = false;  // seen through noise, if at all: counted and printed, and no failure of --require
  bool refused = false;    // the verdict has to be `undecided`
};
const std::vector<Case>& cases();

// A fault-free configuration drawn from `seed`: optimizer, rate, schedule, clipping, dropout, tying, scaler
// with or without skipped steps at its start, accumulation, order of reduction, wire, resumed or not.
Config faultFree(uint64_t seed);

// The same training in another order of reduction.
Config reordered(Config c, uint64_t seed);

// Upper limit of a rate of which k of n were seen, one-sided, 95 % (Clopper and Pearson 1934).
double upperLimit(size_t k, size_t n);

}  // namespace halfwire::zoo
