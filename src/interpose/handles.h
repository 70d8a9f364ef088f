// NCCL taken by an explicit handle: dlopen("libnccl.so.2") and dlsym on what it returns, as ctypes, vLLM and
// JAX do. dlsym on a handle never looks at a preloaded library, so the library's dlopen answers with the
// handle of a small facade, libhalfwire-nccl.so beside it, which holds nothing and needs libhalfwire.so and
// libnccl.so.2 in this order: dlsym finds our functions first, and everything else in the NCCL that the
// program opened.
//
// A call is looked at only if the last part of the name asked for is libnccl.so, libnccl.so.2 or
// libnccl.so.2.<version>, and HALFWIRE_HANDLES is not "off". Every other call goes on to the next dlopen with
// its own arguments and return address (dlopen.S). dlmopen is not touched.
#pragma once

#include "base/status.h"
#include "interpose/resolver.h"

namespace halfwire {

using DlopenFunction = void* (*)(const char* file, int mode);

// The dlopen behind ours: the C library's, or that of another interposer. Thread-safe; neither allocates nor
// locks beyond what dlsym does.
DlopenFunction realDlopen();

// An error if the facade, where the program holds it, stands for another NCCL than `real`.
Status checkHandles(const RealNccl& real);

}  // namespace halfwire
