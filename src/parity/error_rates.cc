// Measures the rates that docs/parity.md states. Usage: parity_error_rates [TRIALS]
#include "parity/error_rates.h"

#include <fmt/format.h>

#include <cstdlib>

int main(int argc, char** argv) {
  using namespace halfwire::parity;
  const size_t trials = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 400;
  fmt::print("{:<44} {:>10} {:>10} {:>10} {:>6} {:>8}  95 % limit of different\n",
             "true difference 0 unless named", "equivalent", "different", "undecided", "hard", "warnings");
  uint64_t seed = 1'000'000;
  for (const Scenario& s : scenarios()) {
    const Counts c = measure(s, trials, seed += 1'000'000);
    fmt::print("{:<44} {:>10} {:>10} {:>10} {:>6} {:>8}  {:.2f} %\n", s.name, c.equivalent, c.different,
               c.undecided, c.hard, c.warned, 100 * upperLimit(c.different, c.n));
    std::fflush(stdout);
  }
  fmt::print("of {} experiments each\n", trials);
  return 0;
}
