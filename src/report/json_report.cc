#include "report/json_report.h"

#include <nlohmann/json.hpp>

namespace halfwire::report {
namespace {

using nlohmann::ordered_json;

// Nanoseconds as microseconds: three decimals at most, exact within 2^53.
double us(int64_t ns) { return static_cast<double>(ns) / 1000.0; }

void addParts(ordered_json* j, const analysis::Parts& p) {
  (*j)["span_us"] = us(p.span);
  (*j)["compute_us"] = us(p.compute);
  (*j)["comm_us"] = us(p.comm);
  (*j)["exposed_comm_us"] = us(p.exposed);
  (*j)["copy_us"] = us(p.copy_alone);
  (*j)["idle_us"] = us(p.idle);
  (*j)["copy_busy_us"] = us(p.copy);
  (*j)["codec_us"] = us(p.codec);
  (*j)["exposed_codec_us"] = us(p.exposed_codec);
  (*j)["exposed_not_copying_us"] = us(p.exposed_bare);
}

ordered_json collective(const analysis::CollectiveRow& row) {
  ordered_json j;
  j["type"] = trace::collectiveName(row.type);
  j["count"] = row.count;
  j["bytes"] = row.sized > 0 ? ordered_json(row.bytes) : ordered_json(nullptr);
  j["busy_us"] = us(row.busy_ns);
  j["exposed_us"] = us(row.exposed_ns);
  j["needed_us"] = us(row.needed_ns);
  j["exposed_needed_us"] = us(row.exposed_needed_ns);
  j["element"] = trace::elementName(row.element);
  j["size_bucket_bytes"] = row.bucket > 0 ? ordered_json(row.bucket) : ordered_json(nullptr);
  j["process_group"] = row.group.empty() ? ordered_json(nullptr) : ordered_json(row.group);
  j["sized_count"] = row.sized;
  j["algbw_gbps"] = row.algbw_gbps > 0 ? ordered_json(row.algbw_gbps) : ordered_json(nullptr);
  j["busbw_gbps"] = row.busbw_gbps > 0 ? ordered_json(row.busbw_gbps) : ordered_json(nullptr);
  j["fp8_byte_saving"] = row.saving;
  return j;
}

ordered_json pathKinds(const std::array<int64_t, analysis::kPathKinds>& sums) {
  ordered_json j;
  for (int i = 0; i < analysis::kPathKinds; ++i) j[analysis::kPathKindNames[i]] = us(sums[i]);
  return j;
}

ordered_json stalledFrom(analysis::StalledFrom from) {
  switch (from) {
    case analysis::StalledFrom::kRecorded:
      return "recorded";
    case analysis::StalledFrom::kInferred:
      return "inferred";
    case analysis::StalledFrom::kNothing:
      break;
  }
  return nullptr;
}

ordered_json lane(const analysis::Analysis& a, const analysis::LaneReport& r) {
  ordered_json j;
  j["file"] = r.file;
  j["rank"] = r.rank ? ordered_json(*r.rank) : ordered_json(nullptr);
  j["world_size"] = r.world_size > 0 ? ordered_json(r.world_size) : ordered_json(nullptr);
  j["device"] = r.has_device_activity ? ordered_json(r.lane.device) : ordered_json(nullptr);
  j["format"] = r.format == trace::Format::kKineto ? "kineto" : "nsys";
  j["events"] = r.events;
  j["json_bytes"] = r.json_bytes;
  addParts(&j, r.lane.total);
  const bool stalled_known = r.lane.stalled_from != analysis::StalledFrom::kNothing;
  j["stalled_us"] = stalled_known ? ordered_json(us(r.lane.stalled)) : ordered_json(nullptr);
  j["stalled_at_most_us"] = stalled_known ? ordered_json(us(r.lane.stalled_at_most)) : ordered_json(nullptr);
  j["stalled_from"] = stalledFrom(r.lane.stalled_from);
  j["event_waits"] = r.lane.waits;
  j["event_waits_unknown"] = r.lane.waits_unknown;
  ordered_json causes = ordered_json::object();
  for (int i = 0; i < analysis::kIdleCauses; ++i) causes[analysis::kIdleCauseNames[i]] = us(r.lane.idle[i]);
  j["idle_causes"] = std::move(causes);
  j["idle_split"] = {{"host_late_us", us(r.lane.idle_host_late)},
                     {"launched_before_us", us(r.lane.idle_launched_before)},
                     {"unmatched_us", us(r.lane.idle_unmatched)}};
  j["launch_bound_after_sync_us"] = us(r.lane.launch_bound_after_sync);
  j["launch_bound_host_quiet_us"] = us(r.lane.launch_bound_host_quiet);
  j["exposed_wait_us"] = r.group ? ordered_json(us(r.exposed_wait_ns)) : ordered_json(nullptr);
  j["group"] = r.group ? ordered_json(*r.group) : ordered_json(nullptr);
  j["collectives"] = ordered_json::array();
  for (const auto& row : r.collectives) j["collectives"].push_back(collective(row));
  j["steps"] = ordered_json::array();
  for (const auto& step : r.lane.steps) {
    ordered_json s;
    s["number"] = step.number;
    s["start_us"] = us(step.start_ns);
    addParts(&s, step.parts);
    s["stalled_us"] = stalled_known ? ordered_json(us(step.stalled)) : ordered_json(nullptr);
    s["stalled_at_most_us"] = stalled_known ? ordered_json(us(step.stalled_at_most)) : ordered_json(nullptr);
    j["steps"].push_back(std::move(s));
  }
  j["steps_from"] = r.lane.steps.empty() ? "none" : r.lane.steps_detected ? "collectives" : "annotations";
  j["outside_steps_us"] = us(r.lane.outside_steps_ns);
  ordered_json fp8;
  fp8["exposed_us"] = us(r.fp8.exposed_ns);
  fp8["touchable_us"] = us(r.fp8.touchable_ns);
  fp8["at_most_us"] = us(r.fp8.gain_ns);
  fp8["codec_us"] = us(r.fp8.codec_ns);
  fp8["bytes"] = r.fp8.sizes_known ? ordered_json(r.fp8.bytes) : ordered_json(nullptr);
  fp8["words"] = r.fp8.words;
  j["fp8"] = std::move(fp8);
  j["diagnosis"] = r.diagnosis;
  j["headline"] = r.headline;
  if (r.replay) {
    ordered_json c;
    c["unexplained_us"] = us(r.replay->unexplained_ns);
    c["replayed_us"] = us(r.replay->replayed_ns);
    c["path_us"] = pathKinds(r.replay->critical);
    c["steps"] = ordered_json::array();
    for (const auto& s : r.replay->steps) {
      ordered_json step = {{"number", s.number},
                           {"measured_us", us(s.measured_ns)},
                           {"replayed_us", us(s.replayed_ns)},
                           {"unexplained_us", us(s.unexplained_ns)},
                           {"path_us", pathKinds(s.critical)}};
      if (a.what_if_comm) step["what_if_us"] = us(s.what_if_ns);
      c["steps"].push_back(std::move(step));
    }
    j["critical_path"] = std::move(c);
    if (a.what_if_comm) j["what_if"] = {{"comm", *a.what_if_comm}, {"span_us", us(r.replay->what_if_ns)}};
  } else {
    j["critical_path"] = nullptr;
  }
  j["comm_kernels"] = ordered_json::array();
  for (const auto& [name, count] : r.comm_names)
    j["comm_kernels"].push_back({{"name", name}, {"count", count}});
  j["warnings"] = r.warnings;
  return j;
}

ordered_json usList(const std::vector<int64_t>& values) {
  ordered_json j = ordered_json::array();
  for (const int64_t v : values) j.push_back(us(v));
  return j;
}

ordered_json group(const analysis::Analysis& a, const analysis::GroupReport& g) {
  const analysis::Group& m = g.group;
  ordered_json j;
  j["ranks"] = m.ranks;
  j["intrinsic_comm_us"] = us(m.intrinsic_ns);
  j["wait_us"] = usList(m.wait_ns);
  j["late_rank"] = m.late.empty() ? ordered_json(nullptr) : ordered_json(m.late.front().rank);
  j["late_cause"] =
      m.late.empty() ? ordered_json(nullptr) : ordered_json(analysis::lateCauseName(m.late.front().cause));
  j["late_ranks"] = ordered_json::array();
  for (const auto& late : m.late) {
    ordered_json l;
    l["rank"] = late.rank;
    l["cost_us"] = us(late.blame_ns);
    l["cause"] = analysis::lateCauseName(late.cause);
    ordered_json causes;
    for (int i = 0; i < analysis::kLateCauses; ++i) {
      if (late.causes[i] > 0) causes[analysis::lateCauseName(i)] = us(late.causes[i]);
    }
    l["causes"] = std::move(causes);
    j["late_ranks"].push_back(std::move(l));
  }
  j["launch_bound_ranks"] = g.launch_bound_ranks;
  j["matched_collectives"] = m.matched;
  j["mismatched_collectives"] = m.mismatched;
  j["exposed_wait_us"] = usList(m.exposed_wait_ns);
  j["exposed_needed_us"] = usList(m.exposed_needed_ns);
  j["end_skew_us"] = {{"median", us(m.end_skew_median_ns)}, {"max", us(m.end_skew_max_ns)}};
  j["files"] = ordered_json::array();
  for (const size_t i : g.lanes) j["files"].push_back(a.lanes[i].file);
  j["words"] = g.words;
  return j;
}

}  // namespace

std::string analyzeJson(const analysis::Analysis& a) {
  ordered_json j;
  j["schema"] = "halfwire.analyze";
  j["schema_version"] = kAnalyzeSchemaVersion;
  j["files"] = ordered_json::array();
  for (const auto& r : a.lanes) j["files"].push_back(lane(a, r));
  j["groups"] = ordered_json::array();
  for (const auto& g : a.groups) j["groups"].push_back(group(a, g));
  return j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace halfwire::report
