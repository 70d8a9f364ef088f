/* The public C API of libhalfwire.so. A program needs none of it: the library works preloaded. */
#ifndef HALFWIRE_HALFWIRE_H_
#define HALFWIRE_HALFWIRE_H_

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

#ifdef __cplusplus
}
#endif
#endif
