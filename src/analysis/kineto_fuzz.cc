// Any bytes as a Kineto trace: read in windows of several sizes, accounted, matched with itself and replayed.
// What is read must not depend on the windows, and parts must add up.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "analysis/account.h"
#include "analysis/collectives.h"
#include "analysis/groups.h"
#include "analysis/replay.h"
#include "trace/kineto_reader.h"

namespace {

using namespace halfwire;

Result<trace::Timeline> read(std::string_view bytes, size_t window) {
  static const trace::CommPatterns patterns = trace::CommPatterns::create({}).value();
  trace::ReadOptions options;
  options.window_bytes = window;
  options.max_window_bytes = 1 << 16;
  const auto source = trace::memorySource(bytes);
  return trace::readKineto(*source, "fuzz", patterns, options);
}

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t window = 256 + data[0] * 4U;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  (void)read(bytes, window);
  const auto whole = read(bytes, 1 << 16);
  if (!whole.ok()) {
    require(!whole.status().message().empty());
    return 0;
  }
  const trace::Timeline& t = whole.value();
  for (const analysis::Lane& lane : analysis::accountLanes(t)) {
    const auto& p = lane.total;
    require(p.compute + p.exposed + p.copy_alone + p.idle == p.span);
    const std::vector<analysis::RankLane> twice = {{0, t.base_ns, &lane, &t.names},
                                                   {1, t.base_ns, &lane, &t.names}};
    const analysis::Group group = analysis::matchRanks(twice);
    require(group.wait_ns[0] == 0);
    analysis::tabulate(t.names, lane.comms, group.needed[0], 2);
    const analysis::ReplayResult r = analysis::replay(t, lane, 0.5, group.needed[0]);
    require(r.replayed_ns == r.measured_ns);
  }
  return 0;
}
