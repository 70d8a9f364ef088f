// Every name of NCCL, from the table, refusing. The definitions here are weak: nccl_api.cc's win where it has
// one, so a name that gains a definition needs no edit here.
#include "abi/nccl.h"
#include "hostccl/api.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

namespace halfwire::hostccl {
namespace {

template <class R>
R refuseAs(const char* function) {
  return R(refuse(function));
}
template <>
const char* refuseAs(const char* function) {
  refuse(function);
  return "";
}
template <>
void refuseAs(const char* function) {
  refuse(function);
}

}  // namespace
}  // namespace halfwire::hostccl

extern "C" {

#define HALFWIRE_REFUSE(ret, name, params, args)                                            \
  __attribute__((weak)) ret name params { return halfwire::hostccl::refuseAs<ret>(#name); } \
  __attribute__((weak)) ret p##name params { return halfwire::hostccl::refuseAs<ret>(#name); }
HALFWIRE_NCCL_FUNCTIONS(HALFWIRE_REFUSE)
#undef HALFWIRE_REFUSE

#define HALFWIRE_REFUSE(name)                                                                             \
  __attribute__((visibility("default"))) ncclResult_t name() { return halfwire::hostccl::refuse(#name); } \
  __attribute__((visibility("default"))) ncclResult_t p##name() { return halfwire::hostccl::refuse(#name); }
HALFWIRE_NCCL_DEVICE_FUNCTIONS(HALFWIRE_REFUSE)
#undef HALFWIRE_REFUSE

}  // extern "C"
