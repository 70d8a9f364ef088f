#include "analysis/analyze.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "trace/trace_file.h"

namespace halfwire::analysis {
namespace {

// "24.3 ms", "150 us".
std::string time(int64_t ns) {
  if (ns == 0) return "0 ms";
  return ns < 1'000'000 ? fmt::format("{:.1f} us", static_cast<double>(ns) / 1e3)
                        : fmt::format("{:.1f} ms", static_cast<double>(ns) / 1e6);
}

std::string count(size_t n, const char* what) { return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s"); }

// The lanes of one job: same folder and world size, no rank twice. Two runs in one folder are told apart by
// time.
std::vector<std::vector<size_t>> findGroups(const std::vector<LaneReport>& lanes) {
  std::map<std::pair<std::string, int32_t>, std::vector<size_t>> candidates;
  std::map<std::string, std::vector<size_t>> by_file;
  std::set<std::string> folders;
  size_t with_rank = 0;
  for (size_t i = 0; i < lanes.size(); ++i) {
    if (!lanes[i].has_device_activity) continue;
    by_file[lanes[i].file].push_back(i);
    if (!lanes[i].rank) continue;
    ++with_rank;
    folders.insert(std::filesystem::path(lanes[i].file).parent_path().string());
  }
  for (const auto& [file, members] : by_file) {
    for (const size_t i : members) {
      if (!lanes[i].rank || members.size() > 1) continue;
      // One file in each of several folders is how some jobs save their ranks.
      const std::string folder =
          folders.size() == with_rank ? "" : std::filesystem::path(lanes[i].file).parent_path().string();
      candidates[{folder, lanes[i].world_size}].push_back(i);
    }
  }
  std::vector<std::vector<size_t>> groups;
  for (auto& [key, members] : candidates) {
    const auto start = [&](size_t i) { return lanes[i].base_ns + lanes[i].lane.start_ns; };
    const auto end = [&](size_t i) { return lanes[i].base_ns + lanes[i].lane.end_ns; };
    std::stable_sort(members.begin(), members.end(), [&](size_t a, size_t b) { return start(a) < start(b); });
    std::set<int32_t> ranks;
    for (const size_t i : members) ranks.insert(*lanes[i].rank);
    const bool unique = ranks.size() == members.size();
    std::vector<std::vector<size_t>> runs;
    for (const size_t i : members) {
      std::vector<size_t>* home = nullptr;
      for (auto& run : runs) {
        const bool taken =
            std::any_of(run.begin(), run.end(), [&](size_t k) { return lanes[k].rank == lanes[i].rank; });
        const bool overlaps = std::any_of(run.begin(), run.end(),
                                          [&](size_t k) { return start(i) < end(k) && start(k) < end(i); });
        if (!taken && (unique || overlaps) && home == nullptr) home = &run;
      }
      if (home == nullptr) home = &runs.emplace_back();
      home->push_back(i);
    }
    for (auto& run : runs) {
      std::sort(run.begin(), run.end(), [&](size_t a, size_t b) { return *lanes[a].rank < *lanes[b].rank; });
      if (run.size() > 1) groups.push_back(std::move(run));
    }
  }
  // One recording of several devices is a group by itself.
  for (const auto& [file, members] : by_file) {
    const bool communicates = std::count_if(members.begin(), members.end(),
                                            [&](size_t i) { return !lanes[i].lane.comms.empty(); }) > 1;
    if (members.size() > 1 && communicates) groups.push_back(members);
  }
  return groups;
}

void describeFp8(const AnalyzeOptions& options, LaneReport* r) {
  Fp8Outlook& f = r->fp8;
  f.exposed_ns = r->lane.total.exposed;
  double gain = 0;
  for (const CollectiveRow& row : r->collectives) {
    f.touchable_ns += row.exposed_needed_ns;
    gain += static_cast<double>(row.exposed_needed_ns) * row.saving;
    f.bytes = addSaturated(f.bytes, row.bytes);
    f.sizes_known = f.sizes_known || row.sized > 0;
    if (options.codec && row.saving > 0) {
      f.codec_ns +=
          static_cast<int64_t>(static_cast<double>(row.bytes) * options.codec->seconds_per_byte * 1e9);
    }
  }
  f.touchable_ns = std::min(f.touchable_ns, f.exposed_ns);
  f.gain_ns = std::max<int64_t>(0, static_cast<int64_t>(gain) - f.codec_ns);

  if (!r->has_device_activity) {
    f.words = "no device activity is recorded, so nothing can be said about communication";
    return;
  }
  if (r->lane.comms.empty()) {
    f.words = "no device communication recorded: compression has nothing to act on";
    return;
  }
  const auto steps = static_cast<int64_t>(std::max<size_t>(1, r->lane.steps.size()));
  const std::string per = r->lane.steps.empty() ? "in all" : "a step";
  std::string carries;
  if (f.sizes_known) {
    const double bytes = static_cast<double>(f.bytes) / static_cast<double>(steps);
    carries = bytes >= 1e9 ? fmt::format("the wire carries {:.1f} GB {}", bytes / 1e9, per)
                           : fmt::format("the wire carries {:.1f} MB {}", bytes / 1e6, per);
  } else {
    carries = fmt::format("{} {} (sizes not recorded)",
                          count(r->lane.comms.size() / static_cast<size_t>(steps), "call"), per);
  }
  f.words = fmt::format("{} and {} of it shows", carries, time(f.exposed_ns / steps));
  if (r->group && f.touchable_ns < f.exposed_ns - f.exposed_ns / 20) {
    f.words += fmt::format(", {} of that without the waiting for late ranks", time(f.touchable_ns / steps));
  }
  f.words += fmt::format(": do not expect FP8 to save more than {} of {}", time(f.gain_ns / steps),
                         time(r->lane.total.span / steps));
  if (!r->group && r->world_size > 1) {
    f.words +=
        "; that includes waiting for late ranks, which only the traces of all ranks together can tell apart";
  }
  if (f.codec_ns > 0) {
    f.words += fmt::format(" (packing at its measured cost of {} taken off)", time(f.codec_ns / steps));
  }
}

void diagnose(LaneReport* r) {
  const Parts& p = r->lane.total;
  if (!r->has_device_activity) {
    r->headline =
        r->host_collectives > 0
            ? fmt::format(
                  "{} issued by the host, but no device activity is recorded: nothing can be measured; "
                  "record CUDA activities too",
                  count(r->host_collectives, "collective"))
            : "no device activity is recorded: nothing to account for";
    return;
  }
  struct Share {
    const char* name;
    int64_t ns;
  };
  const auto idle = [&](IdleCause c) { return r->lane.idle[static_cast<size_t>(c)]; };
  std::vector<Share> shares = {{"compute", p.compute},
                               {"communication", p.exposed - r->exposed_wait_ns},
                               {"straggler_wait", r->exposed_wait_ns},
                               {"copy", p.copy_alone},
                               {"launch_bound", idle(IdleCause::kLaunchBound)},
                               {"communication_wait", idle(IdleCause::kCommunicationWait)},
                               {"host_sync", idle(IdleCause::kHostSync)},
                               {"data_loading", idle(IdleCause::kDataLoading)},
                               {"device_gap", idle(IdleCause::kDeviceGap)},
                               {"unrecorded", idle(IdleCause::kUnrecorded)}};
  std::stable_sort(shares.begin(), shares.end(), [](const Share& a, const Share& b) { return a.ns > b.ns; });
  for (const Share& s : shares) {
    if (s.ns > 0 && s.ns >= p.span / 5) r->diagnosis.emplace_back(s.name);
  }
  const bool launch_bound = idle(IdleCause::kLaunchBound) >= p.span / 5;
  const bool graph =
      r->lane.graph_kernels > 0 && r->lane.graph_kernels * 2 > static_cast<int64_t>(r->lane.kernels);
  if (launch_bound && idle(IdleCause::kLaunchBound) > r->fp8.touchable_ns) {
    r->headline = fmt::format(
        "launch-bound: the device ran dry for {} of {} because the next launch came late; "
        "compression is not the "
        "lever, {}",
        time(idle(IdleCause::kLaunchBound)), time(p.span),
        graph ? "the time between graph launches is"
              : "CUDA graphs, larger batches or fewer small kernels are");
  } else if (r->exposed_wait_ns >= p.span / 5) {
    r->headline = fmt::format(
        "waiting: {} of {} went by inside collectives until the last rank came; the wire itself "
        "shows {}",
        time(r->exposed_wait_ns), time(p.span), time(r->fp8.touchable_ns));
  } else if (r->lane.comms.empty()) {
    r->headline = "no device communication recorded";
    if (r->host_collectives > 0) {
      r->headline += fmt::format(
          ", though the host issued {}: one rank, or communication kernels unknown to the table "
          "(see --comm-pattern)",
          count(r->host_collectives, "collective"));
    }
  } else if (p.exposed >= p.span / 10) {
    r->headline = fmt::format("communication shows: {} of {} are neither compute nor hidden under it",
                              time(p.exposed), time(p.span));
  } else if (p.compute >= p.span / 2) {
    r->headline = fmt::format(
        "compute-bound: {:.0f} % of the time computes, {} of communication shows",
        100.0 * static_cast<double>(p.compute) / static_cast<double>(std::max<int64_t>(1, p.span)),
        time(p.exposed));
  } else {
    r->headline =
        fmt::format("{} of {} idle, {} of communication shows", time(p.idle), time(p.span), time(p.exposed));
  }
  if (launch_bound && idle(IdleCause::kLaunchBound) <= r->fp8.touchable_ns + r->exposed_wait_ns &&
      r->headline.rfind("launch-bound", 0) != 0) {
    r->headline += fmt::format("; launch-bound too: for {} the device had run dry when the next launch came",
                               time(idle(IdleCause::kLaunchBound)));
  }
  if (graph && p.exposed < p.span / 20) {
    r->headline +=
        "; most kernels come from CUDA graphs: what little communication shows is all that compression could "
        "touch";
  }
}

std::string causeWords(int cause) {
  switch (cause) {
    case static_cast<int>(IdleCause::kLaunchBound):
      return "its host launched late";
    case static_cast<int>(IdleCause::kCommunicationWait):
      return "its host waited in a collective of its own";
    case static_cast<int>(IdleCause::kHostSync):
      return "its host was blocked in a synchronisation";
    case static_cast<int>(IdleCause::kDataLoading):
      return "its host waited for data";
    case static_cast<int>(IdleCause::kDeviceGap):
      return "its kernels stood in the queue";
    case static_cast<int>(IdleCause::kUnrecorded):
      return "of something that is not recorded";
    case kIdleCauses:
      return "it computed longer";
    case kIdleCauses + 1:
      return "it was in other communication";
    default:
      return "it copied longer";
  }
}

void describeGroup(const Analysis& a, GroupReport* g) {
  const Group& m = g->group;
  int64_t span = 0;
  int64_t worst_wait = 0;
  for (size_t k = 0; k < g->lanes.size(); ++k) {
    const LaneReport& r = a.lanes[g->lanes[k]];
    span = std::max(span, r.lane.total.span);
    worst_wait = std::max(worst_wait, m.wait_ns[k]);
    if (r.lane.idle[static_cast<size_t>(IdleCause::kLaunchBound)] >= r.lane.total.span / 5) {
      g->launch_bound_ranks.push_back(m.ranks[k]);
    }
  }
  g->words =
      fmt::format("{} matched over {} ranks need {}; ranks wait up to {} more for others",
                  count(m.matched, "collective"), m.ranks.size(), time(m.intrinsic_ns), time(worst_wait));
  if (m.late.empty()) return;
  const int64_t most = m.late.front().blame_ns;
  if (most >= span / 50) {
    // Several ranks can take turns in being late.
    std::vector<const LateRank*> late;
    for (const LateRank& l : m.late) {
      if (l.blame_ns * 4 >= most) late.push_back(&l);
    }
    if (late.size() * 2 > m.ranks.size()) {
      g->words += "; most ranks take turns in coming last";
    } else {
      for (const LateRank* l : late) {
        g->words += fmt::format("; rank {} comes last and costs the others {} because {}", l->rank,
                                time(l->blame_ns), causeWords(l->cause));
      }
    }
  }
  if (!g->launch_bound_ranks.empty()) {
    std::string list;
    for (const int32_t rank : g->launch_bound_ranks)
      list += fmt::format("{}{}", list.empty() ? "" : ", ", rank);
    g->words += fmt::format("; launch-bound: rank{} {}", g->launch_bound_ranks.size() == 1 ? "" : "s", list);
  }
  int64_t touchable = 0;
  for (const size_t i : g->lanes) touchable = std::max(touchable, a.lanes[i].fp8.touchable_ns);
  g->words += fmt::format("; compression could touch {} at most", time(touchable));
  if (m.mismatched > 0) {
    g->words += fmt::format(
        "; {} of the matched collectives are of different types on different ranks: the recordings differ",
        m.mismatched);
  }
}

}  // namespace

Result<Analysis> analyzeFiles(const std::vector<std::string>& files, const AnalyzeOptions& options) {
  Result<trace::CommPatterns> patterns = trace::CommPatterns::create(options.comm_patterns);
  if (!patterns.ok()) return patterns.status();
  Analysis a;
  a.what_if_comm = options.what_if_comm;
  // Process group names and rank lists outlive the timelines, which do not.
  std::vector<trace::Strings> names;
  // How much of a collective is waiting is only known when all ranks are: a what-if replay of several has to
  // wait for it.
  const bool replay_later = options.what_if_comm.has_value() && files.size() > 1;
  const bool keep = options.keep_timelines || replay_later;
  const double scale = options.what_if_comm.value_or(1.0);
  for (const std::string& file : files) {
    trace::ReadOptions read;
    if (options.progress) {
      read.progress = [&](uint64_t done, uint64_t total) { options.progress(file, done, total); };
    }
    Result<trace::Timeline> timeline = trace::readTrace(file, patterns.value(), read);
    if (!timeline.ok()) return timeline.status();
    trace::Timeline& t = timeline.value();
    std::vector<Lane> lanes = accountLanes(t);
    const bool has_activity = !lanes.empty();
    if (lanes.empty()) lanes.emplace_back();
    const bool want_replay = options.critical_path.value_or(
        options.what_if_comm.has_value() || t.activities.size() + t.calls.size() <= kReplayLimit);
    for (Lane& lane : lanes) {
      LaneReport r;
      r.file = file;
      r.format = t.format;
      r.rank = t.rank;
      r.world_size = t.world_size;
      r.base_ns = t.base_ns;
      r.json_bytes = t.json_bytes;
      r.events = t.events;
      r.has_device_activity = has_activity;
      r.host_collectives = static_cast<size_t>(
          std::count_if(t.comm_ops.begin(), t.comm_ops.end(),
                        [](const trace::CommOp& op) { return op.info.type != trace::Collective::kGeneric; }));
      r.comm_names = t.comm_names;
      r.warnings = t.warnings;
      r.lane = std::move(lane);
      r.timeline = names.size();
      if (want_replay && has_activity && !replay_later) r.replay = replay(t, r.lane, scale, {});
      a.lanes.push_back(std::move(r));
    }
    if (keep) {
      names.emplace_back();
      a.timelines.push_back(std::move(t));
    } else {
      names.push_back(std::move(t.names));
    }
  }
  const auto strings = [&](size_t i) -> const trace::Strings& {
    return keep ? a.timelines[i].names : names[i];
  };

  std::vector<std::vector<int64_t>> needed(a.lanes.size());
  for (const std::vector<size_t>& members : findGroups(a.lanes)) {
    std::vector<RankLane> ranks;
    for (const size_t i : members) {
      const LaneReport& r = a.lanes[i];
      ranks.push_back({r.rank && members.size() > 1 && a.lanes[members[0]].file != a.lanes[members[1]].file
                           ? *r.rank
                           : r.lane.device,
                       r.base_ns, &r.lane, &strings(r.timeline)});
    }
    GroupReport g;
    g.group = matchRanks(ranks);
    g.lanes = members;
    for (size_t k = 0; k < members.size(); ++k) {
      LaneReport& r = a.lanes[members[k]];
      r.group = static_cast<int>(a.groups.size());
      r.exposed_wait_ns = g.group.exposed_wait_ns[k];
      needed[members[k]] = g.group.needed[k];
    }
    a.groups.push_back(std::move(g));
  }
  for (size_t i = 0; i < a.lanes.size(); ++i) {
    LaneReport& r = a.lanes[i];
    if (replay_later && r.has_device_activity)
      r.replay = replay(a.timelines[r.timeline], r.lane, scale, needed[i]);
    r.collectives = tabulate(strings(r.timeline), r.lane.comms, needed[i], r.world_size);
    describeFp8(options, &r);
    diagnose(&r);
  }
  for (GroupReport& g : a.groups) describeGroup(a, &g);
  if (!options.keep_timelines) a.timelines.clear();
  return a;
}

}  // namespace halfwire::analysis
