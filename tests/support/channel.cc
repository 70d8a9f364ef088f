#include "support/channel.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace halfwire::testing {
namespace {

struct Header {
  uint32_t type;
  uint32_t bytes;
};

bool sendAll(int fd, const char* data, size_t n) {
  while (n > 0) {
    const ssize_t sent = send(fd, data, n, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    data += sent;
    n -= static_cast<size_t>(sent);
  }
  return true;
}

bool receiveAll(int fd, char* data, size_t n) {
  while (n > 0) {
    const ssize_t got = recv(fd, data, n, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    data += got;
    n -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

bool sendFrame(int fd, FrameType type, const std::string& bytes) {
  const Header header{static_cast<uint32_t>(type), static_cast<uint32_t>(bytes.size())};
  std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
  frame += bytes;
  return sendAll(fd, frame.data(), frame.size());
}

bool receiveFrame(int fd, Frame* frame) {
  Header header;
  if (!receiveAll(fd, reinterpret_cast<char*>(&header), sizeof header)) return false;
  frame->type = static_cast<FrameType>(header.type);
  frame->bytes.resize(header.bytes);
  return receiveAll(fd, frame->bytes.data(), header.bytes);
}

}  // namespace halfwire::testing
