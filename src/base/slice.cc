#include "base/slice.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace halfwire {
namespace {

// struct sched_attr of the kernel, first version: sched_setattr(2).
struct SchedulingAttributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns;  // of a thread of the normal policy: its slice
  uint64_t deadline_ns;
  uint64_t period_ns;
};

}  // namespace

void requestSlice(std::chrono::nanoseconds slice) {
  thread_local std::chrono::nanoseconds current{};
  if (slice == current) return;
  current = slice;
  SchedulingAttributes attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.size = sizeof(attributes);
  attributes.flags = 0;
  attributes.runtime_ns = static_cast<uint64_t>(slice.count());
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace halfwire
