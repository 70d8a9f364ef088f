#include "interpose/meeting.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace halfwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMarkMagic[8] = {'H', 'A', 'L', 'F', 'W', 'I', 'R', 'E'};
constexpr uint16_t kProtocol = 2;
constexpr size_t kTailOffset = 64;
// A connection must send its record within this time.
constexpr auto kRecordPatience = std::chrono::seconds(5);
constexpr size_t kMaxConnections = 4096;

// The tail of ncclUniqueId, little endian as every machine NCCL runs on.
struct WireMark {
  char magic[8];
  uint16_t protocol;
  uint8_t mode;
  uint8_t reserved;
  uint32_t address;
  uint16_t port;
  uint16_t reserved2;
  uint32_t reserved3;
  uint64_t digest;
  uint8_t token[16];
};
static_assert(sizeof(WireMark) == 48 && kTailOffset + sizeof(WireMark) <= NCCL_UNIQUE_ID_BYTES);

struct WireRecord {
  char magic[8];
  uint16_t protocol;
  uint8_t mode;
  uint8_t flags;  // 1 blocking, 2 ready, 4 one connection
  uint32_t rank;
  uint32_t ranks;
  uint32_t reserved;
  uint64_t digest;
  uint64_t branch;
  uint64_t nvlink_domain;
  uint8_t token[16];
  char words[192];
};
static_assert(sizeof(WireRecord) == 256);

struct WireVerdict {
  char magic[8];
  uint32_t failed;
  uint16_t reason;
  uint8_t nvlink;
  uint8_t reserved;
  char words[496];
};
static_assert(sizeof(WireVerdict) == 512);

template <size_t N>
void putText(char (&field)[N], const std::string& text) {
  const size_t n = std::min(text.size(), N - 1);
  std::memcpy(field, text.data(), n);
  field[n] = '\0';
}

template <size_t N>
std::string getText(const char (&field)[N]) {
  return std::string(field, strnlen(field, N));
}

bool equalTokens(const uint8_t* a, const uint8_t* b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < sizeof(Token); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

// Waits until `fd` can be read or written, at most until `deadline`.
bool waitFor(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd p{fd, events, 0};
    const int n = poll(&p, 1, static_cast<int>(std::min<long long>(left, 60000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

bool sendAll(int fd, const void* data, size_t bytes, Clock::time_point deadline) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(fd, p, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      p += n;
      bytes -= static_cast<size_t>(n);
      continue;
    }
    if (n < 0 && errno != EAGAIN && errno != EINTR) return false;
    if (!waitFor(fd, POLLOUT, deadline)) return false;
  }
  return true;
}

}  // namespace

Status writeMark(const Mark& mark, ncclUniqueId* id) {
  char* tail = id->internal + kTailOffset;
  for (size_t i = 0; i < sizeof id->internal - kTailOffset; ++i) {
    if (tail[i] != 0) {
      return {StatusCode::kUnavailable,
              "this NCCL uses all 128 bytes of its unique id, so ranks cannot find each other: run with "
              "--mode off"};
    }
  }
  WireMark wire{};
  std::memcpy(wire.magic, kMarkMagic, sizeof wire.magic);
  wire.protocol = kProtocol;
  wire.mode = static_cast<uint8_t>(mark.mode);
  wire.address = mark.address;
  wire.port = mark.port;
  wire.digest = mark.digest;
  std::memcpy(wire.token, mark.token.data(), sizeof wire.token);
  std::memcpy(tail, &wire, sizeof wire);
  return {};
}

std::optional<Mark> readMark(const ncclUniqueId& id) {
  WireMark wire;
  std::memcpy(&wire, id.internal + kTailOffset, sizeof wire);
  if (std::memcmp(wire.magic, kMarkMagic, sizeof wire.magic) != 0 || wire.protocol != kProtocol)
    return std::nullopt;
  Mark mark;
  mark.mode = wire.mode <= static_cast<uint8_t>(Mode::kShadow) ? static_cast<Mode>(wire.mode) : Mode::kOff;
  mark.address = wire.address;
  mark.port = wire.port;
  mark.digest = wire.digest;
  std::memcpy(mark.token.data(), wire.token, sizeof wire.token);
  return mark;
}

struct MeetingPoint::Impl {
  // A connection whose record has not arrived whole.
  struct Stranger {
    int fd = -1;
    size_t received = 0;
    WireRecord record{};
    Clock::time_point deadline;
  };
  struct Member {
    int fd = -1;
    WireRecord record{};
  };
  // One communicator being made: members by rank.
  struct Gathering {
    uint32_t ranks = 0;
    Clock::time_point deadline;
    std::map<uint32_t, Member> members;
  };
  using Key = std::pair<Token, uint64_t>;

  int listener = -1;
  int wake = -1;
  uint32_t address = 0;
  uint16_t port = 0;
  uint32_t timeout_s = 30;
  std::mutex mutex;
  std::mutex sending;  // held from a verdict's first byte to its last
  std::set<Token> tokens;
  std::thread thread;

  ~Impl() {
    if (thread.joinable()) {
      const uint64_t one = 1;
      (void)!write(wake, &one, sizeof one);
      thread.join();
    }
    if (listener >= 0) close(listener);
    if (wake >= 0) close(wake);
  }

  bool known(const uint8_t* token) {
    std::lock_guard lock(mutex);
    bool found = false;
    for (const Token& t : tokens) found = equalTokens(t.data(), token) || found;
    return found;
  }

  void serve();
  void admit(Stranger& stranger, std::map<Key, Gathering>& gatherings);
  void conclude(Gathering& gathering);
};

// Sends every member the same verdict and closes the gathering.
void MeetingPoint::Impl::conclude(Gathering& g) {
  WireVerdict verdict{};
  std::memcpy(verdict.magic, kMarkMagic, sizeof verdict.magic);
  verdict.reason = static_cast<uint16_t>(Reason::kCompressed);
  const auto fail = [&](const std::string& words) {
    if (verdict.failed) return;
    verdict.failed = 1;
    putText(verdict.words, words);
  };
  const auto pass = [&](Reason reason, const std::string& words) {
    if (verdict.failed || verdict.reason != static_cast<uint16_t>(Reason::kCompressed)) return;
    verdict.reason = static_cast<uint16_t>(reason);
    putText(verdict.words, words);
  };

  std::string missing;
  uint32_t missing_count = 0;
  for (uint32_t rank = 0; rank < g.ranks; ++rank) {
    if (g.members.contains(rank)) continue;
    if (++missing_count <= 8) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (missing_count > 8) missing += fmt::format(" and {} more", missing_count - 8);
  if (missing_count > 0) {
    fail(fmt::format(
        "rank{} {} of {} did not meet: the library is not loaded there (its launcher may drop LD_PRELOAD) or "
        "cannot reach this address; start every rank with halfwire run, and give --address for several hosts",
        missing_count > 1 ? "s" : "", missing, g.ranks));
  }
  const WireRecord* first = g.members.empty() ? nullptr : &g.members.begin()->second.record;
  verdict.nvlink = first != nullptr && first->nvlink_domain != 0;
  for (const auto& [rank, member] : g.members) {
    const WireRecord& r = member.record;
    if (r.nvlink_domain != first->nvlink_domain) verdict.nvlink = 0;
    if (r.digest != first->digest || r.mode != first->mode) {
      fail(fmt::format(
          "rank {} runs with other settings than rank {}: \"{}\" and \"{}\"; start every rank with the same "
          "halfwire run options",
          rank, first->rank, getText(r.words), getText(first->words)));
    }
    if (!(r.flags & 1)) pass(Reason::kNonBlocking, fmt::format("rank {} is non-blocking", rank));
    if (r.flags & 4) pass(Reason::kOneConnection, fmt::format("set on rank {}", rank));
    if (!(r.flags & 2)) pass(Reason::kMemberNotReady, fmt::format("rank {}: {}", rank, getText(r.words)));
  }
  const std::lock_guard lock(sending);
  for (auto& [rank, member] : g.members) {
    if (member.fd < 0) continue;
    (void)sendAll(member.fd, &verdict, sizeof verdict, Clock::now() + std::chrono::seconds(2));
    close(member.fd);
    member.fd = -1;
  }
}

// A whole record has arrived: puts it into its gathering, or drops the connection.
void MeetingPoint::Impl::admit(Stranger& s, std::map<Key, Gathering>& gatherings) {
  const WireRecord& r = s.record;
  const bool valid = std::memcmp(r.magic, kMarkMagic, sizeof r.magic) == 0 && r.protocol == kProtocol &&
                     r.ranks >= 2 && r.ranks <= (1u << 20) && r.rank < r.ranks && known(r.token);
  if (!valid) {
    close(s.fd);
    s.fd = -1;
    return;
  }
  Key key;
  std::memcpy(key.first.data(), r.token, sizeof r.token);
  key.second = r.branch;
  auto [it, made] = gatherings.try_emplace(key);
  Gathering& g = it->second;
  if (made) {
    g.ranks = r.ranks;
    g.deadline = Clock::now() + std::chrono::seconds(timeout_s);
  }
  // A second record of one rank is a replay.
  if (g.ranks != r.ranks || g.members.contains(r.rank)) {
    close(s.fd);
    s.fd = -1;
    return;
  }
  g.members[r.rank] = {s.fd, r};
  s.fd = -1;
  if (g.members.size() < g.ranks) return;
  conclude(g);
  gatherings.erase(it);
}

void MeetingPoint::Impl::serve() {
  std::vector<Stranger> strangers;
  std::map<Key, Gathering> gatherings;
  for (;;) {
    std::vector<pollfd> fds{{wake, POLLIN, 0}, {listener, POLLIN, 0}};
    for (const Stranger& s : strangers) fds.push_back({s.fd, POLLIN, 0});
    auto deadline = Clock::time_point::max();
    for (const Stranger& s : strangers) deadline = std::min(deadline, s.deadline);
    for (const auto& [key, g] : gatherings) deadline = std::min(deadline, g.deadline);
    int wait_ms = -1;
    if (deadline != Clock::time_point::max()) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count() + 1;
      wait_ms = static_cast<int>(std::clamp<long long>(left, 0, 3600000));
    }
    if (poll(fds.data(), fds.size(), wait_ms) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) break;

    for (size_t i = 0; i < strangers.size(); ++i) {
      Stranger& s = strangers[i];
      if (fds[i + 2].revents != 0) {
        char* to = reinterpret_cast<char*>(&s.record) + s.received;
        const ssize_t n = recv(s.fd, to, sizeof s.record - s.received, MSG_DONTWAIT);
        if (n > 0) {
          s.received += static_cast<size_t>(n);
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
          close(s.fd);
          s.fd = -1;
          continue;
        }
        if (s.received == sizeof s.record) {
          admit(s, gatherings);
          continue;
        }
      }
      if (Clock::now() >= s.deadline) {
        close(s.fd);
        s.fd = -1;
      }
    }
    std::erase_if(strangers, [](const Stranger& s) { return s.fd < 0; });

    if (fds[1].revents & POLLIN) {
      const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd >= 0 && strangers.size() >= kMaxConnections) {
        close(fd);
      } else if (fd >= 0) {
        Stranger s;
        s.fd = fd;
        s.deadline = Clock::now() + kRecordPatience;
        strangers.push_back(s);
      } else if (errno == EMFILE || errno == ENFILE) {
        // No descriptor to spare: give the program a moment instead of spinning on the same connection.
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    }
    for (auto it = gatherings.begin(); it != gatherings.end();) {
      if (Clock::now() < it->second.deadline) {
        ++it;
        continue;
      }
      conclude(it->second);
      it = gatherings.erase(it);
    }
  }
  for (const Stranger& s : strangers) close(s.fd);
  for (auto& [key, g] : gatherings) {
    for (auto& [rank, member] : g.members) {
      if (member.fd >= 0) close(member.fd);
    }
  }
}

MeetingPoint::MeetingPoint() : impl_(std::make_unique<Impl>()) {}
MeetingPoint::~MeetingPoint() = default;

Result<std::unique_ptr<MeetingPoint>> MeetingPoint::open(const std::string& address, uint32_t timeout_s) {
  std::unique_ptr<MeetingPoint> point(new MeetingPoint);
  Impl& impl = *point->impl_;
  sockaddr_in where{};
  where.sin_family = AF_INET;
  const auto error = [&](const char* what) {
    return Status(StatusCode::kUnavailable,
                  fmt::format("cannot {} on {} ({}): give --address an IPv4 address of this machine", what,
                              address, std::strerror(errno)));
  };
  if (inet_pton(AF_INET, address.c_str(), &where.sin_addr) != 1) return error("open the meeting point");
  impl.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  impl.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (impl.listener < 0 || impl.wake < 0) return error("open the meeting point");
  if (bind(impl.listener, reinterpret_cast<sockaddr*>(&where), sizeof where) != 0)
    return error("bind the meeting point");
  if (listen(impl.listener, 1024) != 0) return error("listen at the meeting point");
  socklen_t length = sizeof where;
  if (getsockname(impl.listener, reinterpret_cast<sockaddr*>(&where), &length) != 0)
    return error("read the port");
  impl.address = where.sin_addr.s_addr;
  impl.port = where.sin_port;
  impl.timeout_s = timeout_s;
  impl.thread = std::thread([&impl] { impl.serve(); });
  return point;
}

Mark MeetingPoint::invite(Mode mode, uint64_t digest) {
  Mark mark;
  mark.mode = mode;
  mark.digest = digest;
  mark.address = impl_->address;
  mark.port = impl_->port;
  for (size_t filled = 0; filled < mark.token.size();) {
    const ssize_t n = getrandom(mark.token.data() + filled, mark.token.size() - filled, 0);
    if (n > 0) filled += static_cast<size_t>(n);
  }
  std::lock_guard lock(impl_->mutex);
  impl_->tokens.insert(mark.token);
  return mark;
}

void MeetingPoint::settle() { const std::lock_guard lock(impl_->sending); }

Meeting::~Meeting() {
  if (fd_ >= 0) close(fd_);
}

Meeting::Meeting(Meeting&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Meeting& Meeting::operator=(Meeting&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Status Meeting::send(const Mark& mark, const MemberRecord& record, uint32_t timeout_s) {
  const auto deadline = Clock::now() + std::chrono::seconds(timeout_s);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = mark.address;
  where.sin_port = mark.port;
  char text[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &where.sin_addr, text, sizeof text);

  // The maker of the id listens already; a refusal means that this is the wrong host or that it died.
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  bool connected = false;
  int error = errno;
  if (fd_ >= 0) {
    connected = connect(fd_, reinterpret_cast<sockaddr*>(&where), sizeof where) == 0;
    error = errno;
    if (!connected && error == EINPROGRESS && waitFor(fd_, POLLOUT, deadline)) {
      socklen_t length = sizeof error;
      getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
      connected = error == 0;
    }
  }
  if (!connected) {
    return {StatusCode::kUnavailable,
            fmt::format(
                "rank {} cannot reach {}:{}, where the rank that made the communicator's id waits ({}): give "
                "halfwire run --address an address of that host which every rank can reach",
                record.rank, text, ntohs(mark.port), std::strerror(error))};
  }
  const int one = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);

  WireRecord wire{};
  std::memcpy(wire.magic, kMarkMagic, sizeof wire.magic);
  wire.protocol = kProtocol;
  wire.mode = static_cast<uint8_t>(record.mode);
  wire.flags = static_cast<uint8_t>((record.blocking ? 1 : 0) | (record.ready ? 2 : 0) |
                                    (record.one_connection ? 4 : 0));
  wire.rank = record.rank;
  wire.ranks = record.ranks;
  wire.digest = record.digest;
  wire.branch = record.branch;
  wire.nvlink_domain = record.nvlink_domain;
  std::memcpy(wire.token, record.token.data(), sizeof wire.token);
  putText(wire.words, record.words);
  if (!sendAll(fd_, &wire, sizeof wire, deadline)) {
    return {StatusCode::kPeerLost,
            fmt::format("rank {} lost its connection to {}:{} while meeting the other ranks", record.rank,
                        text, ntohs(mark.port))};
  }
  return {};
}

Verdict Meeting::receive(uint32_t timeout_s) {
  const auto deadline = Clock::now() + std::chrono::seconds(timeout_s);
  WireVerdict wire{};
  size_t received = 0;
  Verdict verdict;
  while (received < sizeof wire) {
    if (!waitFor(fd_, POLLIN, deadline)) {
      verdict.status = {
          StatusCode::kTimeout,
          "the rank that made the communicator's id did not answer in time: it may have died or hung"};
      return verdict;
    }
    const ssize_t n =
        recv(fd_, reinterpret_cast<char*>(&wire) + received, sizeof wire - received, MSG_DONTWAIT);
    if (n > 0) {
      received += static_cast<size_t>(n);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      verdict.status = {StatusCode::kPeerLost,
                        "the rank that made the communicator's id closed the connection: it may have died"};
      return verdict;
    }
  }
  if (std::memcmp(wire.magic, kMarkMagic, sizeof wire.magic) != 0 ||
      wire.reason >= static_cast<uint16_t>(Reason::kCount)) {
    verdict.status = {StatusCode::kInvalidData,
                      "the answer at the meeting point is not Halfwire's: another program took the port"};
    return verdict;
  }
  verdict.note = getText(wire.words);
  if (wire.failed) {
    verdict.status = {StatusCode::kInvalidArgument, verdict.note};
    return verdict;
  }
  verdict.reason = static_cast<Reason>(wire.reason);
  verdict.nvlink = wire.nvlink != 0;
  return verdict;
}

}  // namespace halfwire
