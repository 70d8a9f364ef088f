// The slice a thread asks the scheduler for. A thread that asks for a shorter one interrupts threads with longer
// ones when it wakes; its priority and its share of the processor stay what they were. The host engine uses it
// where threads stand in for hardware that a busy processor would not slow down.
#pragma once

#include <chrono>

namespace halfwire {

// Emulated network cards before emulated GPUs, and both before what computes (about 3 ms).
inline constexpr std::chrono::nanoseconds kLinkSlice = std::chrono::microseconds(100);
inline constexpr std::chrono::nanoseconds kDeviceSlice = std::chrono::microseconds(400);

// For the calling thread, from now on. Cheap where nothing changes. Does nothing where the thread has another
// scheduling policy than the normal one or the kernel knows no slices (Linux before 6.12).
void requestSlice(std::chrono::nanoseconds slice);

}  // namespace halfwire
