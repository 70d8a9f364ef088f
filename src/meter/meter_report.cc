#include "meter/meter_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/units.h"

namespace halfwire::meter {
namespace {

using nlohmann::ordered_json;

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v.size() % 2 != 0 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

double ms(uint64_t ns) { return static_cast<double>(ns) * 1e-6; }

RankSummary summarizeRank(const RunLogRecord& record) {
  RankSummary r;
  r.rank = record.rank;
  r.host = record.host;
  r.meter = record.meter;
  std::vector<double> all, sampled, unsampled, exposed;
  for (const RunLogStepRecord& s : record.meter.steps) {
    if (s.number < record.meter.warmup) continue;
    all.push_back(ms(s.duration_ns));
    (s.sampled ? sampled : unsampled).push_back(ms(s.duration_ns));
    r.host_blocked_ms += ms(s.host_blocked_ns);
    r.host_behind_ms += ms(s.host_behind_ns);
    r.asked += static_cast<double>(s.bytes_asked);
    r.ring += static_cast<double>(s.bytes_ring);
    r.sent += static_cast<double>(s.bytes_sent);
    r.calls += static_cast<double>(s.calls);
    if (!s.measured || s.unmeasured != 0) continue;
    exposed.push_back(ms(s.exposed_ns));
  }
  r.steps = all.size();
  r.sampled = sampled.size();
  r.unsampled = unsampled.size();
  r.step_ms = median(all);
  r.sampled_ms = median(sampled);
  r.unsampled_ms = median(unsampled);
  const double steps = std::max<double>(1, static_cast<double>(r.steps));
  for (double* value : {&r.host_blocked_ms, &r.host_behind_ms, &r.asked, &r.ring, &r.sent, &r.calls})
    *value /= steps;
  r.measured = exposed.size();
  r.exposed_ms = median(std::move(exposed));
  return r;
}

uint64_t sampledSteps(const RunLogRecord& record) {
  // The logs' sums by size cover all sampled steps, also those that have left the ring of steps.
  return std::max<uint64_t>(
      1, static_cast<uint64_t>(std::count_if(record.meter.steps.begin(), record.meter.steps.end(),
                                             [](const RunLogStepRecord& s) { return s.measured; })));
}

void addSizes(const std::vector<const RunLogRecord*>& records, RunSummary* run) {
  using Key = std::tuple<uint32_t, CollectiveOp, ncclDataType_t, uint64_t>;
  std::map<Key, SizeSummary> sizes;
  for (const RunLogRecord* record : records) {
    std::map<Key, double> exposed;
    // The last step that began may not have ended.
    const auto steps = static_cast<double>(std::max<uint64_t>(2, record->meter.steps_begun) - 1);
    // Where the run is longer than the ring of steps, as many were sampled before as the rate says.
    const double kept = static_cast<double>(sampledSteps(*record));
    const double share = std::max(1.0, steps / static_cast<double>(kRunLogSteps));
    for (const RunLogComm& comm : record->communicators) {
      for (const RunLogSized& s : comm.sizes) {
        const Key key{comm.ranks, s.op, s.type, s.size_bucket};
        SizeSummary& sum = sizes[key];
        std::tie(sum.ranks, sum.op, sum.type, sum.size_bucket) = key;
        sum.calls += static_cast<double>(s.calls) / steps;
        sum.asked += static_cast<double>(s.bytes_asked) / steps;
        sum.ring += static_cast<double>(s.bytes_ring) / steps;
        sum.sent += static_cast<double>(s.bytes_sent) / steps;
        exposed[key] += ms(s.exposed_ns) / (kept * share);
      }
    }
    for (const auto& [key, value] : exposed) {
      sizes[key].exposed_ms += value;
      sizes[key].exposed_most_ms = std::max(sizes[key].exposed_most_ms, value);
    }
  }
  const double n = std::max<double>(1, static_cast<double>(records.size()));
  for (auto& [key, s] : sizes) {
    for (double* value : {&s.calls, &s.asked, &s.ring, &s.sent, &s.exposed_ms}) *value /= n;
    run->sizes.push_back(s);
  }
  std::stable_sort(run->sizes.begin(), run->sizes.end(),
                   [](const SizeSummary& a, const SizeSummary& b) { return a.exposed_ms > b.exposed_ms; });
}

// How far apart the ranks of one host begin the same step.
void addSkew(const std::vector<const RunLogRecord*>& records, RunSummary* run) {
  std::map<std::pair<std::string, uint64_t>, std::vector<uint64_t>> begins;
  for (const RunLogRecord* record : records) {
    for (const RunLogStepRecord& s : record->meter.steps) {
      if (s.number >= record->meter.warmup) begins[{record->host, s.number}].push_back(s.begin_ns);
    }
  }
  std::vector<double> spreads;
  for (const auto& [step, times] : begins) {
    if (times.size() < 2) continue;
    const auto [first, last] = std::minmax_element(times.begin(), times.end());
    spreads.push_back(ms(*last - *first));
  }
  if (spreads.empty()) return;
  run->skew_median_ms = median(spreads);
  run->skew_most_ms = *std::max_element(spreads.begin(), spreads.end());
}

void addNotes(RunSummary* run) {
  std::map<std::string, int> words;
  uint64_t unmeasured = 0, waits = 0, captured = 0, lost = 0, blocking = 0, blind = 0, stepless = 0,
           checked = 0, predicted = 0;
  double sampled = 0, unsampled = 0;
  int both = 0;
  for (const RankSummary& r : run->ranks) {
    if (r.meter.state != MeterState::kOn)
      ++words[r.meter.words.empty() ? "the meter was off: run with --mode meter or --meter on"
                                    : r.meter.words];
    unmeasured += r.meter.unmeasured;
    waits += r.meter.waits;
    captured += r.meter.captured;
    lost += r.meter.lost_marks;
    blocking += r.meter.blocking;
    checked += r.meter.source == StepSource::kDetected ? r.meter.checked : 0;
    predicted += r.meter.source == StepSource::kDetected ? r.meter.predicted : 0;
    if (r.meter.state == MeterState::kOn && r.meter.collectives > 0 && r.meter.event_calls == 0) ++blind;
    if (r.meter.state == MeterState::kOn && r.meter.source == StepSource::kNone) ++stepless;
    if (r.sampled < 3 || r.unsampled < 3) continue;
    sampled += r.sampled_ms;
    unsampled += r.unsampled_ms;
    ++both;
  }
  for (const auto& [word, ranks] : words) run->notes.push_back(fmt::format("{} rank(s): {}", ranks, word));
  if (blind > 0) {
    run->notes.push_back(
        fmt::format("{} rank(s): the meter saw no event calls: the CUDA runtime is linked statically, is "
                    "newer than the meter, "
                    "or the program waits in another way; exposed time is unknown",
                    blind));
  }
  if (stepless > 0) {
    run->notes.push_back(fmt::format(
        "{} rank(s): no repeating sequence of collectives was found and halfwire_step() was not called: "
        "nothing was sampled",
        stepless));
  }
  if (checked > 0) {
    run->notes.push_back(
        fmt::format("steps were found in the sequence of collectives: {:.1f} % of {} calls came as predicted",
                    100.0 * static_cast<double>(predicted) / static_cast<double>(checked), checked));
  }
  if (unmeasured > 0)
    run->notes.push_back(
        fmt::format("{} of {} waits could not be measured; steps with such a wait are left out", unmeasured,
                    unmeasured + waits));
  if (captured > 0)
    run->notes.push_back(fmt::format("{} waits were in graph captures and left alone", captured));
  if (lost > 0)
    run->notes.push_back(fmt::format("{} events or streams had no room in the meter's tables", lost));
  if (blocking > 0) {
    run->notes.push_back(fmt::format(
        "{} communication streams are blocking ones, for which the legacy stream waits by itself: such "
        "waits cannot be seen",
        blocking));
  }
  if (both > 0) {
    run->notes.push_back(
        fmt::format("sampled steps take {:+.2f} ms ({:+.2f} %) against the others, by medians",
                    (sampled - unsampled) / both, 100 * (sampled - unsampled) / unsampled));
  }
  run->notes.emplace_back(
      "busy time of collectives is not shown: it would need events on the communication streams, which the "
      "meter does "
      "not touch; `halfwire analyze` has it from a trace");
}

double gb(double bytes) { return bytes * 1e-9; }

std::string exposedCell(bool there, double value) { return there ? fmt::format("{:.3f}", value) : "-"; }

ordered_json numbers(double step, bool measured, double exposed, double blocked, double behind, double asked,
                     double ring, double sent, double calls) {
  return {{"step_ms", step},
          {"exposed_ms", measured ? ordered_json(exposed) : ordered_json()},
          {"host_blocked_ms", blocked},
          {"host_behind_collective_ms", behind},
          {"bytes_asked", asked},
          {"bytes_exact_ring", ring},
          {"bytes_sent", sent},
          {"calls", calls}};
}

ordered_json runJson(const RunSummary& run) {
  ordered_json ranks = ordered_json::array();
  for (const RankSummary& r : run.ranks) {
    ordered_json one = {
        {"rank", r.rank}, {"host", r.host}, {"steps", r.steps}, {"measured_steps", r.measured}};
    one.update(numbers(r.step_ms, r.measured > 0, r.exposed_ms, r.host_blocked_ms, r.host_behind_ms, r.asked,
                       r.ring, r.sent, r.calls));
    one["sampled_step_ms"] = r.sampled > 0 ? ordered_json(r.sampled_ms) : ordered_json();
    one["unsampled_step_ms"] = r.unsampled > 0 ? ordered_json(r.unsampled_ms) : ordered_json();
    ordered_json steps = ordered_json::array();
    for (const RunLogStepRecord& s : r.meter.steps) {
      steps.push_back({{"number", s.number},
                       {"begin_ns", s.begin_ns},
                       {"step_ms", ms(s.duration_ns)},
                       {"bytes_asked", s.bytes_asked},
                       {"bytes_exact_ring", s.bytes_ring},
                       {"bytes_sent", s.bytes_sent},
                       {"exposed_ms", s.measured ? ordered_json(ms(s.exposed_ns)) : ordered_json()},
                       {"host_blocked_ms", ms(s.host_blocked_ns)},
                       {"waits", s.waits},
                       {"unmeasured", s.unmeasured}});
    }
    one["per_step"] = std::move(steps);
    ranks.push_back(std::move(one));
  }
  ordered_json sizes = ordered_json::array();
  for (const SizeSummary& s : run.sizes) {
    sizes.push_back({{"operation", opName(s.op)},
                     {"type", dataTypeName(s.type)},
                     {"ranks", s.ranks},
                     {"size_bucket_bytes", s.size_bucket},
                     {"calls", s.calls},
                     {"bytes_asked", s.asked},
                     {"bytes_exact_ring", s.ring},
                     {"bytes_sent", s.sent},
                     {"exposed_ms", run.measured ? ordered_json(s.exposed_ms) : ordered_json()},
                     {"exposed_most_ms", run.measured ? ordered_json(s.exposed_most_ms) : ordered_json()}});
  }
  ordered_json json = {{"path", run.path}, {"settings", run.settings}, {"world", run.world}};
  json.update(numbers(run.step_ms, run.measured, run.exposed_ms, run.host_blocked_ms, run.host_behind_ms,
                      run.asked, run.ring, run.sent, run.calls));
  json["waited_for_rank"] = run.waited_for >= 0 ? ordered_json(run.waited_for) : ordered_json();
  json["start_skew_median_ms"] = run.skew_median_ms >= 0 ? ordered_json(run.skew_median_ms) : ordered_json();
  json["start_skew_most_ms"] = run.skew_most_ms >= 0 ? ordered_json(run.skew_most_ms) : ordered_json();
  json["ranks"] = std::move(ranks);
  json["collectives"] = std::move(sizes);
  json["notes"] = run.notes;
  return json;
}

std::string dump(const ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// What is neither waiting for communication nor counted twice: compute, and a host or rank that comes late.
double rest(const RunSummary& r) { return r.step_ms - (r.measured ? r.exposed_ms : 0); }

}  // namespace

RunSummary summarize(const std::vector<RunLogRecord>& records, const std::string& path) {
  RunSummary run;
  run.path = path;
  std::vector<const RunLogRecord*> used;
  for (const RunLogRecord& r : records) {
    if (r.communicators_made == 0) continue;
    used.push_back(&r);
    run.world = std::max(run.world, r.world);
    if (run.settings.empty()) run.settings = r.settings;
    run.ranks.push_back(summarizeRank(r));
  }
  std::stable_sort(run.ranks.begin(), run.ranks.end(),
                   [](const auto& a, const auto& b) { return a.rank < b.rank; });
  double n = 0, measured = 0;
  for (const RankSummary& r : run.ranks) {
    if (r.steps == 0) continue;
    ++n;
    run.step_ms += r.step_ms;
    run.host_blocked_ms += r.host_blocked_ms;
    run.host_behind_ms += r.host_behind_ms;
    run.asked += r.asked;
    run.ring += r.ring;
    run.sent += r.sent;
    run.calls += r.calls;
    if (r.measured == 0) continue;
    ++measured;
    run.exposed_ms += r.exposed_ms;
  }
  for (double* value : {&run.step_ms, &run.host_blocked_ms, &run.host_behind_ms, &run.asked, &run.ring,
                        &run.sent, &run.calls})
    *value /= std::max(n, 1.0);
  run.measured = measured > 0;
  run.exposed_ms /= std::max(measured, 1.0);
  // The rank that the others wait for waits least itself; a difference within a hundredth of the step says
  // nothing.
  if (measured > 1) {
    const auto by = [](const RankSummary& a, const RankSummary& b) { return a.exposed_ms < b.exposed_ms; };
    std::vector<RankSummary> with;
    std::copy_if(run.ranks.begin(), run.ranks.end(), std::back_inserter(with),
                 [](const RankSummary& r) { return r.measured > 0; });
    const auto [least, most] = std::minmax_element(with.begin(), with.end(), by);
    if (most->exposed_ms - least->exposed_ms > 0.01 * run.step_ms) run.waited_for = least->rank;
  }
  addSizes(used, &run);
  addSkew(used, &run);
  addNotes(&run);
  return run;
}

Result<RunSummary> readRun(const std::string& path) {
  std::error_code error;
  std::vector<std::string> files;
  if (std::filesystem::is_directory(path, error)) {
    for (auto it = std::filesystem::directory_iterator(path, error);
         !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
      if (it->path().extension() == ".json") files.push_back(it->path().string());
    }
  } else {
    files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  if (files.empty() || error) {
    return Status(StatusCode::kUnavailable,
                  fmt::format("{} holds no run logs: give a folder that `halfwire run --log` wrote", path));
  }
  std::vector<RunLogRecord> records;
  Status last;
  for (const std::string& file : files) {
    auto record = readRunLogJson(file);
    if (record.ok()) {
      records.push_back(std::move(record).value());
    } else {
      last = record.status();
    }
  }
  if (records.empty()) return last;
  RunSummary run = summarize(records, path);
  if (!last.ok()) run.notes.push_back("left out: " + last.message());
  if (run.ranks.empty())
    return Status(StatusCode::kInvalidData, fmt::format("{}: no process made a communicator", path));
  return run;
}

std::string reportText(const RunSummary& run) {
  std::string out = fmt::format("{}: {} ranks, {}\n\n", run.path, run.ranks.size(), run.settings);
  out += fmt::format("{:>6}  {:>6}  {:>9}  {:>11}  {:>7}  {:>12}  {:>13}  {:>9}  {:>9}  {:>9}  {:>6}\n",
                     "rank", "steps", "step ms", "exposed ms", "of step", "host-blocked", "behind coll.",
                     "GB asked", "exact GB", "GB sent", "calls");
  const auto row = [&](const std::string& name, uint64_t steps, double step, bool measured, double exposed,
                       double blocked, double behind, double asked, double ring, double sent, double calls) {
    out += fmt::format(
        "{:>6}  {:>6}  {:>9.3f}  {:>11}  {:>7}  {:>12.3f}  {:>13.3f}  {:>9.4f}  {:>9.4f}  {:>9.4f}  "
        "{:>6.1f}\n",
        name, steps, step, exposedCell(measured, exposed),
        measured && step > 0 ? fmt::format("{:.1f} %", 100 * exposed / step) : "-", blocked, behind,
        gb(asked), gb(ring), gb(sent), calls);
  };
  uint64_t steps = 0;
  for (const RankSummary& r : run.ranks) {
    row(r.rank >= 0 ? std::to_string(r.rank) : "?", r.steps, r.step_ms, r.measured > 0, r.exposed_ms,
        r.host_blocked_ms, r.host_behind_ms, r.asked, r.ring, r.sent, r.calls);
    steps = std::max(steps, r.steps);
  }
  row("mean", steps, run.step_ms, run.measured, run.exposed_ms, run.host_blocked_ms, run.host_behind_ms,
      run.asked, run.ring, run.sent, run.calls);
  out +=
      "A step: step and exposed are medians, the rest means; bytes are one rank's. Exposed: a stream that "
      "computes "
      "stood at a wait for a collective.\n"
      "Host-blocked is the program's thread in synchronising calls and is no part of it.\n";
  // Nobody must read "exposed 0" where the host does the waiting.
  if (run.measured && run.host_behind_ms > 0.05 * run.step_ms && run.host_behind_ms > run.exposed_ms) {
    out += fmt::format(
        "The program's own thread waits {:.1f} ms of a step ({:.0f} %) for collectives: no stream is left to "
        "wait, and "
        "exposed does not show it.\n",
        run.host_behind_ms, 100 * run.host_behind_ms / run.step_ms);
  }
  out += "\n";
  if (!run.sizes.empty()) {
    out += fmt::format("{:<14} {:<8} {:>6}  {:>9}  {:>8}  {:>9}  {:>9}  {:>9}  {:>11}  {:>11}\n",
                       "collective", "type", "ranks", "size from", "calls", "GB asked", "exact GB", "GB sent",
                       "exposed ms", "most of any");
    for (const SizeSummary& s : run.sizes) {
      out += fmt::format(
          "{:<14} {:<8} {:>6}  {:>9}  {:>8.2f}  {:>9.4f}  {:>9.4f}  {:>9.4f}  {:>11}  {:>11}\n", opName(s.op),
          dataTypeName(s.type), s.ranks, formatBytes(s.size_bucket), s.calls, gb(s.asked), gb(s.ring),
          gb(s.sent), exposedCell(run.measured, s.exposed_ms), exposedCell(run.measured, s.exposed_most_ms));
    }
    out += "A step, means over the ranks; calls before and outside steps are spread over all.\n\n";
  }
  if (run.waited_for >= 0)
    out += fmt::format("the others wait for rank {}: it is exposed least\n", run.waited_for);
  if (run.skew_median_ms >= 0) {
    out += fmt::format("ranks of one host begin a step {:.3f} ms apart by median, {:.3f} ms at most\n",
                       run.skew_median_ms, run.skew_most_ms);
  }
  for (const std::string& note : run.notes) out += note + "\n";
  return out;
}

std::string reportJson(const RunSummary& run) {
  ordered_json json = {{"schema", "halfwire.report"}, {"schema_version", 1}};
  json.update(runJson(run));
  return dump(json);
}

std::string reportHtml(const RunSummary& run) {
  std::string out =
      "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Halfwire: exposed "
      "communication</title>"
      "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}"
      "pre{overflow-x:auto}svg{max-width:100%}rect.e{fill:#c2452d}rect.r{fill:#4a7ba6}</style>";
  out += fmt::format("<h1>{}</h1><p>{:.3f} ms a step", escaped(run.path), run.step_ms);
  if (run.measured)
    out += fmt::format(", of which {:.3f} ms ({:.1f} %) wait for collectives", run.exposed_ms,
                       run.step_ms > 0 ? 100 * run.exposed_ms / run.step_ms : 0.0);
  out += "</p>";
  double longest = 1e-9;
  for (const RankSummary& r : run.ranks) longest = std::max(longest, r.step_ms);
  out +=
      fmt::format("<svg role=\"img\" aria-label=\"exposed part of each rank's step\" viewBox=\"0 0 800 {}\">",
                  24 * run.ranks.size() + 4);
  for (size_t i = 0; i < run.ranks.size(); ++i) {
    const RankSummary& r = run.ranks[i];
    const double width = 640 * r.step_ms / longest;
    const double part =
        r.measured > 0 && r.step_ms > 0 ? std::clamp(r.exposed_ms / r.step_ms, 0.0, 1.0) * width : 0;
    out += fmt::format(
        "<text x=\"0\" y=\"{0}\" font-size=\"13\">rank {1}</text><rect class=\"r\" x=\"70\" y=\"{2}\" "
        "width=\"{3:.1f}\" "
        "height=\"16\"/><rect class=\"e\" x=\"{4:.1f}\" y=\"{2}\" width=\"{5:.1f}\" height=\"16\"/>",
        24 * i + 17, r.rank, 24 * i + 4, width - part, 70 + width - part, part);
  }
  out += "</svg><p>Red: exposed communication. Blue: the rest of the step.</p><pre>" +
         escaped(reportText(run)) + "</pre></html>\n";
  return out;
}

std::string verdict(const RunSummary& a, const RunSummary& b) {
  if (a.step_ms <= 0 || b.step_ms <= 0) return "There is no verdict: one of the runs has no steps.";
  const double step = b.step_ms - a.step_ms;
  const bool known = a.measured && b.measured;
  const double exposed = b.exposed_ms - a.exposed_ms;
  const double sent = a.sent > 0 ? b.sent / a.sent - 1 : 0;
  std::string bytes = std::abs(sent) < 0.005 ? "the same bytes"
                      : sent < 0             ? fmt::format("{:.1f} % fewer bytes", -100 * sent)
                                             : fmt::format("{:.1f} % more bytes", 100 * sent);
  std::string moved = fmt::format("B sends {}", bytes);
  if (a.calls > 0 && std::abs(b.calls / a.calls - 1) > 0.01)
    moved +=
        fmt::format(" in {:.0f} {} instead of {:.0f}", b.calls, b.calls < 1.5 ? "call" : "calls", a.calls);
  if (std::abs(step) < 0.01 * a.step_ms) {
    return fmt::format("{}, and its step is as long ({:.2f} ms, {:+.2f} ms): what changed had been hidden.",
                       moved, b.step_ms, step);
  }
  const std::string change = fmt::format("its step is {:.2f} ms ({:.1f} %) {}", std::abs(step),
                                         100 * std::abs(step) / a.step_ms, step > 0 ? "longer" : "shorter");
  const bool contrast = step > 0 && sent < 0.005;
  if (!known) {
    return fmt::format("{}{} {}; why is unknown, since exposed time was not measured in both.", moved,
                       contrast ? ", yet" : " and", change);
  }
  // A cause must explain at least half of the change.
  if (step * exposed > 0 && std::abs(exposed) >= 0.5 * std::abs(step)) {
    if (step > 0) {
      return fmt::format(
          "{}{} {}: streams wait {:.2f} ms for collectives instead of {:.2f} ms, since what had been hidden "
          "behind "
          "compute in A is waited for in B.",
          moved, contrast ? ", yet" : " and", change, b.exposed_ms, a.exposed_ms);
    }
    return fmt::format("{} and {}: streams wait {:.2f} ms for collectives instead of {:.2f} ms.", moved,
                       change, b.exposed_ms, a.exposed_ms);
  }
  return fmt::format(
      "{}{} {}, and that is not waiting for collectives ({:.2f} ms against {:.2f} ms): the rest of the step, "
      "compute "
      "beside communication and the host, went from {:.2f} to {:.2f} ms.",
      moved, contrast ? ", yet" : " and", change, b.exposed_ms, a.exposed_ms, rest(a), rest(b));
}

std::string compareText(const RunSummary& a, const RunSummary& b) {
  std::string out =
      fmt::format("A: {} ({})\nB: {} ({})\n\n{:<34}{:>12}{:>12}{:>12}{:>10}\n", a.path, a.settings, b.path,
                  b.settings, "a step, means over the ranks", "A", "B", "B - A", "B / A");
  const auto row = [&](const char* name, bool there, double x, double y, int digits) {
    if (!there) {
      out += fmt::format("{:<34}{:>12}{:>12}\n", name, "-", "-");
      return;
    }
    out += fmt::format("{:<34}{:>12.{}f}{:>12.{}f}{:>+12.{}f}{:>10}\n", name, x, digits, y, digits, y - x,
                       digits, x > 0 ? fmt::format("{:.3f}", y / x) : "-");
  };
  const bool known = a.measured && b.measured;
  row("step ms", true, a.step_ms, b.step_ms, 3);
  row("exposed ms", known, a.exposed_ms, b.exposed_ms, 3);
  row("rest ms: compute, host", known, rest(a), rest(b), 3);
  row("host-blocked ms", true, a.host_blocked_ms, b.host_blocked_ms, 3);
  row("GB asked", true, gb(a.asked), gb(b.asked), 4);
  row("GB an exact ring would send", true, gb(a.ring), gb(b.ring), 4);
  row("GB sent", true, gb(a.sent), gb(b.sent), 4);
  row("calls", true, a.calls, b.calls, 1);
  out +=
      "The rest contains the slow-down of compute that runs beside collectives.\n\n" + verdict(a, b) + "\n";
  return out;
}

std::string compareJson(const RunSummary& a, const RunSummary& b) {
  return dump({{"schema", "halfwire.report.compare"},
               {"schema_version", 1},
               {"verdict", verdict(a, b)},
               {"rest_ms", {rest(a), rest(b)}},
               {"a", runJson(a)},
               {"b", runJson(b)}});
}

}  // namespace halfwire::meter
