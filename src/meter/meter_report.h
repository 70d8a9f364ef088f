// What run logs with a meter say about a job: the ranks joined, as a table, JSON or a page, and two runs side
// by side.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "policy/run_log_json.h"

namespace halfwire::meter {

// One rank's steps after warm-up; means where nothing else is said. Times in ms, bytes in bytes.
struct RankSummary {
  int rank = -1;
  std::string host;
  uint64_t steps = 0;     // that count
  uint64_t measured = 0;  // sampled ones with everything measured
  double step_ms = 0;     // median
  double exposed_ms = 0;  // median over the measured steps
  double host_blocked_ms = 0;
  double host_behind_ms = 0;  // the part of it in waits behind a collective
  double host_own_ms = 0;     // median of the step less host-blocked: the program's thread outside its waits
  double asked = 0, ring = 0, sent = 0, calls = 0;
  double sampled_ms = 0, unsampled_ms = 0;  // medians
  uint64_t sampled = 0, unsampled = 0;
  RunLogMeterRecord meter;
};

// Calls of one operation, type and size on communicators of one size, a step; means over the ranks.
struct SizeSummary {
  uint32_t ranks = 0;
  CollectiveOp op = CollectiveOp::kAllReduce;
  ncclDataType_t type = ncclFloat32;
  uint64_t size_bucket = 0;
  double calls = 0, asked = 0, ring = 0, sent = 0;
  double exposed_ms = 0, exposed_most_ms = 0;  // mean and most of any rank
};

struct RunSummary {
  std::string path;
  std::string settings;
  int world = 0;
  std::vector<RankSummary> ranks;
  std::vector<SizeSummary> sizes;  // most exposed first
  // Means over the ranks.
  double step_ms = 0, exposed_ms = 0, host_blocked_ms = 0, host_behind_ms = 0, host_own_ms = 0;
  double asked = 0, ring = 0, sent = 0, calls = 0;
  bool measured = false;  // exposed_ms is there
  int waited_for = -1;    // the rank that waited least for the others, where that says something
  double skew_median_ms = -1,
         skew_most_ms = -1;  // first to last begin of a step, ranks of one host; -1 unknown
  std::vector<std::string> notes;
};

// Reads the *.json run logs of a folder, or one file.
Result<RunSummary> readRun(const std::string& path);
// `records` of one job.
RunSummary summarize(const std::vector<RunLogRecord>& records, const std::string& path);

std::string reportText(const RunSummary& run);
std::string reportJson(const RunSummary& run);
std::string reportHtml(const RunSummary& run);

// Two runs side by side, and what their difference is, in one sentence. A step is the time for which streams
// waited for collectives (exposed) and the rest; the rest's difference holds the slow-down of compute that
// runs beside collectives, together with what the host and copies cost, which the logs do not part from it.
std::string verdict(const RunSummary& a, const RunSummary& b);
std::string compareText(const RunSummary& a, const RunSummary& b);
std::string compareJson(const RunSummary& a, const RunSummary& b);
std::string compareHtml(const RunSummary& a, const RunSummary& b);

}  // namespace halfwire::meter
