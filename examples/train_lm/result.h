// What one rank leaves behind for train_lm_compare.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace train_lm {

struct RankResult {
  int rank = 0;
  int ranks = 1;
  uint64_t parameters = 0;
  std::vector<double> loss;  // nats per byte, of this rank's samples before the step's update
  std::vector<double> step_ms;
  uint64_t egress_bytes = 0;  // handed to the links by all steps
  uint64_t ring_bytes = 0;    // an exact ring would have sent for the gradients, this rank
  std::string params_hash;    // 16 hexadecimal digits
};

// `directory`/rank<k>.json. False if it cannot be written.
bool writeResult(const std::string& directory, const RankResult& result);

// Every rank's result; empty, and why in `error`, if one is missing or damaged.
std::vector<RankResult> readResults(const std::string& directory, std::string* error);

// FNV-1a over 64-bit words of fp32 parameters, `hash` being what came before.
inline constexpr uint64_t kHashStart = 0xcbf29ce484222325ull;
uint64_t hashFloats(const float* values, uint64_t count, uint64_t hash);

}  // namespace train_lm
