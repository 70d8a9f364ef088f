// Frames on the socket between a rank and the parent.
#pragma once

#include <cstdint>
#include <string>

namespace halfwire::testing {

inline constexpr char kProgramVariable[] = "HWTEST_PROGRAM";
inline constexpr char kChannelVariable[] = "HWTEST_CHANNEL";
inline constexpr char kArgumentsVariable[] = "HWTEST_ARGUMENTS";

enum class FrameType : uint32_t { kGather = 1, kGathered = 2, kReport = 3 };

struct Frame {
  FrameType type = FrameType::kGather;
  std::string bytes;
};

// Blocking; false when the other end has gone.
bool sendFrame(int fd, FrameType type, const std::string& bytes);
bool receiveFrame(int fd, Frame* frame);

}  // namespace halfwire::testing
