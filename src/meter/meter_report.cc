#include "meter/meter_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/units.h"
#include "page/page.h"

namespace halfwire::meter {

// Generated from meter.html.
extern const char* const kMeterHtml;

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
  std::vector<double> all, sampled, unsampled, exposed, own;
  for (const RunLogStepRecord& s : record.meter.steps) {
    if (s.number < record.meter.warmup) continue;
    all.push_back(ms(s.duration_ns));
    (s.sampled ? sampled : unsampled).push_back(ms(s.duration_ns));
    own.push_back(std::max(0.0, ms(s.duration_ns) - ms(s.host_blocked_ns)));
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
  r.host_own_ms = median(std::move(own));
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
  std::map<std::string, int> words, ranges;
  uint64_t unmeasured = 0, waits = 0, captured = 0, lost = 0, blocking = 0, blind = 0, stepless = 0,
           checked = 0, predicted = 0;
  double sampled = 0, unsampled = 0;
  int both = 0;
  for (const RankSummary& r : run->ranks) {
    if (r.meter.state != MeterState::kOn)
      ++words[r.meter.words.empty() ? "the meter was off: run with --mode meter or --meter on"
                                    : r.meter.words];
    if (r.meter.source == StepSource::kRange) ++ranges[r.meter.range];
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
        "{} rank(s): halfwire_step() was not called, no NVTX range said where steps begin, and no repeating "
        "sequence of collectives was found: nothing was sampled",
        stepless));
  }
  for (const auto& [range, ranks] : ranges)
    run->notes.push_back(fmt::format("{} rank(s): steps from: NVTX range '{}'", ranks, range));
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

// Of a rank or of a run.
template <class Summary>
ordered_json numbers(const Summary& s, bool measured) {
  return {{"step_ms", s.step_ms},
          {"exposed_ms", measured ? ordered_json(s.exposed_ms) : ordered_json()},
          {"host_blocked_ms", s.host_blocked_ms},
          {"host_behind_collective_ms", s.host_behind_ms},
          {"host_own_ms", s.host_own_ms},
          {"bytes_asked", s.asked},
          {"bytes_exact_ring", s.ring},
          {"bytes_sent", s.sent},
          {"calls", s.calls}};
}

ordered_json sizeJson(const SizeSummary& s, bool measured) {
  return {{"operation", opName(s.op)},
          {"type", dataTypeName(s.type)},
          {"ranks", s.ranks},
          {"size_bucket_bytes", s.size_bucket},
          {"calls", s.calls},
          {"bytes_asked", s.asked},
          {"bytes_exact_ring", s.ring},
          {"bytes_sent", s.sent},
          {"exposed_ms", measured ? ordered_json(s.exposed_ms) : ordered_json()},
          {"exposed_most_ms", measured ? ordered_json(s.exposed_most_ms) : ordered_json()}};
}

ordered_json runJson(const RunSummary& run) {
  ordered_json ranks = ordered_json::array();
  for (const RankSummary& r : run.ranks) {
    ordered_json one = {
        {"rank", r.rank}, {"host", r.host}, {"steps", r.steps}, {"measured_steps", r.measured}};
    one.update(numbers(r, r.measured > 0));
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
  for (const SizeSummary& s : run.sizes) sizes.push_back(sizeJson(s, run.measured));
  ordered_json json = {{"path", run.path}, {"settings", run.settings}, {"world", run.world}};
  json.update(numbers(run, run.measured));
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

// What the comparison's figures hold.
constexpr const char* kRestWords =
    "Step = waiting + the rest. The rest is what streams computed, alone and beside collectives, which slow "
    "it "
    "down, and what they\nidled for the host or a copy: the logs do not part these. Host's own is the "
    "program's "
    "thread outside its waits.";

// Nobody must read "exposed 0" where the host does the waiting; but such waits last until the compute before
// and beside the collective is done as well. Empty where there is nothing to say.
std::string hostWords(const RunSummary& run) {
  if (!run.measured || run.host_behind_ms <= 0.05 * run.step_ms || run.host_behind_ms <= run.exposed_ms)
    return "";
  return fmt::format(
      "The program's own thread stands {:.1f} ms of a step ({:.0f} %) in waits behind collectives and "
      "whatever "
      "streams compute until then: what of it only a collective needed, exposed does not show unless a "
      "stream "
      "waited too.",
      run.host_behind_ms, 100 * run.host_behind_ms / run.step_ms);
}

std::string waitedForWords(const RunSummary& run) {
  return fmt::format("the others wait for rank {}: it is exposed least", run.waited_for);
}

std::string skewWords(const RunSummary& run) {
  return fmt::format("ranks of one host begin a step {:.3f} ms apart by median, {:.3f} ms at most",
                     run.skew_median_ms, run.skew_most_ms);
}

// What is not waiting for collectives: compute, and a host or a copy that comes late.
double rest(const RunSummary& r) { return r.step_ms - r.exposed_ms; }

// A line of the comparison.
struct Line {
  const char* name;
  double a, b;
  int digits;
  bool known = true;
};

std::vector<Line> lines(const RunSummary& a, const RunSummary& b) {
  const bool known = a.measured && b.measured;
  return {{"step ms", a.step_ms, b.step_ms, 3},
          {"  waiting: exposed ms", a.exposed_ms, b.exposed_ms, 3, known},
          {"  the rest: compute, host ms", rest(a), rest(b), 3, known},
          {"host-blocked ms", a.host_blocked_ms, b.host_blocked_ms, 3},
          {"host's own ms", a.host_own_ms, b.host_own_ms, 3},
          {"GB asked", gb(a.asked), gb(b.asked), 4},
          {"GB an exact ring would send", gb(a.ring), gb(b.ring), 4},
          {"GB sent", gb(a.sent), gb(b.sent), 4},
          {"calls", a.calls, b.calls, 1}};
}

// The same kind of call in both runs; null where one has none.
struct SizePair {
  const SizeSummary* a = nullptr;
  const SizeSummary* b = nullptr;
  double most() const { return std::max(a != nullptr ? a->exposed_ms : 0, b != nullptr ? b->exposed_ms : 0); }
};

std::vector<SizePair> sizePairs(const RunSummary& a, const RunSummary& b) {
  std::map<std::tuple<CollectiveOp, ncclDataType_t, uint32_t, uint64_t>, SizePair> pairs;
  for (const SizeSummary& s : a.sizes) pairs[{s.op, s.type, s.ranks, s.size_bucket}].a = &s;
  for (const SizeSummary& s : b.sizes) pairs[{s.op, s.type, s.ranks, s.size_bucket}].b = &s;
  std::vector<SizePair> out;
  for (const auto& [key, pair] : pairs) out.push_back(pair);
  std::stable_sort(out.begin(), out.end(),
                   [](const SizePair& x, const SizePair& y) { return x.most() > y.most(); });
  return out;
}

ordered_json pairsJson(const RunSummary& a, const RunSummary& b) {
  ordered_json out = ordered_json::array();
  for (const SizePair& p : sizePairs(a, b)) {
    out.push_back({{"a", p.a != nullptr ? sizeJson(*p.a, a.measured) : ordered_json()},
                   {"b", p.b != nullptr ? sizeJson(*p.b, b.measured) : ordered_json()}});
  }
  return out;
}

// "of the +22.10 ms, +21.98 are waiting for collectives and +0.12 the rest (...)".
std::string parts(const RunSummary& a, const RunSummary& b) {
  return fmt::format(
      "of the {:+.2f} ms, {:+.2f} are waiting for collectives and {:+.2f} the rest (compute beside "
      "communication, host)",
      b.step_ms - a.step_ms, b.exposed_ms - a.exposed_ms, rest(b) - rest(a));
}

// Whose the difference of the rest is, as far as the program's own thread says it. That thread's time outside
// its waits is the host's; where that is as long and the rest is not, the host waited for a device that did
// not wait for collectives.
std::string whose(const RunSummary& a, const RunSummary& b) {
  const double grown = rest(b) - rest(a);
  const double own = b.host_own_ms - a.host_own_ms;
  if (a.host_own_ms > 0.95 * a.step_ms && b.host_own_ms > 0.95 * b.step_ms)
    return "; which of the two, the logs cannot tell, since the program's thread hardly waits in either";
  const std::string figures =
      fmt::format("the program's thread is busy {:.2f} ms outside its waits instead of {:.2f} ms",
                  b.host_own_ms, a.host_own_ms);
  if (own * grown > 0 && std::abs(own) >= 0.5 * std::abs(grown)) return "; " + figures + ", which may be why";
  return fmt::format("; {}, so that it is the streams that {}", figures,
                     grown > 0 ? "compute longer, or idle longer between the host's waits"
                               : "compute less long, or idle less between the host's waits");
}

// The page with `view`, which says what it shows.
std::string page(const ordered_json& view) {
  return fillPage(kMeterHtml, view.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

ordered_json pageRun(const RunSummary& run) {
  ordered_json json = runJson(run);
  for (ordered_json& rank : json["ranks"]) rank.erase("per_step");  // thousands, and not shown
  return json;
}

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
    run.host_own_ms += r.host_own_ms;
    run.asked += r.asked;
    run.ring += r.ring;
    run.sent += r.sent;
    run.calls += r.calls;
    if (r.measured == 0) continue;
    ++measured;
    run.exposed_ms += r.exposed_ms;
  }
  for (double* value : {&run.step_ms, &run.host_blocked_ms, &run.host_behind_ms, &run.host_own_ms, &run.asked,
                        &run.ring, &run.sent, &run.calls})
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
  if (const std::string words = hostWords(run); !words.empty()) out += words + "\n";
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
  if (run.waited_for >= 0) out += waitedForWords(run) + "\n";
  if (run.skew_median_ms >= 0) out += skewWords(run) + "\n";
  for (const std::string& note : run.notes) out += note + "\n";
  return out;
}

std::string reportJson(const RunSummary& run) {
  ordered_json json = {{"schema", "halfwire.report"}, {"schema_version", 1}};
  json.update(runJson(run));
  return dump(json);
}

std::string reportHtml(const RunSummary& run) {
  std::string lead = fmt::format("{:.3f} ms a step", run.step_ms);
  if (run.measured) {
    lead += fmt::format(", of which {:.3f} ms ({:.1f} %) wait for collectives", run.exposed_ms,
                        run.step_ms > 0 ? 100 * run.exposed_ms / run.step_ms : 0.0);
  }
  std::vector<std::string> notes = run.notes;
  if (run.skew_median_ms >= 0) notes.insert(notes.begin(), skewWords(run));
  if (run.waited_for >= 0) notes.insert(notes.begin(), waitedForWords(run));
  if (const std::string words = hostWords(run); !words.empty()) notes.insert(notes.begin(), words);
  ordered_json collectives = ordered_json::array();
  for (const SizeSummary& s : run.sizes) collectives.push_back({{"a", sizeJson(s, run.measured)}});
  return page({{"lead", lead},
               {"runs", ordered_json::array({pageRun(run)})},
               {"notes", ordered_json::array({notes})},
               {"collectives", std::move(collectives)},
               {"lines", ordered_json::array()}});
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
    // What is saved in waiting and spent again in compute is not hidden.
    const bool traded = known && std::abs(exposed) >= 0.01 * a.step_ms;
    return fmt::format(
        "{}, and its step is as long ({:.2f} ms): {}.", moved, b.step_ms,
        traded ? parts(a, b) + whose(a, b) : fmt::format("what changed had been hidden ({:+.2f} ms)", step));
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
          "compute in A is waited for in B; {}.",
          moved, contrast ? ", yet" : " and", change, b.exposed_ms, a.exposed_ms, parts(a, b));
    }
    return fmt::format("{} and {}: streams wait {:.2f} ms for collectives instead of {:.2f} ms; {}.", moved,
                       change, b.exposed_ms, a.exposed_ms, parts(a, b));
  }
  return fmt::format(
      "{}{} {}, and that is not waiting for collectives ({:.2f} ms against {:.2f} ms): the rest of the step, "
      "compute beside communication and the host, went from {:.2f} to {:.2f} ms{}.",
      moved, contrast ? ", yet" : " and", change, b.exposed_ms, a.exposed_ms, rest(a), rest(b), whose(a, b));
}

std::string compareText(const RunSummary& a, const RunSummary& b) {
  std::string out =
      fmt::format("A: {} ({})\nB: {} ({})\n\n{:<34}{:>12}{:>12}{:>12}{:>10}\n", a.path, a.settings, b.path,
                  b.settings, "a step, means over the ranks", "A", "B", "B - A", "B / A");
  for (const Line& l : lines(a, b)) {
    if (!l.known) {
      out += fmt::format("{:<34}{:>12}{:>12}\n", l.name, "-", "-");
      continue;
    }
    out += fmt::format("{:<34}{:>12.{}f}{:>12.{}f}{:>+12.{}f}{:>10}\n", l.name, l.a, l.digits, l.b, l.digits,
                       l.b - l.a, l.digits, l.a > 0 ? fmt::format("{:.3f}", l.b / l.a) : "-");
  }
  out += std::string(kRestWords) + "\n\n" + verdict(a, b) + "\n";
  return out;
}

std::string compareJson(const RunSummary& a, const RunSummary& b) {
  const bool known = a.measured && b.measured;
  const auto both = [&](double x) { return known ? ordered_json(x) : ordered_json(); };
  return dump({{"schema", "halfwire.report.compare"},
               {"schema_version", 1},
               {"verdict", verdict(a, b)},
               {"rest_ms", ordered_json::array({both(rest(a)), both(rest(b))})},
               {"difference_ms",
                {{"step", b.step_ms - a.step_ms},
                 {"exposed", both(b.exposed_ms - a.exposed_ms)},
                 {"rest", both(rest(b) - rest(a))},
                 {"host_own", b.host_own_ms - a.host_own_ms}}},
               {"collectives", pairsJson(a, b)},
               {"a", runJson(a)},
               {"b", runJson(b)}});
}

std::string compareHtml(const RunSummary& a, const RunSummary& b) {
  ordered_json table = ordered_json::array();
  for (const Line& l : lines(a, b)) {
    table.push_back({{"name", l.name},
                     {"a", l.known ? ordered_json(l.a) : ordered_json()},
                     {"b", l.known ? ordered_json(l.b) : ordered_json()},
                     {"digits", l.digits}});
  }
  return page({{"lead", verdict(a, b)},
               {"runs", ordered_json::array({pageRun(a), pageRun(b)})},
               {"notes", ordered_json::array({a.notes, b.notes})},
               {"collectives", pairsJson(a, b)},
               {"lines", std::move(table)},
               {"rest", kRestWords}});
}

}  // namespace halfwire::meter
