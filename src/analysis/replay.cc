#include "analysis/replay.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "analysis/waits.h"

namespace halfwire::analysis {

using trace::Activity;
using trace::ActivityKind;
using trace::CallKind;
using trace::HostCall;
using trace::kNone;
using trace::Timeline;

const char* const kPathKindNames[kPathKinds] = {"compute", "comm",      "codec",          "copy",
                                                "host",    "host_sync", "launch_latency", "unexplained"};

namespace {

// Beyond this a start that follows no predecessor is unexplained rather than latency.
constexpr int64_t kLatency = 10'000;
// An end so shortly before a start on another stream is taken for its cause where the trace records no event
// waits.
constexpr int64_t kInferred = 20'000;
// A thread that pauses this long may have waited for another thread.
constexpr int64_t kThreadPause = 50'000;

// An edge: the node may happen `lag` after the value of `from`.
struct Edge {
  int32_t from = kNone;  // node
  int64_t lag = 0;
};

// A moment: a call's start or end, an activity's start or end.
struct Node {
  int64_t measured = 0;
  int32_t edges = 0;  // first of its edges
  int32_t edge_count = 0;
  int64_t own = 0;  // added to the latest predecessor
  PathKind kind = PathKind::kHost;
};

// Nodes are numbered activity starts, activity ends, call starts, call ends.
class Graph {
 public:
  Graph(const Timeline& t, const Lane& lane) : t_(t), lane_(lane) {
    for (uint32_t i = 0; i < t.activities.size(); ++i) {
      if (t.streams[t.activities[i].stream].device == lane.device) members_.push_back(i);
    }
    n_ = static_cast<int32_t>(members_.size());
    calls_ = static_cast<int32_t>(t.calls.size());
    nodes_.resize(static_cast<size_t>(2) * (n_ + calls_));
    build();
  }

  // Times of all nodes with the given durations of communication (by index into lane.comms; empty: as
  // recorded).
  std::vector<int64_t> run(const std::vector<int64_t>& comm_durations, std::vector<int32_t>* binding) const {
    std::vector<int64_t> value(nodes_.size());
    if (binding != nullptr) binding->assign(nodes_.size(), kNone);
    std::vector<int64_t> override_ns;
    if (!comm_durations.empty()) {
      override_ns.assign(static_cast<size_t>(n_), -1);
      std::vector<int32_t> position(t_.activities.size(), kNone);
      for (int32_t m = 0; m < n_; ++m) position[members_[m]] = m;
      for (size_t c = 0; c < lane_.comms.size(); ++c)
        override_ns[position[lane_.comms[c].activity]] = comm_durations[c];
    }
    for (const int32_t id : order_) {
      const Node& node = nodes_[id];
      int64_t own = node.own;
      if (!override_ns.empty() && id >= n_ && id < 2 * n_ && override_ns[id - n_] >= 0)
        own = override_ns[id - n_];
      if (node.edge_count == 0) {
        value[id] = node.measured;  // nothing recorded precedes it
        continue;
      }
      int64_t latest = std::numeric_limits<int64_t>::min();
      for (int32_t e = node.edges; e < node.edges + node.edge_count; ++e) {
        const int64_t v = value[edges_[e].from] + edges_[e].lag;
        if (v <= latest) continue;
        latest = v;
        if (binding != nullptr) (*binding)[id] = edges_[e].from;
      }
      value[id] = latest + own;
    }
    return value;
  }

  // The path back from the last activity, in time order, tiling [first, last).
  std::vector<PathPiece> criticalPath(const std::vector<int64_t>& value,
                                      const std::vector<int32_t>& binding) const {
    std::vector<PathPiece> path;
    if (n_ == 0) return path;
    int32_t at = n_;
    for (int32_t i = n_; i < 2 * n_; ++i) {
      if (value[i] > value[at]) at = i;
    }
    int64_t until = value[at];
    const auto piece = [&](int64_t from, int64_t to, PathKind kind) {
      from = std::max(from, lane_.start_ns);
      if (from < to) path.push_back({from, to, kind});
    };
    while (until > lane_.start_ns) {
      const int32_t from = binding[at];
      if (from == kNone) {
        piece(lane_.start_ns, until, PathKind::kUnexplained);
        break;
      }
      const int64_t begin = std::min(value[from], until);
      PathKind kind = nodes_[at].kind;
      if (at < n_) {  // an activity's start: what lies between it and its cause
        const int32_t call = t_.activities[members_[at]].call;
        const bool own = call != kNone && (from == callStart(call) || from == callEnd(call));
        if (from >= 2 * n_ && (!own || t_.calls[call].end_ns >= t_.activities[members_[at]].start_ns)) {
          kind = PathKind::kHost;  // the call was still at it
        } else if (from >= 2 * n_) {
          const int64_t launch = std::min(until, begin + min_launch_);
          const int64_t rest = until - launch;
          if (rest > 0)
            piece(launch, until, rest > kLatency ? PathKind::kUnexplained : PathKind::kLaunchLatency);
          piece(begin, launch, PathKind::kLaunchLatency);
          at = from;
          until = begin;
          continue;
        }
        if (from < 2 * n_)
          kind = until - begin > kLatency ? PathKind::kUnexplained : PathKind::kLaunchLatency;
        if (from < n_)
          kind = pathKind(members_[from]);  // overlapping on one stream: the earlier one runs meanwhile
      }
      piece(begin, until, kind);
      at = from;
      until = begin;
    }
    std::reverse(path.begin(), path.end());
    return path;
  }

  // Start of the first activity at or after a recorded time, and the end of the last.
  int64_t startAt(const std::vector<int64_t>& value, int64_t measured_ns) const {
    const auto it = std::partition_point(members_.begin(), members_.end(),
                                         [&](uint32_t m) { return t_.activities[m].start_ns < measured_ns; });
    return it == members_.end() ? lastEnd(value) : value[static_cast<size_t>(it - members_.begin())];
  }
  int64_t lastEnd(const std::vector<int64_t>& value) const {
    return n_ == 0 ? 0 : *std::max_element(value.begin() + n_, value.begin() + 2 * n_);
  }
  int64_t firstStart(const std::vector<int64_t>& value) const {
    return n_ == 0 ? 0 : *std::min_element(value.begin(), value.begin() + n_);
  }

 private:
  int32_t startOf(int32_t m) const { return m; }
  int32_t endOf(int32_t m) const { return n_ + m; }
  int32_t callStart(int32_t c) const { return 2 * n_ + c; }
  int32_t callEnd(int32_t c) const { return 2 * n_ + calls_ + c; }

  PathKind pathKind(uint32_t activity) const {
    switch (t_.activities[activity].kind) {
      case ActivityKind::kComm:
        return PathKind::kComm;
      case ActivityKind::kCodec:
        return PathKind::kCodec;
      case ActivityKind::kCopy:
      case ActivityKind::kSet:
        return PathKind::kCopy;
      case ActivityKind::kCompute:
        break;
    }
    return PathKind::kCompute;
  }

  void begin(int32_t id, int64_t measured, PathKind kind) {
    nodes_[id].measured = measured;
    nodes_[id].kind = kind;
    nodes_[id].edges = static_cast<int32_t>(edges_.size());
  }
  // Only what was known before can be a cause.
  void edge(int32_t id, int32_t from, int64_t lag) {
    if (!done_[from] || nodes_[from].measured + lag > nodes_[id].measured) return;
    edges_.push_back({from, lag});
    ++nodes_[id].edge_count;
  }
  int64_t latestCause(int32_t id) const {
    int64_t latest = std::numeric_limits<int64_t>::min();
    for (size_t e = static_cast<size_t>(nodes_[id].edges); e < edges_.size(); ++e) {
      latest = std::max(latest, nodes_[edges_[e].from].measured + edges_[e].lag);
    }
    return latest;
  }
  void finish(int32_t id) {
    // Nothing recorded explains it: it keeps its distance to what ended last, and the distance is reported.
    if (nodes_[id].edge_count == 0) {
      const int32_t activity = last_end_ == kNone ? kNone : endOf(last_end_);
      const int32_t call = last_call_end_ == kNone ? kNone : callEnd(last_call_end_);
      const bool device = id < 2 * n_;
      int32_t from = device ? activity : call;
      if (from == kNone) from = device ? call : activity;
      if (from != kNone) edge(id, from, 0);
    }
    if (nodes_[id].edge_count > 0) nodes_[id].own = nodes_[id].measured - latestCause(id);
    done_[id] = true;
    order_.push_back(id);
  }

  void build() {
    done_.assign(nodes_.size(), false);
    order_.reserve(nodes_.size());
    position_.assign(t_.activities.size(), kNone);
    for (int32_t m = 0; m < n_; ++m) position_[members_[m]] = m;
    launchLatency();
    eventWaits();

    // Every moment in order of time; at equal times causes before effects.
    struct Moment {
      int64_t time;
      int32_t id;
      int8_t rank;
    };
    std::vector<Moment> moments;
    moments.reserve(nodes_.size());
    for (int32_t m = 0; m < n_; ++m) {
      const Activity& a = t_.activities[members_[m]];
      const bool empty = a.start_ns == a.end_ns;
      moments.push_back({a.start_ns, startOf(m), static_cast<int8_t>(empty ? 1 : 3)});
      moments.push_back({a.end_ns, endOf(m), static_cast<int8_t>(empty ? 2 : 1)});
    }
    for (int32_t c = 0; c < calls_; ++c) {
      const HostCall& call = t_.calls[c];
      const bool empty = call.start_ns == call.end_ns;
      moments.push_back({call.start_ns, callStart(c), static_cast<int8_t>(empty ? 1 : 2)});
      moments.push_back({call.end_ns, callEnd(c), static_cast<int8_t>(empty ? 2 : 1)});
    }
    std::sort(moments.begin(), moments.end(), [](const Moment& a, const Moment& b) {
      if (a.time != b.time) return a.time < b.time;
      if (a.rank != b.rank) return a.rank < b.rank;
      return a.id < b.id;
    });
    last_on_stream_.assign(t_.streams.size(), kNone);
    last_on_thread_.assign(t_.threads.size(), kNone);
    for (const Moment& moment : moments) {
      if (moment.id < n_) {
        activityStart(moment.id);
      } else if (moment.id < 2 * n_) {
        activityEnd(moment.id - n_);
      } else if (moment.id < 2 * n_ + calls_) {
        beginCall(moment.id - 2 * n_);
      } else {
        endCall(moment.id - 2 * n_ - calls_);
      }
    }
  }

  void launchLatency() {
    min_launch_ = std::numeric_limits<int64_t>::max();
    for (const uint32_t m : members_) {
      const Activity& a = t_.activities[m];
      if (a.call == kNone) continue;
      const int64_t latency = a.start_ns - t_.calls[a.call].start_ns;
      if (latency >= 0) min_launch_ = std::min(min_launch_, latency);
    }
    if (min_launch_ == std::numeric_limits<int64_t>::max()) min_launch_ = 0;
  }

  // For each activity the ones that its stream was told to wait for.
  void eventWaits() {
    waits_for_.assign(static_cast<size_t>(n_), {});
    for (const ResolvedWait& w : resolveWaits(t_, lane_.device, members_)) {
      if (w.behind != kNone && w.next != kNone) waits_for_[position_[w.next]].push_back(position_[w.behind]);
    }
  }

  void activityStart(int32_t m) {
    const Activity& a = t_.activities[members_[m]];
    const int32_t id = startOf(m);
    begin(id, a.start_ns, PathKind::kUnexplained);
    if (const int32_t before = last_on_stream_[a.stream]; before != kNone) {
      const Activity& b = t_.activities[members_[before]];
      if (b.end_ns <= a.start_ns) {
        edge(id, endOf(before), 0);
      } else {
        edge(id, startOf(before), a.start_ns - b.start_ns);  // they overlap: the later keeps its distance
      }
    }
    if (a.call != kNone) {
      const int64_t latency = a.start_ns - t_.calls[a.call].start_ns;
      const HostCall& call = t_.calls[a.call];
      if (done_[callStart(a.call)]) {
        edge(id, callStart(a.call), std::clamp<int64_t>(latency, 0, min_launch_));
        // A call that takes long submits its work near its end.
        if (call.end_ns - call.start_ns > kThreadPause) {
          if (done_[callEnd(a.call)]) {
            edge(id, callEnd(a.call), 0);
          } else {
            edge(id, callStart(a.call), latency);
          }
        }
      } else if (const int32_t c = last_on_thread_[t_.calls[a.call].thread]; c != kNone) {
        // The clocks of host and device differ by so much that it starts before its launch: the thread's last
        // moment before it stands in.
        const int32_t from = done_[callEnd(c)] ? callEnd(c) : callStart(c);
        edge(id, from, a.start_ns - nodes_[from].measured);
      }
    }
    for (const int32_t other : waits_for_[m]) edge(id, endOf(other), 0);
    // Where no wait is recorded, an end just before this start is the likely cause.
    if (last_end_ != kNone && a.start_ns - nodes_[endOf(last_end_)].measured <= kInferred &&
        (nodes_[id].edge_count == 0 || latestCause(id) < nodes_[endOf(last_end_)].measured)) {
      edge(id, endOf(last_end_), 0);
    }
    // Or else the device was full: it starts some way into a kernel of another stream.
    if (!running_.empty() && (nodes_[id].edge_count == 0 || a.start_ns - latestCause(id) > kLatency)) {
      // Collectives take a few multiprocessors only: another kernel is the likelier reason.
      const auto fills = std::find_if(running_.rbegin(), running_.rend(), [&](int32_t r) {
        return !trace::isCommunication(t_.activities[members_[r]].kind);
      });
      const int32_t other = fills != running_.rend() ? *fills : running_.back();
      edge(id, startOf(other), a.start_ns - t_.activities[members_[other]].start_ns);
    }
    finish(id);
    last_on_stream_[a.stream] = m;
    running_.push_back(m);
  }

  void activityEnd(int32_t m) {
    const int32_t id = endOf(m);
    begin(id, t_.activities[members_[m]].end_ns, pathKind(members_[m]));
    edge(id, startOf(m), 0);
    finish(id);
    last_end_ = m;
    std::erase(running_, m);
  }

  void beginCall(int32_t c) {
    const HostCall& call = t_.calls[c];
    const int32_t id = callStart(c);
    begin(id, call.start_ns, PathKind::kHost);
    const int32_t before = last_on_thread_[call.thread];
    const bool nested = before != kNone && t_.calls[before].end_ns > call.start_ns;
    const int64_t own_time = before == kNone ? std::numeric_limits<int64_t>::min()
                             : nested        ? call.start_ns
                                             : t_.calls[before].end_ns;
    // A thread that resumes after a pause in which another thread was busy was most likely handed work by it.
    const bool paused = before == kNone || call.start_ns - own_time > kThreadPause;
    if (paused && last_call_end_ != kNone && t_.calls[last_call_end_].thread != call.thread &&
        t_.calls[last_call_end_].end_ns >= own_time) {
      const int64_t other_end = t_.calls[last_call_end_].end_ns;
      edge(id, callEnd(last_call_end_), call.start_ns - other_end);
      if (before != kNone) edge(id, callEnd(before), 0);
    } else if (nested) {
      edge(id, callStart(before), call.start_ns - t_.calls[before].start_ns);
    } else if (before != kNone) {
      edge(id, callEnd(before), call.start_ns - own_time);
    }
    finish(id);
    last_on_thread_[call.thread] = c;
  }

  void endCall(int32_t c) {
    const HostCall& call = t_.calls[c];
    const int32_t id = callEnd(c);
    begin(id, call.end_ns, PathKind::kHost);
    // The latest device work that ended within a blocking call is what it waited for.
    const bool blocks =
        call.kind == CallKind::kSync || call.kind == CallKind::kEventSync || call.kind == CallKind::kCopy;
    if (blocks && last_end_ != kNone && nodes_[endOf(last_end_)].measured > call.start_ns) {
      nodes_[id].kind = PathKind::kHostSync;
      edge(id, endOf(last_end_), 0);
      edge(id, callStart(c), 0);
    } else {
      edge(id, callStart(c), call.end_ns - call.start_ns);
    }
    finish(id);
    last_call_end_ = c;
  }

  const Timeline& t_;
  const Lane& lane_;
  std::vector<uint32_t> members_;
  std::vector<int32_t> position_;
  int32_t n_ = 0;
  int32_t calls_ = 0;
  int64_t min_launch_ = 0;
  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  std::vector<bool> done_;
  std::vector<int32_t> order_;
  std::vector<std::vector<int32_t>> waits_for_;
  std::vector<int32_t> last_on_stream_;
  std::vector<int32_t> last_on_thread_;
  std::vector<int32_t> running_;  // begun and not ended, in order of start
  int32_t last_end_ = kNone;
  int32_t last_call_end_ = kNone;
};

}  // namespace

ReplayResult replay(const Timeline& t, const Lane& lane, double comm_scale,
                    const std::vector<int64_t>& needed) {
  ReplayResult result;
  result.measured_ns = lane.total.span;
  const Graph graph(t, lane);
  std::vector<int32_t> binding;
  const std::vector<int64_t> same = graph.run({}, &binding);
  result.replayed_ns = graph.lastEnd(same) - graph.firstStart(same);
  std::vector<int64_t> scaled;
  for (size_t c = 0; c < lane.comms.size(); ++c) {
    const int64_t duration = lane.comms[c].end_ns - lane.comms[c].start_ns;
    const int64_t need = needed.empty() ? duration : std::min(duration, needed[c]);
    scaled.push_back(duration - need + std::llround(static_cast<double>(need) * comm_scale));
  }
  const std::vector<int64_t> changed = graph.run(scaled, nullptr);
  result.what_if_ns = graph.lastEnd(changed) - graph.firstStart(changed);

  const std::vector<PathPiece> path = graph.criticalPath(same, binding);
  const auto addPath = [&](int64_t from, int64_t to, std::array<int64_t, kPathKinds>* sums) {
    auto it =
        std::partition_point(path.begin(), path.end(), [&](const PathPiece& p) { return p.end_ns <= from; });
    for (; it != path.end() && it->start_ns < to; ++it) {
      (*sums)[static_cast<size_t>(it->kind)] += std::min(to, it->end_ns) - std::max(from, it->start_ns);
    }
  };
  addPath(lane.start_ns, lane.end_ns, &result.critical);
  result.unexplained_ns = result.critical[static_cast<size_t>(PathKind::kUnexplained)];
  const auto step = [&](int64_t number, int64_t from, int64_t to, bool last) {
    ReplayStep s;
    s.number = number;
    s.measured_ns = to - from;
    s.replayed_ns = (last ? graph.lastEnd(same) : graph.startAt(same, to)) - graph.startAt(same, from);
    s.what_if_ns =
        (last ? graph.lastEnd(changed) : graph.startAt(changed, to)) - graph.startAt(changed, from);
    addPath(from, to, &s.critical);
    s.unexplained_ns = s.critical[static_cast<size_t>(PathKind::kUnexplained)];
    result.steps.push_back(s);
  };
  if (lane.steps.empty()) step(0, lane.start_ns, lane.end_ns, true);
  for (size_t i = 0; i < lane.steps.size(); ++i) {
    const int64_t from = lane.steps[i].start_ns;
    const int64_t to = from + lane.steps[i].parts.span;
    step(lane.steps[i].number, from, to, to == lane.end_ns);
  }
  return result;
}

}  // namespace halfwire::analysis
