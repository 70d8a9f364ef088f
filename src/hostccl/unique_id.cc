#include "hostccl/unique_id.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

namespace halfwire::hostccl {
namespace {

constexpr char kMagic[8] = {'H', 'W', 'H', 'O', 'S', 'T', '0', '1'};

struct Layout {
  char magic[8];
  Endpoint root;
  uint8_t token[32];
  uint8_t reserved[4];
};
static_assert(sizeof(Layout) == 64);

}  // namespace

std::optional<Endpoint> Endpoint::parse(const std::string& text, uint16_t port) {
  Endpoint e;
  e.port[0] = static_cast<uint8_t>(port >> 8);
  e.port[1] = static_cast<uint8_t>(port & 0xff);
  if (inet_pton(AF_INET, text.c_str(), e.ip) == 1) {
    e.family = 4;
    return e;
  }
  if (inet_pton(AF_INET6, text.c_str(), e.ip) == 1) {
    e.family = 6;
    return e;
  }
  return std::nullopt;
}

std::optional<Endpoint> Endpoint::ofSocket(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return std::nullopt;
  Endpoint e;
  if (storage.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(storage);
    e.family = 4;
    std::memcpy(e.port, &in.sin_port, 2);
    std::memcpy(e.ip, &in.sin_addr, 4);
    return e;
  }
  if (storage.ss_family == AF_INET6) {
    const auto& in = reinterpret_cast<const sockaddr_in6&>(storage);
    e.family = 6;
    std::memcpy(e.port, &in.sin6_port, 2);
    std::memcpy(e.ip, &in.sin6_addr, 16);
    return e;
  }
  return std::nullopt;
}

socklen_t Endpoint::toSockaddr(sockaddr_storage* out) const {
  *out = {};
  if (family == 4) {
    auto& in = reinterpret_cast<sockaddr_in&>(*out);
    in.sin_family = AF_INET;
    std::memcpy(&in.sin_port, port, 2);
    std::memcpy(&in.sin_addr, ip, 4);
    return sizeof(in);
  }
  if (family == 6) {
    auto& in = reinterpret_cast<sockaddr_in6&>(*out);
    in.sin6_family = AF_INET6;
    std::memcpy(&in.sin6_port, port, 2);
    std::memcpy(&in.sin6_addr, ip, 16);
    return sizeof(in);
  }
  return 0;
}

std::string Endpoint::text() const {
  char buffer[INET6_ADDRSTRLEN] = "?";
  inet_ntop(family == 4 ? AF_INET : AF_INET6, ip, buffer, sizeof(buffer));
  const std::string number = std::to_string(port[0] * 256 + port[1]);
  return family == 4 ? std::string(buffer) + ":" + number : "[" + std::string(buffer) + "]:" + number;
}

uint64_t Identity::number() const {
  const Digest digest = keyedDigest(token, 'I', {});
  uint64_t number;
  std::memcpy(&number, digest.data(), sizeof(number));
  return number;
}

ncclUniqueId Identity::encode() const {
  Layout layout{};
  std::memcpy(layout.magic, kMagic, sizeof(kMagic));
  layout.root = root;
  std::memcpy(layout.token, token.data(), token.size());
  ncclUniqueId id{};
  std::memcpy(id.internal, &layout, sizeof(layout));
  return id;
}

std::optional<Identity> Identity::decode(const ncclUniqueId& id) {
  Layout layout;
  std::memcpy(&layout, id.internal, sizeof(layout));
  if (std::memcmp(layout.magic, kMagic, sizeof(kMagic)) != 0) return std::nullopt;
  if (layout.root.family != 4 && layout.root.family != 6) return std::nullopt;
  Identity identity;
  identity.root = layout.root;
  std::memcpy(identity.token.data(), layout.token, identity.token.size());
  return identity;
}

}  // namespace halfwire::hostccl
