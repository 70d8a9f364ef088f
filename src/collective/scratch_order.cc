#include "collective/scratch_order.h"

#include <utility>

namespace halfwire {

Result<ScratchOrder> ScratchOrder::create(Device* device) {
  ScratchOrder order;
  order.device_ = device;
  for (EventHandle* event : {&order.last_use_, &order.captured_use_}) {
    if (Status s = device->createEvent(event); !s.ok()) return s;
  }
  return order;
}

ScratchOrder::ScratchOrder(ScratchOrder&& other) noexcept { *this = std::move(other); }

ScratchOrder& ScratchOrder::operator=(ScratchOrder&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(last_use_, other.last_use_);
  std::swap(last_stream_, other.last_stream_);
  std::swap(used_, other.used_);
  std::swap(captured_use_, other.captured_use_);
  std::swap(captured_stream_, other.captured_stream_);
  std::swap(capture_, other.capture_);
  std::swap(capturing_, other.capturing_);
  std::swap(events_, other.events_);
  return *this;
}

ScratchOrder::~ScratchOrder() {
  if (device_ == nullptr) return;
  for (const EventHandle e : {last_use_, captured_use_}) {
    if (e != nullptr) device_->destroyEvent(e);
  }
  for (const EventHandle e : events_) device_->destroyEvent(e);
}

void ScratchOrder::finish() {
  if (device_ != nullptr && used_) (void)device_->synchronizeEvent(last_use_);
}

Status ScratchOrder::event(size_t index, EventHandle* out) {
  while (events_.size() <= index) {
    EventHandle e = nullptr;
    if (Status s = device_->createEvent(&e); !s.ok()) return s;
    events_.push_back(e);
  }
  *out = events_[index];
  return {};
}

Status ScratchOrder::await(StreamHandle main) {
  uint64_t capture = 0;
  if (Status s = device_->captureOf(main, &capture); !s.ok()) return s;
  capturing_ = capture != 0;
  if (!capturing_) {
    // A graph may have run on any stream.
    const bool ordered = capture_ == 0 && (!used_ || last_stream_ == main);
    return ordered ? Status() : device_->waitEvent(main, last_use_);
  }
  if (capture_ != capture) {
    capture_ = capture;
    return device_->waitEventOutside(main, last_use_);
  }
  return captured_stream_ == main ? Status() : device_->waitEvent(main, captured_use_);
}

Status ScratchOrder::begin(StreamHandle main, std::span<const StreamHandle> others) {
  if (Status s = await(main); !s.ok()) return s;
  for (size_t i = 0; i < others.size(); ++i) {
    EventHandle e = nullptr;
    if (Status s = event(i, &e); !s.ok()) return s;
    if (Status s = device_->recordEvent(e, others[i]); !s.ok()) return s;
    if (Status s = device_->waitEvent(main, e); !s.ok()) return s;
  }
  return {};
}

Status ScratchOrder::end(StreamHandle main, std::span<const StreamHandle> others) {
  const EventHandle done = capturing_ ? captured_use_ : last_use_;
  if (Status s = device_->recordEvent(done, main); !s.ok()) return s;
  (capturing_ ? captured_stream_ : last_stream_) = main;
  if (capturing_) {
    if (Status s = device_->recordEventOutside(last_use_, main); !s.ok()) return s;
  }
  used_ = true;
  for (const StreamHandle other : others) {
    if (Status s = device_->waitEvent(other, done); !s.ok()) return s;
  }
  return {};
}

}  // namespace halfwire
