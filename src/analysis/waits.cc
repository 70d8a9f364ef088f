#include "analysis/waits.h"

#include <algorithm>
#include <limits>
#include <map>

namespace halfwire::analysis {
namespace {

using trace::Activity;
using trace::kNone;
using trace::StreamWait;
using trace::Timeline;

// Every wait without a name looks at every stream. Beyond this it is no recording of a program.
constexpr size_t kMaxStreams = 1024;

// The activities of one stream in order. Launches and ends ascend there but for rounding, graphs and damage;
// the running maxima ascend always, so that searches are defined.
struct Queue {
  std::vector<int32_t> activities;
  std::vector<int64_t> launched;  // latest launch call so far
  std::vector<int64_t> ended;     // latest end so far
  std::vector<int32_t> last;      // the activity that ends then

  // How many were launched before a time.
  size_t launchedBefore(int64_t time) const {
    return static_cast<size_t>(std::lower_bound(launched.begin(), launched.end(), time) - launched.begin());
  }
  size_t endedBy(int64_t time) const {
    return static_cast<size_t>(std::upper_bound(ended.begin(), ended.end(), time) - ended.begin());
  }
};

class Resolver {
 public:
  Resolver(const Timeline& t, const std::vector<uint32_t>& members,
           const std::function<bool(int32_t)>& matters)
      : t_(t), matters_(matters), queues_(t.streams.size()) {
    for (const uint32_t m : members) {
      const Activity& a = t.activities[m];
      Queue& q = queues_[a.stream];
      if (q.activities.empty()) {
        used_.push_back(a.stream);
        q.launched.push_back(launch(m));
        q.ended.push_back(a.end_ns);
        q.last.push_back(static_cast<int32_t>(m));
      } else {
        q.launched.push_back(std::max(q.launched.back(), launch(m)));
        q.last.push_back(a.end_ns >= q.ended.back() ? static_cast<int32_t>(m) : q.last.back());
        q.ended.push_back(std::max(q.ended.back(), a.end_ns));
      }
      q.activities.push_back(static_cast<int32_t>(m));
    }
    for (const StreamWait& w : t.waits) {
      if (w.record_correlation > 0) record_time_.emplace(w.record_correlation, kUnseen);
    }
    if (record_time_.empty()) return;
    for (const trace::HostCall& c : t.calls) {
      if (const auto it = record_time_.find(c.correlation); it != record_time_.end()) it->second = c.start_ns;
    }
  }

  ResolvedWait resolve(const StreamWait& w) const {
    ResolvedWait r;
    r.stream = w.waiting_stream;
    const Queue& own = queues_[w.waiting_stream];
    const size_t next = own.launchedBefore(w.time_ns);
    r.from_ns = w.time_ns;
    if (next > 0) r.from_ns = std::max(r.from_ns, own.ended[next - 1]);
    if (next < own.activities.size()) r.next = own.activities[next];
    const auto found = record_time_.find(w.record_correlation);
    const int64_t recorded = std::min(w.time_ns, found == record_time_.end() ? kUnseen : found->second);
    if (w.source_stream == kNone) {
      infer(w, recorded, &r);
      return r;
    }
    r.source = WaitSource::kRecorded;
    const Queue& source = queues_[w.source_stream];
    const size_t before = source.launchedBefore(recorded);
    if (before > 0) r.behind = source.activities[before - 1];
    return r;
  }

 private:
  static constexpr int64_t kUnseen = std::numeric_limits<int64_t>::max();

  // An activity whose launch is not recorded was launched when it started, at the latest.
  int64_t launch(uint32_t m) const {
    const Activity& a = t_.activities[m];
    return a.call != kNone ? t_.calls[a.call].start_ns : a.start_ns;
  }

  void infer(const StreamWait& w, int64_t recorded, ResolvedWait* r) const {
    if (used_.size() > kMaxStreams) return;
    const int64_t start = r->next != kNone ? t_.activities[r->next].start_ns : kUnseen;
    const Ended last = lastEnded(w, recorded, r->from_ns, start, {});
    r->perhaps = matters_ ? lastEnded(w, recorded, r->from_ns, start, matters_).activity : last.activity;
    const bool late = r->next == kNone ||
                      (last.activity != kNone &&
                       (launch(static_cast<uint32_t>(r->next)) >= last.at || start - last.at > kWaitPasses));
    if (late) return;
    r->behind = last.activity;
    r->source = WaitSource::kInferred;
  }

  struct Ended {
    int32_t activity = kNone;
    int64_t at = 0;
  };

  // Of what other streams were told to run before `recorded`, what ended last between `from` and `until`.
  Ended lastEnded(const StreamWait& w, int64_t recorded, int64_t from, int64_t until,
                  const std::function<bool(int32_t)>& matters) const {
    Ended last{kNone, from};
    if (until <= from) return last;
    for (const int32_t s : used_) {
      if (s == w.waiting_stream) continue;
      const Queue& q = queues_[s];
      const size_t n = std::min(q.launchedBefore(recorded), q.endedBy(until));
      if (n == 0 || q.ended[n - 1] <= last.at || (matters && !matters(q.last[n - 1]))) continue;
      last = {q.last[n - 1], q.ended[n - 1]};
    }
    return last;
  }

  const Timeline& t_;
  const std::function<bool(int32_t)>& matters_;
  std::vector<Queue> queues_;               // by stream
  std::vector<int32_t> used_;               // streams with activities
  std::map<int64_t, int64_t> record_time_;  // of the event record calls that waits name
};

}  // namespace

std::vector<ResolvedWait> resolveWaits(const Timeline& t, int32_t device,
                                       const std::vector<uint32_t>& members,
                                       const std::function<bool(int32_t)>& matters) {
  std::vector<ResolvedWait> resolved;
  const bool any = std::any_of(t.waits.begin(), t.waits.end(), [&](const StreamWait& w) {
    return t.streams[w.waiting_stream].device == device;
  });
  if (!any) return resolved;
  const Resolver resolver(t, members, matters);
  for (const StreamWait& w : t.waits) {
    if (t.streams[w.waiting_stream].device == device) resolved.push_back(resolver.resolve(w));
  }
  return resolved;
}

}  // namespace halfwire::analysis
