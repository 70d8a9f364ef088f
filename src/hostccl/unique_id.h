// What the host engine writes into an ncclUniqueId: bytes 0 to 63. The rest is zero; whatever others write
// there is ignored.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>

#include "abi/nccl.h"
#include "hostccl/digest.h"

namespace halfwire::hostccl {

// A TCP address, IPv4 or IPv6, in 20 bytes that travel.
struct Endpoint {
  uint8_t family = 0;  // 4 or 6
  uint8_t reserved = 0;
  uint8_t port[2] = {};  // network order
  uint8_t ip[16] = {};

  // `text` is a numeric address.
  static std::optional<Endpoint> parse(const std::string& text, uint16_t port);
  static std::optional<Endpoint> ofSocket(int fd);
  // Fills `out` and returns its length; 0 if the endpoint is malformed.
  socklen_t toSockaddr(sockaddr_storage* out) const;
  std::string text() const;
};
static_assert(sizeof(Endpoint) == 20);

struct Identity {
  Endpoint root;  // where the process that made the id listens
  Token token{};

  // Names the communicator without giving the token away.
  uint64_t number() const;
  ncclUniqueId encode() const;
  // Nothing if the id was not made by the host engine.
  static std::optional<Identity> decode(const ncclUniqueId& id);
};

}  // namespace halfwire::hostccl
