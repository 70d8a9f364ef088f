#include "meter/tracker.h"

#include <algorithm>

namespace halfwire::meter {
namespace {

bool isDefault(StreamKey key) { return key == kLegacyStream || (key & kPerThreadBit) != 0; }

size_t hashOf(uint64_t key) { return static_cast<size_t>((key * 0x9e3779b97f4a7c15ull) >> 33); }

}  // namespace

Tracker::Tracker()
    : streams_(std::make_unique<std::array<Stream, kStreams>>()),
      events_(std::make_unique<std::array<Event, kEvents>>()) {}

// Looks where the key hashes to and a few slots on; where all of those are others', the longest unused one is
// forgotten.
Tracker::Stream& Tracker::stream(StreamKey key) {
  if (last_ != nullptr && last_->key == key) return *last_;
  const size_t first = hashOf(key) % kStreams;
  Stream* free = nullptr;
  Stream* oldest = &(*streams_)[first];
  for (size_t i = 0; i < kProbe; ++i) {
    Stream& s = (*streams_)[(first + i) % kStreams];
    if (s.key == key) {
      s.used = ++clock_;
      last_ = &s;
      return s;
    }
    if (s.key == 0 && free == nullptr) free = &s;
    if (s.used < oldest->used) oldest = &s;
  }
  if (free == nullptr) {
    free = oldest;
    ++lost_;
  }
  *free = Stream{};
  free->key = key;
  free->used = ++clock_;
  last_ = free;
  return *free;
}

Tracker::Stream* Tracker::known(StreamKey key) {
  const size_t first = hashOf(key) % kStreams;
  for (size_t i = 0; i < kProbe; ++i) {
    Stream& s = (*streams_)[(first + i) % kStreams];
    if (s.key == key) return &s;
  }
  return nullptr;
}

Tracker::Event* Tracker::event(EventKey key, bool make) {
  const size_t first = hashOf(key) % kEvents;
  Event* free = nullptr;
  Event* oldest = &(*events_)[first];
  for (size_t i = 0; i < kProbe; ++i) {
    Event& e = (*events_)[(first + i) % kEvents];
    if (e.key == key) return &e;
    if (e.key == 0 && free == nullptr) free = &e;
    if (e.behind < oldest->behind) oldest = &e;
  }
  if (!make) return nullptr;
  if (free == nullptr) {
    free = oldest;
    if (free->mark != 0) ++lost_;
  }
  *free = Event{};
  free->key = key;
  return free;
}

bool Tracker::onCollective(StreamKey key, CollectiveId id) {
  Stream& s = stream(key);
  newest_ = std::max(newest_, id);
  s.behind = std::max(s.behind, id);
  // A default stream stays undecided until it shows work: programs start there with what prepares them.
  if (s.kind == Kind::kUndecided && (!isDefault(key) || s.launches > 0)) {
    const uint64_t needed = isDefault(key) ? 1 : kComputeLaunches;
    s.kind = s.launches >= needed ? Kind::kCompute : Kind::kCommunication;
  }
  if (s.kind == Kind::kCompute) {
    s.mark = 0;
    return true;
  }
  s.mark = std::max(s.mark, id);
  return false;
}

void Tracker::onLaunch(StreamKey key, uint64_t count) {
  if (count == 0) return;
  Stream& s = stream(key);
  s.launches += count;
  if (s.kind == Kind::kUndecided) s.mark = 0;
}

void Tracker::onCopy(StreamKey key) {
  Stream& s = stream(key);
  if (s.kind == Kind::kUndecided) s.mark = 0;
}

void Tracker::onRecord(EventKey event_key, StreamKey stream_key) {
  const Stream& s = stream(stream_key);
  const CollectiveId mark = s.compute() ? 0 : s.mark;
  // Where no collective was ever seen, a record is noted only while its stream may turn out to feed one.
  Event* e = event(event_key, s.behind != 0 || (s.kind == Kind::kUndecided && !s.compute()));
  if (e == nullptr) return;
  e->mark = mark;
  e->behind = s.behind;
  e->source = stream_key;
}

CollectiveId Tracker::onWait(StreamKey stream_key, EventKey event_key) {
  const Event* e = event(event_key, false);
  if (e == nullptr) return 0;
  Stream& s = stream(stream_key);
  s.behind = std::max(s.behind, e->behind);
  // What a relay brings is a collective that the stream is not behind already.
  if (s.kind == Kind::kCommunication && e->source != stream_key && e->mark <= s.mark) {
    Stream* source = known(e->source);
    if (source != nullptr) source->feeds = true;
  }
  if (s.compute()) return e->mark;
  s.mark = std::max(s.mark, e->mark);
  return 0;
}

void Tracker::onStreamDestroy(StreamKey key) {
  Stream& s = stream(key);
  last_ = nullptr;
  s = Stream{};
}

CollectiveId Tracker::hostWait(CollectiveId behind) {
  if (behind <= waited_) return 0;
  waited_ = behind;
  return behind;
}

CollectiveId Tracker::onHostWaitEvent(EventKey key) {
  const Event* e = event(key, false);
  return e == nullptr ? 0 : hostWait(e->behind);
}

CollectiveId Tracker::onHostWaitStream(StreamKey key) { return hostWait(stream(key).behind); }

CollectiveId Tracker::onHostWaitAll() { return hostWait(newest_); }

bool Tracker::isCompute(StreamKey key) { return stream(key).compute(); }

}  // namespace halfwire::meter
