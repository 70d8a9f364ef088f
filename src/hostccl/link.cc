#include "hostccl/link.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "base/units.h"

namespace halfwire::hostccl {
namespace {

// How much of the link's time may come in at once without delay. It hides that chunks arrive in bunches where
// processors are short: a reader that waits its turn for a scheduler's slice finds all that came meanwhile.
constexpr auto kIngressBurst = std::chrono::milliseconds(4);

}  // namespace

Outcome Link::ofDevice(int device, Link** out) {
  static std::mutex mutex;
  static auto* links = new std::map<int, std::unique_ptr<Link>>;
  *out = nullptr;
  const char* text = std::getenv("HALFWIRE_HOST_LINK");
  if (text == nullptr || *text == '\0') return {};
  const Result<double> bits = parseBitRate(text);
  if (!bits.ok()) return {ncclInvalidArgument, "HALFWIRE_HOST_LINK: " + bits.status().message()};
  std::lock_guard lock(mutex);
  std::unique_ptr<Link>& link = (*links)[device];
  if (!link) link = std::make_unique<Link>(bits.value() / 8);
  *out = link.get();
  return {};
}

Link::Time Link::depart(size_t bytes, Time ready) {
  std::lock_guard lock(mutex_);
  egress_ = std::max(egress_, ready) + duration(bytes);
  return egress_;
}

void Link::arrive(size_t bytes, Time now) {
  std::lock_guard lock(mutex_);
  ingress_ = std::max(ingress_, now - duration(bytes) - kIngressBurst) + duration(bytes);
}

Link::Time Link::ingressFree() {
  std::lock_guard lock(mutex_);
  return ingress_;
}

}  // namespace halfwire::hostccl
