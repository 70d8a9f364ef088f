// An emulated network link: one per device (that is, per rank), shared by all its communicators, full duplex.
//
// Each direction is a clock that says when the link is free again. Egress: a chunk is handed to the network
// when its last bit would have left, so senders sleep to absolute deadlines and oversleeping is made up for.
// Ingress: a chunk that arrives pushes the clock by its own time on the wire; an operation is over when the
// clock has passed. Senders into a congested receiver are not slowed down, only its own operation is.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>

#include "hostccl/outcome.h"

namespace halfwire::hostccl {

class Link {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  explicit Link(double bytes_per_second) : rate_(bytes_per_second) {}

  // The link of `device` as HALFWIRE_HOST_LINK asks for it; null where it is unset: no limit.
  static Outcome ofDevice(int device, Link** out);

  // When the last bit of `bytes` that are ready at `ready` will have left. Reserves that time.
  Time depart(size_t bytes, Time ready);
  // Notes that `bytes` are here.
  void arrive(size_t bytes, Time now);
  // When all that has arrived would have come in over the link.
  Time ingressFree();

 private:
  Clock::duration duration(size_t bytes) const {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(double(bytes) / rate_));
  }

  const double rate_;
  std::mutex mutex_;
  Time egress_{};
  Time ingress_{};
};

}  // namespace halfwire::hostccl
