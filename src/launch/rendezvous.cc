#include "launch/rendezvous.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>

#include "base/units.h"

namespace halfwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kGreeting[8] = {'H', 'W', 'R', 'A', 'N', 'K', '1', '\n'};

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&&) = delete;
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Sends or receives all of `size` bytes before the deadline.
bool transfer(int fd, char* data, size_t size, bool sending, Clock::time_point deadline) {
  size_t done = 0;
  while (done < size) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{fd, static_cast<short>(sending ? POLLOUT : POLLIN), 0};
    if (left <= 0 || (poll(&waiting, 1, static_cast<int>(left)) < 0 && errno != EINTR)) return false;
    if (waiting.revents == 0) continue;
    const ssize_t n = sending ? send(fd, data + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT)
                              : recv(fd, data + done, size - done, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

Status distribute(const RankInfo& info, const sockaddr_in& address, std::span<char> message,
                  Clock::time_point deadline) {
  const Socket listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener.get(), info.ranks) != 0) {
    return {StatusCode::kUnavailable,
            fmt::format("rank 0 cannot listen on {}:{} ({}): give another MASTER_PORT", info.master_addr,
                        info.master_port, std::strerror(errno))};
  }
  std::set<uint32_t> served;
  while (served.size() + 1 < static_cast<size_t>(info.ranks)) {
    pollfd waiting{listener.get(), POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      return {StatusCode::kTimeout,
              fmt::format("{} of {} ranks did not come to {}:{}: check that all were started",
                          static_cast<size_t>(info.ranks) - 1 - served.size(), info.ranks, info.master_addr,
                          info.master_port)};
    }
    if (poll(&waiting, 1, static_cast<int>(left)) <= 0) continue;
    const Socket peer(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (peer.get() < 0) continue;
    // Whoever does not speak like a rank at once is dropped.
    const auto soon = std::min(deadline, Clock::now() + std::chrono::seconds(2));
    char greeting[12];
    uint32_t rank = 0;
    if (!transfer(peer.get(), greeting, sizeof greeting, false, soon)) continue;
    std::memcpy(&rank, greeting + sizeof kGreeting, sizeof rank);
    if (std::memcmp(greeting, kGreeting, sizeof kGreeting) != 0 || rank == 0 ||
        rank >= static_cast<uint32_t>(info.ranks))
      continue;
    if (transfer(peer.get(), message.data(), message.size(), true, soon)) served.insert(rank);
  }
  return {};
}

Status collect(const RankInfo& info, const sockaddr_in& address, std::span<char> message,
               Clock::time_point deadline) {
  while (Clock::now() < deadline) {
    const Socket peer(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      char greeting[12];
      const auto rank = static_cast<uint32_t>(info.rank);
      std::memcpy(greeting, kGreeting, sizeof kGreeting);
      std::memcpy(greeting + sizeof kGreeting, &rank, sizeof rank);
      if (transfer(peer.get(), greeting, sizeof greeting, true, deadline) &&
          transfer(peer.get(), message.data(), message.size(), false, deadline)) {
        return {};
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // rank 0 may not listen yet
  }
  return {StatusCode::kTimeout,
          fmt::format("rank {} got no answer from rank 0 at {}:{}: check that it was started", info.rank,
                      info.master_addr, info.master_port)};
}

}  // namespace

Result<RankInfo> readRankInfo() {
  RankInfo info;
  const char* rank = std::getenv("RANK");
  if (rank == nullptr) return info;
  const auto number = [](const char* name, int64_t min, int64_t max) -> Result<int64_t> {
    const char* text = std::getenv(name);
    if (text == nullptr)
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} is not set: start the ranks with `halfwire run -n N`", name));
    return parseInteger(text, min, max, name);
  };
  const auto ranks = number("WORLD_SIZE", 1, 1 << 20);
  if (!ranks.ok()) return ranks.status();
  const auto own = number("RANK", 0, ranks.value() - 1);
  if (!own.ok()) return own.status();
  info.rank = static_cast<int>(own.value());
  info.ranks = static_cast<int>(ranks.value());
  if (info.ranks == 1) return info;
  const auto port = number("MASTER_PORT", 1, 65535);
  if (!port.ok()) return port.status();
  info.master_port = static_cast<int>(port.value());
  if (const char* address = std::getenv("MASTER_ADDR")) info.master_addr = address;
  return info;
}

Status shareFromRankZero(const RankInfo& info, std::span<char> message, int timeout_s) {
  if (info.ranks == 1) return {};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(info.master_port));
  const std::string host = info.master_addr == "localhost" ? "127.0.0.1" : info.master_addr;
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) {
    return {StatusCode::kInvalidArgument,
            fmt::format("MASTER_ADDR='{}' is not an IPv4 address: give one", info.master_addr)};
  }
  const auto deadline = Clock::now() + std::chrono::seconds(timeout_s);
  return info.rank == 0 ? distribute(info, address, message, deadline)
                        : collect(info, address, message, deadline);
}

}  // namespace halfwire
