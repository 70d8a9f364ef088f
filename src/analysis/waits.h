// What streams waited for: every recorded wait for an event, resolved to the activity that the stream stood
// behind and the one that it held up. The one place that decides this for the account of stalls and for the
// replay.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "trace/timeline.h"

namespace halfwire::analysis {

enum class WaitSource : uint8_t {
  kRecorded,  // the recorder named the stream that the event was recorded on
  kInferred,  // it did not; the times leave one likely answer
  kUnknown,   // it did not, and nothing can be said
};

// Indices are into Timeline::activities.
struct ResolvedWait {
  int32_t stream = 0;   // that waits
  int64_t from_ns = 0;  // told to wait and done with its earlier work: what follows is the wait's doing
  // The activity that the event stood behind; kNone: nothing recorded before it, or (inferred) it held
  // nothing up.
  int32_t behind = trace::kNone;
  int32_t next = trace::kNone;  // the waiting stream's first activity launched after the wait
  WaitSource source = WaitSource::kUnknown;
  // Of a wait whose event is not named: the last of what `matters` chose that ended while the stream stood
  // there. It held the stream up no longer than that for something that matters, whatever came behind.
  int32_t perhaps = trace::kNone;
};

// A start lies at most this long behind what it waited for. In four recordings of a device that four
// processes share, half of 760 inferred waits for collectives passed within 10 us, 99 % within 78, all but
// one within 100; after a longer silence something else came last.
inline constexpr int64_t kWaitPasses = 100'000;

// The waits of one device's streams, in the order of Timeline::waits. `members`: the device's activities,
// ascending.
//
// Recorded: the last activity of the source stream launched before the event's record call (before the wait
// where the call is not in the trace). Not recorded: of the other streams' activities launched before the
// wait that end between from_ns and the start of the waiting stream's next activity, the one that ends last;
// if there is none, the wait held nothing up. Unknown if the next activity was launched only after that end
// (the stream had run dry, so it says nothing about the event), if it starts more than kWaitPasses later, or
// if there is no next activity. `matters`, if set, says of an activity whether a wait behind it is of
// interest: ResolvedWait::perhaps is chosen among the last such activity of each stream.
std::vector<ResolvedWait> resolveWaits(const trace::Timeline& timeline, int32_t device,
                                       const std::vector<uint32_t>& members,
                                       const std::function<bool(int32_t)>& matters = {});

}  // namespace halfwire::analysis
