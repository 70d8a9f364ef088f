#include "trace/timeline_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace halfwire::trace {
namespace {

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// Kernels whose recorded start is 0 while the rest of the trace lies far away are records that were never
// filled in.
void dropUnset(Timeline* t) {
  int64_t latest = 0;
  for (const Activity& a : t->activities) latest = std::max(latest, a.start_ns);
  constexpr int64_t kHour = 3'600'000'000'000;
  if (latest < kHour) return;
  const size_t dropped = std::erase_if(t->activities, [](const Activity& a) { return a.start_ns == 0; });
  if (dropped > 0) {
    t->warnings.push_back(
        fmt::format("{} device event(s) have the time 0, far from all others: left out", dropped));
  }
}

// One stream runs one thing after another. An interval that spans dozens of later, much shorter ones of its
// own stream is a broken end time; it is taken to end where the next one starts.
void clipImpossible(Timeline* t) {
  constexpr int64_t kSuspicious = 100'000'000;
  constexpr int kCovered = 32;
  const auto longest =
      std::max_element(t->activities.begin(), t->activities.end(),
                       [](const Activity& a, const Activity& b) { return a.duration() < b.duration(); });
  if (longest == t->activities.end() || longest->duration() < kSuspicious) return;
  size_t clipped = 0;
  for (size_t i = 0; i < t->activities.size(); ++i) {
    Activity& a = t->activities[i];
    if (a.duration() < kSuspicious) continue;
    int covered = 0;
    int64_t next = -1;
    const size_t last = std::min(t->activities.size(), i + 4096);  // keeps hostile files linear
    for (size_t k = i + 1; k < last && covered < kCovered; ++k) {
      const Activity& b = t->activities[k];
      if (b.start_ns >= a.end_ns) break;
      if (b.stream != a.stream || b.end_ns > a.end_ns || b.duration() > a.duration() / 4) continue;
      if (b.start_ns == a.start_ns) continue;
      if (covered++ == 0) next = b.start_ns;
    }
    if (covered < kCovered) continue;
    a.end_ns = next;
    ++clipped;
  }
  if (clipped > 0) {
    t->warnings.push_back(fmt::format(
        "{} device event(s) span dozens of later ones of their own stream, which cannot be: taken to end "
        "where the next one starts",
        clipped));
  }
}

// Index of a call by its correlation id: ids are dense in every recorder seen; repeated ids need the nearest
// in time.
class CallIndex {
 public:
  explicit CallIndex(const std::vector<HostCall>& calls) : calls_(calls) {
    int64_t low = std::numeric_limits<int64_t>::max();
    int64_t high = std::numeric_limits<int64_t>::min();
    size_t known = 0;
    for (const HostCall& c : calls) {
      if (c.correlation <= 0) continue;
      low = std::min(low, c.correlation);
      high = std::max(high, c.correlation);
      ++known;
    }
    if (known == 0) return;
    if (static_cast<uint64_t>(high) - static_cast<uint64_t>(low) < 16 * known + 1024) {
      low_ = low;
      table_.assign(static_cast<size_t>(high - low) + 1, kNone);
      bool unique = true;
      for (size_t i = 0; i < calls.size() && unique; ++i) {
        if (calls[i].correlation <= 0) continue;
        int32_t& slot = table_[static_cast<size_t>(calls[i].correlation - low)];
        unique = slot == kNone;
        slot = static_cast<int32_t>(i);
      }
      if (unique) return;
      table_.clear();
    }
    for (size_t i = 0; i < calls.size(); ++i) {
      if (calls[i].correlation > 0) order_.push_back(static_cast<int32_t>(i));
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int32_t a, int32_t b) { return calls_[a].correlation < calls_[b].correlation; });
  }

  int32_t find(int64_t correlation, int64_t before_ns) const {
    if (correlation <= 0) return kNone;
    if (!table_.empty()) {
      if (correlation < low_ || correlation - low_ >= static_cast<int64_t>(table_.size())) return kNone;
      return table_[static_cast<size_t>(correlation - low_)];
    }
    const auto range = std::equal_range(order_.begin(), order_.end(), correlation, Compare{calls_});
    if (range.first == range.second) return kNone;
    // Calls are in order of start: the last one that began before the device did, or else the first.
    const auto after = std::partition_point(range.first, range.second,
                                            [&](int32_t i) { return calls_[i].start_ns <= before_ns; });
    return after == range.first ? *range.first : *(after - 1);
  }

 private:
  struct Compare {
    const std::vector<HostCall>& calls;
    bool operator()(int32_t a, int64_t b) const { return calls[a].correlation < b; }
    bool operator()(int64_t a, int32_t b) const { return a < calls[b].correlation; }
  };
  const std::vector<HostCall>& calls_;
  int64_t low_ = 0;
  std::vector<int32_t> table_;
  std::vector<int32_t> order_;
};

void linkCalls(Timeline* t) {
  const CallIndex index(t->calls);
  size_t too_early = 0;
  for (Activity& a : t->activities) {
    a.call = index.find(a.correlation, a.start_ns);
    if (a.call == kNone) continue;
    const HostCall& call = t->calls[a.call];
    a.in_graph = call.kind == CallKind::kGraphLaunch;
    if (call.start_ns > a.start_ns + 10'000) ++too_early;
  }
  if (too_early > 0) {
    t->warnings.push_back(fmt::format(
        "{} device event(s) start before the call that launched them: the clocks of host and device differ",
        too_early));
  }
  // A session's first kernels can be missing while their launches are there.
  if (t->activities.empty()) return;
  std::vector<bool> used(t->calls.size(), false);
  for (const Activity& a : t->activities) {
    if (a.call != kNone) used[a.call] = true;
  }
  size_t missing = 0;
  for (size_t i = 0; i < t->calls.size(); ++i) {
    const CallKind kind = t->calls[i].kind;
    if (kind != CallKind::kLaunch && kind != CallKind::kGraphLaunch) continue;
    if (used[i]) break;
    ++missing;
  }
  if (missing > 0) {
    t->warnings.push_back(
        fmt::format("the first {} kernel launch(es) have no kernel: the recorder lost the start, the first "
                    "step is incomplete",
                    missing));
  }
}

// The innermost communication operator around a launch, by thread.
class OpIndex {
 public:
  explicit OpIndex(const Timeline& t) : ops_(t.comm_ops) {
    // By thread, then start; ops of one thread nest.
    parent_.assign(ops_.size(), kNone);
    std::vector<int32_t> open;
    for (size_t i = 0; i < ops_.size(); ++i) {
      while (!open.empty() &&
             (ops_[open.back()].thread != ops_[i].thread || ops_[open.back()].end_ns < ops_[i].end_ns)) {
        open.pop_back();
      }
      parent_[i] = open.empty() ? kNone : open.back();
      open.push_back(static_cast<int32_t>(i));
    }
  }

  // All operators around the call, innermost first, merged into one description.
  bool describe(const HostCall& call, CommInfo* info) const {
    auto after = std::partition_point(ops_.begin(), ops_.end(), [&](const CommOp& op) {
      return op.thread < call.thread || (op.thread == call.thread && op.start_ns <= call.start_ns);
    });
    if (after == ops_.begin()) return false;
    bool found = false;
    int32_t i = static_cast<int32_t>(after - ops_.begin()) - 1;
    for (int steps = 0; i != kNone && steps < 64; i = parent_[i], ++steps) {
      const CommOp& op = ops_[i];
      if (op.thread != call.thread) break;
      if (op.end_ns < call.start_ns) continue;
      found = true;
      if (info->type == Collective::kGeneric || info->type == Collective::kSendRecv) {
        if (op.info.type != Collective::kGeneric) info->type = op.info.type;
      }
      if (info->element == ElementType::kUnknown) info->element = op.info.element;
      if (!info->has_sizes && op.info.has_sizes) {
        info->has_sizes = true;
        info->in_elements = op.info.in_elements;
        info->out_elements = op.info.out_elements;
        if (op.info.element != ElementType::kUnknown) info->element = op.info.element;
      }
      if (info->group_size == 0) info->group_size = op.info.group_size;
      if (info->group_name == kNone) info->group_name = op.info.group_name;
      if (info->group_ranks == kNone) info->group_ranks = op.info.group_ranks;
      if (info->sequence < 0) info->sequence = op.info.sequence;
    }
    return found;
  }

 private:
  const std::vector<CommOp>& ops_;
  std::vector<int32_t> parent_;
};

void describeCommunication(Timeline* t, const CommPatterns& patterns) {
  std::sort(t->comm_ops.begin(), t->comm_ops.end(), [](const CommOp& a, const CommOp& b) {
    if (a.thread != b.thread) return a.thread < b.thread;
    if (a.start_ns != b.start_ns) return a.start_ns < b.start_ns;
    return a.end_ns > b.end_ns;
  });
  const OpIndex ops(*t);
  std::vector<int8_t> seen(t->names.size(), 0);
  std::vector<CommPatterns::Match> memo(t->names.size());
  std::unordered_map<uint32_t, uint32_t> counts;
  for (Activity& a : t->activities) {
    if (a.kind == ActivityKind::kSet) continue;
    CommPatterns::Match match;
    if (a.kind == ActivityKind::kCopy) {
      // Copy-engine collectives: copies between devices that a communication operator issued.
      const std::string& name = t->names.at(a.name);
      if (a.call == kNone || !(has(name, "PtoP") || has(name, "Peer"))) continue;
      CommInfo info;
      if (!ops.describe(t->calls[a.call], &info)) continue;
      match.kind = ActivityKind::kComm;
    } else {
      if (!seen[a.name]) {
        seen[a.name] = 1;
        memo[a.name] = patterns.classify(t->names.at(a.name));
      }
      match = memo[a.name];
    }
    a.kind = match.kind;
    if (match.kind == ActivityKind::kCodec) ++counts[a.name];
    if (match.kind != ActivityKind::kComm) continue;
    ++counts[a.name];
    if (a.comm == kNone) {
      a.comm = static_cast<int32_t>(t->comms.size());
      t->comms.emplace_back();
    }
    CommInfo& info = t->comms[a.comm];
    if (info.type == Collective::kGeneric) info.type = match.type;
    if (info.element == ElementType::kUnknown) info.element = match.element;
    if (a.call != kNone && !info.has_sizes) ops.describe(t->calls[a.call], &info);
  }
  for (const auto& [name, count] : counts) t->comm_names.emplace_back(t->names.at(name), count);
  std::sort(t->comm_names.begin(), t->comm_names.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
}

}  // namespace

CallKind classifyCall(std::string_view name) {
  if (has(name, "GraphLaunch")) return CallKind::kGraphLaunch;
  if (has(name, "Launch")) return CallKind::kLaunch;  // not the host: LaunchHostFunc
  if (has(name, "StreamWaitEvent")) return CallKind::kStreamWait;
  if (has(name, "EventRecord")) return CallKind::kEventRecord;
  if (has(name, "EventSynchronize")) return CallKind::kEventSync;
  if (has(name, "Synchronize")) return CallKind::kSync;
  if (has(name, "Memcpy") || has(name, "Memset") || has(name, "MemPrefetch")) return CallKind::kCopy;
  return CallKind::kOther;
}

void addSpan(std::vector<Span>* spans, Span span) {
  while (!spans->empty() && spans->back().start_ns >= span.start_ns && spans->back().end_ns <= span.end_ns) {
    spans->pop_back();
  }
  if (!spans->empty() && spans->back().start_ns <= span.start_ns && spans->back().end_ns >= span.start_ns) {
    spans->back().end_ns = std::max(spans->back().end_ns, span.end_ns);
    return;
  }
  spans->push_back(span);
}

void mergeSpans(std::vector<Span>* spans) {
  const auto byStart = [](const Span& a, const Span& b) { return a.start_ns < b.start_ns; };
  if (!std::is_sorted(spans->begin(), spans->end(), byStart))
    std::sort(spans->begin(), spans->end(), byStart);
  size_t kept = 0;
  for (const Span& s : *spans) {
    if (kept > 0 && (*spans)[kept - 1].end_ns >= s.start_ns) {
      (*spans)[kept - 1].end_ns = std::max((*spans)[kept - 1].end_ns, s.end_ns);
    } else {
      (*spans)[kept++] = s;
    }
  }
  spans->resize(kept);
  spans->shrink_to_fit();
}

Status finishTimeline(Timeline* t, const CommPatterns& patterns) {
  if (t->activities.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()) ||
      t->calls.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    return {StatusCode::kInvalidData,
            fmt::format("{}: more than 2^31 events: cut the trace into parts", t->file)};
  }
  dropUnset(t);
  const auto byStart = [](const auto& a, const auto& b) { return a.start_ns < b.start_ns; };
  const auto order = [&](auto* list) {
    if (!std::is_sorted(list->begin(), list->end(), byStart))
      std::stable_sort(list->begin(), list->end(), byStart);
  };
  // A total order, so that no result depends on the order in the file.
  std::sort(t->activities.begin(), t->activities.end(), [](const Activity& a, const Activity& b) {
    if (a.start_ns != b.start_ns) return a.start_ns < b.start_ns;
    if (a.stream != b.stream) return a.stream < b.stream;
    if (a.end_ns != b.end_ns) return a.end_ns < b.end_ns;
    return a.correlation < b.correlation;
  });
  order(&t->calls);
  std::sort(t->steps.begin(), t->steps.end(), byStart);
  std::stable_sort(t->waits.begin(), t->waits.end(),
                   [](const StreamWait& a, const StreamWait& b) { return a.time_ns < b.time_ns; });
  for (Thread& thread : t->threads) {
    mergeSpans(&thread.busy);
    mergeSpans(&thread.loading);
  }
  clipImpossible(t);
  linkCalls(t);
  describeCommunication(t, patterns);
  return {};
}

}  // namespace halfwire::trace
