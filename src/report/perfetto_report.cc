#include "report/perfetto_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "trace/byte_source.h"

namespace halfwire::report {
namespace {

using analysis::LaneReport;

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Microseconds with every nanosecond: a double would not hold them.
std::string us(int64_t ns) {
  const bool negative = ns < 0;
  const auto magnitude = negative ? ~static_cast<uint64_t>(ns) + 1 : static_cast<uint64_t>(ns);
  return fmt::format("{}{}.{:03}", negative ? "-" : "", magnitude / 1000, magnitude % 1000);
}

class Writer {
 public:
  explicit Writer(std::FILE* out) : out_(out) {}

  void write(std::string_view text) {
    failed_ = failed_ || std::fwrite(text.data(), 1, text.size(), out_) != text.size();
  }
  Status finish() {
    if (failed_ || std::fflush(out_) != 0) {
      return {StatusCode::kUnavailable,
              fmt::format("the trace could not be written: {}", std::strerror(errno))};
    }
    return {};
  }
  void event(const std::string& text) {
    write(first_ ? "\n" : ",\n");
    first_ = false;
    write(text);
  }
  void continueList(bool empty) { first_ = empty; }

 private:
  std::FILE* out_;
  bool failed_ = false;
  bool first_ = true;
};

// The tracks of one device: what it did, why it was idle, exposed communication alone.
void addTracks(const LaneReport& r, int64_t shift, Writer* w) {
  const std::string name =
      fmt::format("halfwire{} device {}", r.rank ? fmt::format(" rank {}", *r.rank) : "", r.lane.device);
  // Far from the process ids of programs and the device numbers that recorders use.
  const int64_t pid = 900'000'000 + (r.rank ? *r.rank : 0) * int64_t{64} + r.lane.device;
  const auto meta = [&](const char* what, int tid, const std::string& value) {
    w->event(fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}})", what, pid, tid,
                         quoted(value)));
  };
  meta("process_name", 0, name);
  meta("thread_name", 1, "what the device did");
  meta("thread_name", 2, "exposed communication");
  meta("thread_name", 3, "why idle");
  const auto slice = [&](int tid, const char* label, int64_t from, int64_t to) {
    w->event(fmt::format(R"({{"ph":"X","cat":"halfwire","name":"{}","pid":{},"tid":{},"ts":{},"dur":{}}})",
                         label, pid, tid, us(from + shift), us(to - from)));
  };
  static constexpr const char* kStates[] = {"idle", "compute", "compute, communication hidden",
                                            "exposed communication", "copies alone"};
  for (const analysis::Segment& s : r.lane.segments) {
    slice(1, kStates[static_cast<int>(s.state)], s.start_ns, s.end_ns);
    if (s.state == analysis::State::kExposed) slice(2, "exposed", s.start_ns, s.end_ns);
  }
  for (const analysis::Gap& g : r.lane.gaps) {
    const auto most = std::max_element(g.causes.begin(), g.causes.end()) - g.causes.begin();
    slice(3, analysis::kIdleCauseNames[most], g.start_ns, g.end_ns);
  }
}

Status copyWithTracks(const analysis::Analysis& a, Writer* w) {
  const trace::Timeline& t = a.timelines[0];
  Result<std::unique_ptr<trace::ByteSource>> source = trace::openFile(t.file);
  if (!source.ok()) return source.status();
  std::vector<char> buffer(1 << 20);
  uint64_t left = t.events_end;
  while (left > 0) {
    Result<size_t> got = source.value()->read(buffer.data(), std::min<uint64_t>(left, buffer.size()));
    if (!got.ok()) return got.status();
    if (got.value() == 0)
      return {StatusCode::kInvalidData, fmt::format("{}: became shorter while it was read", t.file)};
    w->write({buffer.data(), got.value()});
    left -= got.value();
  }
  w->continueList(t.events == 0);
  for (const LaneReport& r : a.lanes) {
    if (r.has_device_activity) addTracks(r, 0, w);
  }
  w->write("\n");
  while (true) {
    Result<size_t> got = source.value()->read(buffer.data(), buffer.size());
    if (!got.ok()) return got.status();
    if (got.value() == 0) return w->finish();
    w->write({buffer.data(), got.value()});
  }
}

// Ranks on one time axis: bases are added, less the first, since JSON readers hold times in doubles.
Status newTrace(const analysis::Analysis& a, Writer* w) {
  int64_t zero = INT64_MAX;
  for (const LaneReport& r : a.lanes) {
    if (r.has_device_activity) zero = std::min(zero, r.base_ns + r.lane.start_ns);
  }
  w->write("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
  for (size_t i = 0; i < a.lanes.size(); ++i) {
    const LaneReport& r = a.lanes[i];
    if (!r.has_device_activity) continue;
    const trace::Timeline& t = a.timelines[r.timeline];
    const int64_t shift = r.base_ns - zero;
    const int64_t pid = 800'000'000 + static_cast<int64_t>(i);
    w->event(fmt::format(R"({{"ph":"M","name":"process_name","pid":{},"tid":0,"args":{{"name":{}}}}})", pid,
                         quoted(fmt::format("{} device {}", r.rank ? fmt::format("rank {}", *r.rank) : r.file,
                                            r.lane.device))));
    for (const trace::Activity& x : t.activities) {
      const trace::Stream& stream = t.streams[x.stream];
      if (stream.device != r.lane.device) continue;
      w->event(fmt::format(R"({{"ph":"X","cat":"{}","name":{},"pid":{},"tid":{},"ts":{},"dur":{}}})",
                           trace::isCopy(x.kind) ? "gpu_memcpy" : "kernel", quoted(t.names.at(x.name)), pid,
                           stream.number, us(x.start_ns + shift), us(x.duration())));
    }
    addTracks(r, shift, w);
  }
  w->write("\n]}\n");
  return w->finish();
}

}  // namespace

Status writePerfetto(const analysis::Analysis& a, std::FILE* out) {
  Writer writer(out);
  const bool one = a.timelines.size() == 1 && a.timelines[0].format == trace::Format::kKineto &&
                   a.timelines[0].events_end > 0;
  return one ? copyWithTracks(a, &writer) : newTrace(a, &writer);
}

}  // namespace halfwire::report
