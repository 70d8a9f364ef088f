// Which waits of the program's streams are waits for collectives: a state machine over what the program
// calls, with no CUDA in it. Calls are given in the order in which the host makes them.
//
// A stream is a communication stream if its first collective came before any noteworthy work on it, and a
// compute stream once it has run kernels and is no communication stream. Kernels that are launched through
// the driver are not seen: a stream for which a communication stream waits without coming behind another
// collective by it has made what is sent, and is a compute stream too. Streams that did none of this are
// relays. Marks, "behind collective N", pass from record to wait through communication streams and relays,
// and end at compute streams, whose own work is then what others wait for. docs/meter.md says what this rule
// misses.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace halfwire::meter {

using StreamKey = uint64_t;
using EventKey = uint64_t;
// Numbers collectives in the order of their enqueueing, from 1; 0 is none.
using CollectiveId = uint64_t;

inline constexpr StreamKey kLegacyStream = 1;
inline constexpr StreamKey kPerThreadBit = StreamKey{1} << 63;  // | the thread's number

// A stream of the program's own that ran fewer kernels than this before its first collective is a
// communication stream: what prepares a message (casts, copies, scaling) is not the program's compute. The
// default streams need one.
inline constexpr uint64_t kComputeLaunches = 16;

// Not thread-safe. Allocates only when it is made.
class Tracker {
 public:
  Tracker();

  // A collective on `stream`. True if that is a compute stream: the stream itself waits for all of it.
  bool onCollective(StreamKey stream, CollectiveId id);
  // `count` kernels on `stream`.
  void onLaunch(StreamKey stream, uint64_t count);
  // A copy or a set: not compute, but the stream is no pure relay any more.
  void onCopy(StreamKey stream);
  void onRecord(EventKey event, StreamKey stream);
  // `stream` will wait for the last record of `event`. The collective that this wait stands for, if the
  // stream is a compute stream and the event is behind one, else 0. Where it is behind several, the last
  // enqueued answers for all.
  CollectiveId onWait(StreamKey stream, EventKey event);
  void onStreamDestroy(StreamKey stream);

  // The host waits for an event, a stream or everything: the last collective that this wait is behind and
  // that no earlier host wait was, else 0. Collectives pass through compute streams here: the host waits for
  // all of them.
  CollectiveId onHostWaitEvent(EventKey event);
  CollectiveId onHostWaitStream(StreamKey stream);
  CollectiveId onHostWaitAll();

  bool isCompute(StreamKey stream);
  // Events and streams that were forgotten because the tables are full.
  uint64_t lost() const { return lost_; }

 private:
  enum class Kind : uint8_t { kUndecided, kCompute, kCommunication };
  struct Stream {
    StreamKey key = 0;
    Kind kind = Kind::kUndecided;
    uint64_t launches = 0;
    CollectiveId mark = 0;    // what a record here would be behind
    CollectiveId behind = 0;  // the last collective before this point, whatever ran since
    uint64_t used = 0;        // when last, to forget the oldest
    bool feeds = false;       // a communication stream waited for it
    bool compute() const {
      return kind == Kind::kCompute || (kind == Kind::kUndecided && (launches > 0 || feeds));
    }
  };
  struct Event {
    EventKey key = 0;
    CollectiveId mark = 0;
    CollectiveId behind = 0;
    StreamKey source = 0;
  };
  Stream& stream(StreamKey key);
  Stream* known(StreamKey key);
  Event* event(EventKey key, bool make);
  CollectiveId hostWait(CollectiveId behind);

  static constexpr size_t kStreams = 512;
  static constexpr size_t kEvents = 1 << 15;
  static constexpr size_t kProbe = 16;
  std::unique_ptr<std::array<Stream, kStreams>> streams_;
  std::unique_ptr<std::array<Event, kEvents>> events_;
  Stream* last_ = nullptr;
  uint64_t clock_ = 0;
  uint64_t lost_ = 0;
  CollectiveId newest_ = 0;
  CollectiveId waited_ = 0;  // the newest collective that a host wait was behind
};

}  // namespace halfwire::meter
