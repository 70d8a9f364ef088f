// Writes testdata/golden.json to standard output. Run it only when docs/wire-format.md changes what packets
// hold.
#include <iostream>
#include <nlohmann/json.hpp>

#include "wire/golden.h"

int main() {
  std::cout << halfwire::makeGolden().dump(1) << "\n";
  return std::cout.good() ? 0 : 1;
}
