#include "analysis/account.h"

#include <algorithm>
#include <map>

#include "analysis/steps.h"
#include "analysis/waits.h"

namespace halfwire::analysis {

using trace::Activity;
using trace::ActivityKind;
using trace::CallKind;
using trace::HostCall;
using trace::kNone;
using trace::Timeline;

const char* const kIdleCauseNames[kIdleCauses] = {"launch_bound", "communication_wait", "host_sync",
                                                  "data_loading", "device_gap",         "unrecorded"};

void Parts::add(const Parts& p) {
  span += p.span;
  compute += p.compute;
  comm += p.comm;
  codec += p.codec;
  exposed += p.exposed;
  exposed_codec += p.exposed_codec;
  exposed_bare += p.exposed_bare;
  copy += p.copy;
  copy_alone += p.copy_alone;
  idle += p.idle;
}

namespace {

struct Point {
  int64_t time;
  uint32_t activity;
  bool begins;
};

// One pass over all starts and ends: in every stretch between two of them it is known what runs.
class Sweep {
 public:
  Sweep(const Timeline& t, const std::vector<uint32_t>& members, const std::vector<StepWindow>& steps,
        Lane* lane)
      : t_(t), members_(members), steps_(steps), lane_(lane) {}

  void run() {
    std::vector<Point> points;
    points.reserve(members_.size() * 2);
    for (const uint32_t m : members_) {
      const Activity& a = t_.activities[m];
      if (a.end_ns == a.start_ns) continue;
      points.push_back({a.start_ns, m, true});
      points.push_back({a.end_ns, m, false});
    }
    std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) {
      if (a.time != b.time) return a.time < b.time;
      return a.activity < b.activity;
    });
    slot_.assign(t_.activities.size(), kNone);
    for (const StepWindow& w : steps_) lane_->steps.push_back({w.number, w.start_ns, {}});

    int64_t now = lane_->start_ns;
    for (const Point& p : points) {
      advance(now, p.time);
      now = p.time;
      change(p);
    }
    advance(now, lane_->end_ns);
  }

 private:
  void change(const Point& p) {
    const Activity& a = t_.activities[p.activity];
    const int64_t by = p.begins ? 1 : -1;
    switch (a.kind) {
      case ActivityKind::kCompute:
        compute_ += by;
        break;
      case ActivityKind::kComm:
        comm_ += by;
        break;
      case ActivityKind::kCodec:
        codec_ += by;
        break;
      case ActivityKind::kCopy:
      case ActivityKind::kSet:
        copy_ += by;
        break;
    }
    if (a.kind != ActivityKind::kComm) return;
    if (p.begins) {
      slot_[p.activity] = static_cast<int32_t>(lane_->comms.size());
      CommInterval c;
      c.start_ns = a.start_ns;
      c.end_ns = a.end_ns;
      c.activity = p.activity;
      if (a.comm != kNone) c.info = t_.comms[a.comm];
      c.name = a.name;
      lane_->comms.push_back(c);
      running_.push_back(slot_[p.activity]);
    } else {
      std::erase(running_, slot_[p.activity]);
    }
  }

  // What ran in [from, to) is known now.
  void advance(int64_t from, int64_t to) {
    if (to <= from) return;
    const bool network = comm_ > 0 || codec_ > 0;
    Parts p;
    const int64_t d = to - from;
    p.span = d;
    if (compute_ > 0) p.compute = d;
    if (comm_ > 0) p.comm = d;
    if (codec_ > 0) p.codec = d;
    if (copy_ > 0) p.copy = d;
    State state = State::kIdle;
    if (compute_ > 0) {
      state = network ? State::kHidden : State::kCompute;
    } else if (network) {
      state = State::kExposed;
      p.exposed = d;
      if (comm_ == 0) p.exposed_codec = d;
      if (copy_ == 0) p.exposed_bare = d;
      share(d);
    } else if (copy_ > 0) {
      state = State::kCopy;
      p.copy_alone = d;
    } else {
      p.idle = d;
    }
    lane_->total.add(p);
    if (!lane_->segments.empty() && lane_->segments.back().state == state) {
      lane_->segments.back().end_ns = to;
    } else {
      lane_->segments.push_back({from, to, state});
    }
    // Steps tile a part of the span; a stretch may cross several.
    while (step_ < steps_.size() && steps_[step_].end_ns <= from) ++step_;
    int64_t inside = 0;
    for (size_t i = step_; i < steps_.size() && steps_[i].start_ns < to; ++i) {
      const int64_t part = std::min(to, steps_[i].end_ns) - std::max(from, steps_[i].start_ns);
      if (part <= 0) continue;
      inside += part;
      const auto scaled = [&](int64_t v) { return v == 0 ? int64_t{0} : part; };
      Parts q;
      q.span = part;
      q.compute = scaled(p.compute);
      q.comm = scaled(p.comm);
      q.codec = scaled(p.codec);
      q.exposed = scaled(p.exposed);
      q.exposed_codec = scaled(p.exposed_codec);
      q.exposed_bare = scaled(p.exposed_bare);
      q.copy = scaled(p.copy);
      q.copy_alone = scaled(p.copy_alone);
      q.idle = scaled(p.idle);
      lane_->steps[i].parts.add(q);
    }
    lane_->outside_steps_ns += d - inside;
  }

  void share(int64_t d) {
    if (running_.empty()) return;
    const auto n = static_cast<int64_t>(running_.size());
    const int64_t each = d / n;
    int64_t rest = d - each * n;
    for (const int32_t i : running_) {
      lane_->comms[i].exposed_ns += each + (rest > 0 ? 1 : 0);
      --rest;
    }
  }

  const Timeline& t_;
  const std::vector<uint32_t>& members_;
  const std::vector<StepWindow>& steps_;
  Lane* lane_;
  std::vector<int32_t> slot_;
  std::vector<int32_t> running_;
  int64_t compute_ = 0, comm_ = 0, codec_ = 0, copy_ = 0;
  size_t step_ = 0;
};

// Calls that block their thread, by thread: synchronisations, and copies (those from pageable memory wait
// too).
struct ThreadBlocks {
  Spans blocked;
  Spans host_collectives;
};

class IdleReasons {
 public:
  explicit IdleReasons(const Timeline& t) : t_(t), threads_(t.threads.size()) {
    for (const HostCall& c : t.calls) {
      const bool blocks =
          c.kind == CallKind::kSync || c.kind == CallKind::kEventSync || c.kind == CallKind::kCopy;
      if (blocks) threads_[c.thread].blocked.push_back({c.start_ns, c.end_ns});
    }
    for (const trace::CommOp& op : t.comm_ops) {
      if (op.on_host) threads_[op.thread].host_collectives.push_back({op.start_ns, op.end_ns});
    }
    for (ThreadBlocks& b : threads_) {
      b.blocked = unionOf(std::move(b.blocked));
      b.host_collectives = unionOf(std::move(b.host_collectives));
    }
  }

  void explain(const std::vector<uint32_t>& members, Lane* lane) const {
    size_t next = 0;
    for (const Segment& s : lane->segments) {
      if (s.state != State::kIdle) continue;
      while (next < members.size() && t_.activities[members[next]].start_ns < s.end_ns) ++next;
      // Several may start at once: any that says what launched it.
      int32_t call = kNone;
      for (size_t i = next;
           i < members.size() && t_.activities[members[i]].start_ns == s.end_ns && call == kNone; ++i) {
        call = t_.activities[members[i]].call;
      }
      lane->gaps.push_back(explain(s, call, lane));
    }
  }

 private:
  Gap explain(const Segment& s, int32_t call_index, Lane* lane) const {
    Gap gap;
    gap.start_ns = s.start_ns;
    gap.end_ns = s.end_ns;
    const int64_t length_ns = s.end_ns - s.start_ns;
    const auto cause = [&](IdleCause c) -> int64_t& { return gap.causes[static_cast<size_t>(c)]; };
    if (call_index == kNone) {
      cause(IdleCause::kUnrecorded) = length_ns;
      lane->idle_unmatched += length_ns;
    } else if (const HostCall& call = t_.calls[call_index]; call.end_ns <= s.start_ns) {
      cause(IdleCause::kDeviceGap) = length_ns;
      lane->idle_launched_before += length_ns;
    } else {
      gap.host_late = true;
      lane->idle_host_late += length_ns;
      // Up to the launch call its thread says what it was doing; the rest is the launch itself.
      const int64_t until = std::clamp(call.start_ns, s.start_ns, s.end_ns);
      const ThreadBlocks& blocks = threads_[call.thread];
      const trace::Thread& thread = t_.threads[call.thread];
      const Spans whole{{s.start_ns, until}};
      const auto take = [&](const Spans& among, const Spans& from) {
        Spans near;
        auto it = std::partition_point(among.begin(), among.end(),
                                       [&](const Span& b) { return b.end_ns <= s.start_ns; });
        for (; it != among.end() && it->start_ns < until; ++it) near.push_back(*it);
        return intersect(near, from);
      };
      Spans rest = until > s.start_ns ? whole : Spans{};
      const Spans loading = take(thread.loading, rest);
      rest = subtract(rest, loading);
      const Spans collectives = take(blocks.host_collectives, rest);
      rest = subtract(rest, collectives);
      const Spans blocked = take(blocks.blocked, rest);
      rest = subtract(rest, blocked);
      cause(IdleCause::kDataLoading) = length(loading);
      cause(IdleCause::kCommunicationWait) = length(collectives);
      cause(IdleCause::kHostSync) = length(blocked);
      const int64_t late = length_ns - length(loading) - length(collectives) - length(blocked);
      cause(IdleCause::kLaunchBound) = late;
      if (lengthWithin(blocks.blocked, s.start_ns, s.start_ns + 1) > 0) lane->launch_bound_after_sync += late;
      lane->launch_bound_host_quiet += length(rest) - length(take(thread.busy, rest));
    }
    for (int i = 0; i < kIdleCauses; ++i) lane->idle[i] += gap.causes[i];
    return gap;
  }

  const Timeline& t_;
  std::vector<ThreadBlocks> threads_;
};

// What the streams of a device are for.
class StreamRoles {
 public:
  StreamRoles(const Timeline& t, const std::vector<uint32_t>& members) : t_(t), streams_(t.streams.size()) {
    for (const uint32_t m : members) {
      const Activity& a = t.activities[m];
      Stream& s = streams_[a.stream];
      s.used = true;
      const int64_t took = a.end_ns - a.start_ns;
      if (trace::isCommunication(a.kind)) {
        if (s.first == kNone) s.first = static_cast<int32_t>(m);
        s.communication = addSaturated(s.communication, took);
      } else if (a.kind == ActivityKind::kCompute) {
        s.compute = addSaturated(s.compute, took);
        most_ = std::max(most_, s.compute);
      }
    }
  }

  // Runs a tenth or more of the compute of the stream that runs most of it, and more of it than of
  // collectives. What a stream that brings together the parts of a message waits for holds up the message,
  // not the compute.
  bool computes(int32_t stream) const {
    const Stream& s = streams_[stream];
    return s.compute > 0 && s.compute >= most_ / 10 && s.communication <= s.compute;
  }

  // Ran nothing in the recording, so that it says nothing of what the stream is for.
  bool unused(int32_t stream) const { return !streams_[stream].used; }

  // Whoever waits for this waits for a collective: it is one, or comes behind one on a stream that does
  // little else, such as the casts behind a reduce-scatter.
  bool isBehindCollective(int32_t activity) const {
    const Activity& a = t_.activities[activity];
    if (trace::isCommunication(a.kind)) return true;
    const Stream& s = streams_[a.stream];
    return s.first != kNone && s.first < activity && s.communication > s.compute;
  }

 private:
  struct Stream {
    bool used = false;
    int32_t first = kNone;  // of its collectives
    int64_t communication = 0, compute = 0;
  };
  const Timeline& t_;
  std::vector<Stream> streams_;
  int64_t most_ = 0;  // compute of one stream
};

// Stretches in which a computing stream stood at an event wait behind a collective while it had nothing else
// to run, or ran a collective itself.
void findStalls(const Timeline& t, const std::vector<uint32_t>& members, const std::vector<StepWindow>& steps,
                Lane* lane) {
  const StreamRoles roles(t, members);
  Spans stalls, perhaps;
  size_t unknown = 0, recorded = 0;  // waits of computing streams
  bool inferred_stall = false;
  const auto behind_collective = [&](int32_t activity) { return roles.isBehindCollective(activity); };
  for (const ResolvedWait& w : resolveWaits(t, lane->device, members, behind_collective)) {
    ++lane->waits;
    if (w.source == WaitSource::kUnknown) ++lane->waits_unknown;
    if (!roles.computes(w.stream) && !roles.unused(w.stream)) continue;
    if (w.source == WaitSource::kUnknown) ++unknown;
    if (w.source == WaitSource::kRecorded) ++recorded;
    if (w.perhaps != kNone) perhaps.push_back({w.from_ns, t.activities[w.perhaps].end_ns});
    if (w.behind == kNone || !roles.isBehindCollective(w.behind)) continue;
    int64_t to = t.activities[w.behind].end_ns;
    if (w.next != kNone) to = std::min(to, t.activities[w.next].start_ns);
    if (w.from_ns >= to) continue;
    stalls.push_back({w.from_ns, to});
    inferred_stall = inferred_stall || w.source == WaitSource::kInferred;
  }
  const bool waited = !stalls.empty();
  for (const uint32_t m : members) {
    const Activity& a = t.activities[m];
    if (trace::isCommunication(a.kind) && roles.computes(a.stream)) stalls.push_back({a.start_ns, a.end_ns});
  }
  lane->stall_spans = unionOf(std::move(stalls));
  lane->stalled = length(lane->stall_spans);
  const Spans more = subtract(unionOf(std::move(perhaps)), lane->stall_spans);
  for (size_t i = 0; i < steps.size(); ++i) {
    const StepWindow& w = steps[i];
    lane->steps[i].stalled = lengthWithin(lane->stall_spans, w.start_ns, w.end_ns);
    lane->steps[i].stalled_at_most = lane->steps[i].stalled + lengthWithin(more, w.start_ns, w.end_ns);
  }
  lane->stalled_at_most = lane->stalled + length(more);
  // That no wait was found to be a stall says little while some may have been.
  if (lane->waits == 0 || (recorded == 0 && !waited && unknown > 0)) return;
  lane->stalled_from = inferred_stall || recorded == 0 ? StalledFrom::kInferred : StalledFrom::kRecorded;
}

}  // namespace

std::vector<Lane> accountLanes(const Timeline& t) {
  std::map<int32_t, std::vector<uint32_t>> by_device;
  for (uint32_t i = 0; i < t.activities.size(); ++i) {
    by_device[t.streams[t.activities[i].stream].device].push_back(i);
  }
  const IdleReasons reasons(t);
  std::vector<Lane> lanes;
  for (const auto& [device, members] : by_device) {
    Lane lane;
    lane.device = device;
    lane.activities = members.size();
    lane.start_ns = t.activities[members.front()].start_ns;
    lane.end_ns = lane.start_ns;
    for (const uint32_t m : members) {
      const Activity& a = t.activities[m];
      lane.end_ns = std::max(lane.end_ns, a.end_ns);
      if (!trace::isCopy(a.kind)) ++lane.kernels;
      if (a.in_graph) ++lane.graph_kernels;
    }
    const std::vector<StepWindow> steps = findSteps(t, members, lane.end_ns, &lane.steps_detected);
    Sweep(t, members, steps, &lane).run();
    reasons.explain(members, &lane);
    findStalls(t, members, steps, &lane);
    lanes.push_back(std::move(lane));
  }
  return lanes;
}

}  // namespace halfwire::analysis
