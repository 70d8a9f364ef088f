// One message from rank 0 to every other rank of a job, over the address that the launcher gave: enough to
// hand out an ncclUniqueId. For examples and benchmarks; training frameworks have stores of their own.
#pragma once

#include <span>
#include <string>

#include "base/status.h"

namespace halfwire {

struct RankInfo {
  int rank = 0;
  int ranks = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
};

// RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; one rank if RANK is not set. Errors name the variable.
Result<RankInfo> readRankInfo();

// Rank 0 sends `message` to all others, which receive it into theirs; all give the same size. Waits up to
// `timeout_s`.
Status shareFromRankZero(const RankInfo& info, std::span<char> message, int timeout_s = 60);

}  // namespace halfwire
