/* The public C API of libhalfwire.so. A program needs none of it: the library works preloaded. */
#ifndef HALFWIRE_HALFWIRE_H_
#define HALFWIRE_HALFWIRE_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library's version, "0.1.0". Never fails; the string lives as long as the library. Thread-safe.
   Look it up with dlsym(RTLD_DEFAULT, "halfwire_version") to learn whether the library is loaded. */
const char* halfwire_version(void);

/* What went wrong in the last NCCL call on this thread that Halfwire, not NCCL, refused; an empty string if none.
   The string is valid until the next NCCL call on this thread. ncclGetLastError gives the same sentence. */
const char* halfwire_last_error(void);

/* Says that a training step begins now: the exposure meter counts by it. Does nothing while the meter is off, and costs
   a few nanoseconds then. Call it at the same place of every step, from one thread. A program that is not linked with
   the library looks it up with dlsym(RTLD_DEFAULT, "halfwire_step") and skips the call where that is null. */
void halfwire_step(void);

/* Lends the library the program's own allocator of device memory for its scratch, so that it shows in the program's
   accounting. Before the first communicator; both null: no allocator again. `allocate` gives `bytes` of memory of CUDA
   device `device`, aligned to 256 bytes, or null if there is none (the communicator then stays exact, and the report says
   why); `release` takes them back once nothing uses them. Both are called from the threads that make and destroy
   communicators, never while a collective runs, and must not call NCCL. Returns 0, or an ncclResult_t with the reason in
   halfwire_last_error(). Connections that NCCL makes are not part of it. Thread-safe. From PyTorch:
   halfwire.memory.use_torch(). */
int halfwire_set_allocator(void* (*allocate)(size_t bytes, int device, void* context),
                           void (*release)(void* pointer, size_t bytes, int device, void* context), void* context);

#ifdef __cplusplus
}
#endif
#endif
