#include "interpose/nvtx.h"

#ifdef HALFWIRE_HAVE_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace halfwire::nvtx {

#ifdef HALFWIRE_HAVE_NVTX
namespace {

// Null where no tool listens.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("halfwire");
  return handle;
}

}  // namespace

bool attached() { return domain() != nullptr; }

Range::Range(const std::string& text) {
  if (text.empty() || !attached()) return;
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = text.c_str();
  pushed_ = nvtxDomainRangePushEx(domain(), &event) >= 0;
}

Range::~Range() {
  if (pushed_) (void)nvtxDomainRangePop(domain());
}
#else
bool attached() { return false; }
Range::Range(const std::string&) {}
Range::~Range() = default;
#endif

}  // namespace halfwire::nvtx
