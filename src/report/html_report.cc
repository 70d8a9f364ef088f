#include "report/html_report.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "page/page.h"
#include "report/json_report.h"

namespace halfwire::report {

// Generated from report.html.
extern const char* const kReportHtml;

namespace {

using nlohmann::json;

struct Drawn {
  int64_t start_ns;
  int64_t end_ns;
  uint32_t name;
  trace::ActivityKind kind;
};

// Neighbours of one kind with less than `gap` between them become one.
std::vector<Drawn> merge(const std::vector<Drawn>& events, int64_t gap) {
  std::vector<Drawn> out;
  for (const Drawn& e : events) {
    if (!out.empty() && out.back().kind == e.kind && e.start_ns - out.back().end_ns < gap &&
        e.end_ns - out.back().start_ns < 64 * gap) {
      out.back().end_ns = std::max(out.back().end_ns, e.end_ns);
    } else {
      out.push_back(e);
    }
  }
  return out;
}

// Microseconds after the lane's start, to the nanosecond.
double us(int64_t ns) { return static_cast<double>(ns) / 1000.0; }

json drawLane(const analysis::Analysis& a, const analysis::LaneReport& r) {
  json j;
  j["span"] = us(r.lane.total.span);
  j["streams"] = json::array();
  j["states"] = json::array();
  j["names"] = json::array();
  j["kinds"] = json::array();
  j["merged"] = false;
  if (!r.has_device_activity) return j;
  const trace::Timeline& t = a.timelines[r.timeline];
  std::map<int64_t, std::vector<Drawn>> streams;
  size_t total = 0;
  for (const trace::Activity& x : t.activities) {
    if (t.streams[x.stream].device != r.lane.device) continue;
    streams[t.streams[x.stream].number].push_back({x.start_ns, x.end_ns, x.name, x.kind});
    ++total;
  }
  int64_t gap = 0;
  if (total > kDrawnEvents) {
    j["merged"] = true;
    // Grows until few enough are left; a screen has fewer pixels than the first try has slots.
    for (gap = std::max<int64_t>(1, r.lane.total.span / 100'000);
         total > kDrawnEvents && gap < r.lane.total.span; gap *= 2) {
      total = 0;
      for (auto& [number, events] : streams) total += (events = merge(events, gap)).size();
    }
  }
  // Names with the kind of what they name: the drawing needs both.
  std::map<std::pair<uint32_t, trace::ActivityKind>, size_t> ids;
  for (const auto& [number, events] : streams) {
    json list = json::array();
    for (const Drawn& e : events) {
      const auto [it, added] = ids.emplace(std::pair(e.name, e.kind), ids.size());
      if (added) {
        j["names"].push_back(t.names.at(e.name).substr(0, 300));
        j["kinds"].push_back(static_cast<int>(e.kind));
      }
      list.push_back(us(e.start_ns - r.lane.start_ns));
      list.push_back(us(e.end_ns - e.start_ns));
      list.push_back(it->second);
    }
    j["streams"].push_back({{"number", number}, {"events", std::move(list)}});
  }
  std::vector<Drawn> states;
  for (const analysis::Segment& s : r.lane.segments) {
    if (s.state == analysis::State::kIdle) continue;
    if (!states.empty() && states.back().name == static_cast<uint32_t>(s.state) &&
        s.start_ns - states.back().end_ns < gap) {
      states.back().end_ns = s.end_ns;
    } else {
      states.push_back({s.start_ns, s.end_ns, static_cast<uint32_t>(s.state), trace::ActivityKind::kCompute});
    }
  }
  for (const Drawn& s : states) {
    j["states"].push_back(us(s.start_ns - r.lane.start_ns));
    j["states"].push_back(us(s.end_ns - s.start_ns));
    j["states"].push_back(s.name);
  }
  return j;
}

}  // namespace

std::string analyzeHtml(const analysis::Analysis& a) {
  json draw = json::array();
  for (const auto& r : a.lanes) draw.push_back(drawLane(a, r));
  const std::string data = "{\"report\":" + analyzeJson(a) +
                     ",\"draw\":" + draw.dump(-1, ' ', false, json::error_handler_t::replace) + "}";
  return fillPage(kReportHtml, data);
}

}  // namespace halfwire::report
