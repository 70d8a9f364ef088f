// Whose turn it is with a scratch: turns on any streams of the program follow each other on the device, also
// those that are captured into graphs, with every replay.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/device.h"

namespace halfwire {

// Within one capture, turns are ordered by an event of that capture; between graphs, and graphs and turns
// outside them, by an event that every run of a graph waits for and records. Used by one thread at a time.
class ScratchOrder {
 public:
  // `device` must outlive it.
  static Result<ScratchOrder> create(Device* device);
  ScratchOrder() = default;
  ~ScratchOrder();
  ScratchOrder(ScratchOrder&& other) noexcept;
  ScratchOrder& operator=(ScratchOrder&& other) noexcept;

  // Orders the main stream behind the last turn and behind the other streams.
  Status begin(StreamHandle main, std::span<const StreamHandle> others);
  // The turn is what the main stream holds now; the other streams go on behind it.
  Status end(StreamHandle main, std::span<const StreamHandle> others);

  // Blocks the host until the last turn is over.
  void finish();
  // Gives the events up without touching the device.
  void park() { device_ = nullptr; }

 private:
  Status await(StreamHandle main);
  Status event(size_t index, EventHandle* out);

  Device* device_ = nullptr;
  EventHandle last_use_ = nullptr;
  StreamHandle last_stream_ = nullptr;
  bool used_ = false;
  EventHandle captured_use_ = nullptr;
  StreamHandle captured_stream_ = nullptr;
  uint64_t capture_ = 0;  // the last capture with a turn
  bool capturing_ = false;
  std::vector<EventHandle> events_;  // for joining further streams
};

}  // namespace halfwire
