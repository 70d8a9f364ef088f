// `halfwire analyze` without its words on screen: reads traces one after another and keeps what the reports
// need.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "analysis/account.h"
#include "analysis/collectives.h"
#include "analysis/groups.h"
#include "analysis/replay.h"
#include "base/status.h"

namespace halfwire::analysis {

// Rates of the packing kernels, as `halfwire bench` measured them.
struct CodecRate {
  double seconds_per_byte = 0;  // of user data, all kernels of one call together
};

struct AnalyzeOptions {
  std::vector<std::string> comm_patterns;
  std::optional<double> what_if_comm;  // scale of the time that communication needs
  std::optional<bool> critical_path;   // unset: on traces below `kReplayLimit` host calls and kernels
  std::optional<CodecRate> codec;
  bool keep_timelines = false;  // for reports that draw single events
  std::function<void(const std::string& file, uint64_t done, uint64_t total)> progress;
};

inline constexpr size_t kReplayLimit = 50'000;

// What FP8 could take from the step: an upper bound.
struct Fp8Outlook {
  int64_t exposed_ns = 0;    // communication that shows
  int64_t touchable_ns = 0;  // the part that is not waiting for a late rank
  int64_t gain_ns = 0;       // touchable times the byte saving of each collective
  int64_t codec_ns = 0;      // packing and unpacking, 0 if not measured
  int64_t bytes = 0;         // of collectives whose size is recorded
  bool sizes_known = false;
  std::string words;
};

// One device of one file.
struct LaneReport {
  std::string file;
  trace::Format format = trace::Format::kKineto;
  std::optional<int32_t> rank;
  int32_t world_size = 0;
  int64_t base_ns = 0;
  uint64_t json_bytes = 0;
  uint64_t events = 0;
  bool has_device_activity = false;
  size_t host_collectives = 0;  // operators that issue communication
  Lane lane;
  std::vector<CollectiveRow> collectives;
  std::vector<std::pair<std::string, uint32_t>> comm_names;
  std::vector<std::string> warnings;
  std::optional<ReplayResult> replay;
  std::optional<int> group;     // index into Analysis::groups
  int64_t exposed_wait_ns = 0;  // waiting for late ranks; 0 without a group
  Fp8Outlook fp8;
  std::vector<std::string> diagnosis;  // what takes at least a fifth of the span, largest first
  std::string headline;
  size_t timeline = 0;  // index into Analysis::timelines when they are kept
};

struct GroupReport {
  Group group;
  std::vector<size_t> lanes;  // indices into Analysis::lanes, by rank
  std::vector<int32_t> launch_bound_ranks;
  std::string words;
};

struct Analysis {
  std::vector<LaneReport> lanes;
  std::vector<GroupReport> groups;
  std::vector<trace::Timeline> timelines;
  std::optional<double> what_if_comm;
};

// Fails as a whole (kInvalidData, kInvalidArgument) if any of the files cannot be read whole.
Result<Analysis> analyzeFiles(const std::vector<std::string>& files, const AnalyzeOptions& options);

}  // namespace halfwire::analysis
