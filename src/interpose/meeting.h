// How the members of a communicator find out, when it is made, whether all of them run this library with the
// same settings. NCCL writes about 40 of the 128 bytes of ncclUniqueId and zeroes the rest; the process that
// makes an id writes a mark, the address of its meeting point and a token into the tail, which every launcher
// ships verbatim. After NCCL's own initialisation each member connects there, sends one record and gets one
// verdict.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "abi/nccl.h"
#include "base/status.h"
#include "policy/policy.h"

namespace halfwire {

using Token = std::array<uint8_t, 16>;

// What the tail of an id says.
struct Mark {
  Mode mode = Mode::kOff;
  uint32_t address = 0;  // IPv4, network order
  uint16_t port = 0;     // network order; 0 where the maker of the id runs with mode off
  uint64_t digest = 0;   // of the maker's settings
  Token token{};
};

// Writes `mark` into the tail. Fails if NCCL has used these bytes itself.
Status writeMark(const Mark& mark, ncclUniqueId* id);
// The mark of an id; nothing if the maker runs without this library.
std::optional<Mark> readMark(const ncclUniqueId& id);

// One member's record.
struct MemberRecord {
  Token token{};        // of the id
  uint64_t branch = 0;  // 0, or which Split of that communicator
  uint32_t rank = 0;
  uint32_t ranks = 0;
  uint64_t digest = 0;  // of the member's settings
  Mode mode = Mode::kOff;
  bool blocking = true;
  bool ready = false;           // scratch allocated and kernels loaded
  bool one_connection = false;  // CUDA_DEVICE_MAX_CONNECTIONS=1
  uint64_t nvlink_domain = 0;   // Device::nvlinkDomain
  std::string words;            // describes the settings, or why the member is not ready
};

struct Verdict {
  // Not OK where the communicator must not be used: the sentence names the rank and the cure.
  Status status;
  // kCompressed, or why no member compresses on it.
  Reason reason = Reason::kCompressed;
  bool nvlink = false;  // NVLink joins all ranks
  std::string note;
};

// The meeting point of this process: one listening socket and one thread for all communicators whose ids it
// made. Accepts only connections that name a token it handed out; drops everything else.
class MeetingPoint {
 public:
  // Listens on `address` (dotted IPv4).
  static Result<std::unique_ptr<MeetingPoint>> open(const std::string& address, uint32_t timeout_s);
  ~MeetingPoint();
  MeetingPoint(const MeetingPoint&) = delete;
  MeetingPoint& operator=(const MeetingPoint&) = delete;

  // A mark with a fresh token for a new id. Thread-safe.
  Mark invite(Mode mode, uint64_t digest);

  // Returns once no verdict is half sent. Thread-safe.
  void settle();

 private:
  struct Impl;
  MeetingPoint();
  std::unique_ptr<Impl> impl_;
};

// One member's side. `send` connects and sends the record; `receive` waits for the verdict. Two calls, so
// that one thread can speak for several ranks.
class Meeting {
 public:
  Meeting() = default;
  ~Meeting();
  Meeting(Meeting&& other) noexcept;
  Meeting& operator=(Meeting&& other) noexcept;

  Status send(const Mark& mark, const MemberRecord& record, uint32_t timeout_s);
  Verdict receive(uint32_t timeout_s);

 private:
  int fd_ = -1;
};

}  // namespace halfwire
