/* A library that opens others by name, as an extension module does that carries its neighbours' folder in its RPATH or
 * RUNPATH; and, built with ANSWER, the neighbour. */
#ifdef ANSWER
__attribute__((visibility("default"))) int answer(void) { return ANSWER; }
#else
#include <dlfcn.h>
#include <stdlib.h>

/* While this library is being loaded itself. */
__attribute__((constructor)) static void early(void) {
  const char* file = getenv("HANDLE_CALLER_EARLY");
  if (file != NULL && dlopen(file, RTLD_NOW) == NULL) abort();
}

__attribute__((visibility("default"))) void* openFile(const char* file) {
  void* volatile handle = dlopen(file, RTLD_NOW); /* not a tail call: the loader must find this library by it */
  return handle;
}
#endif
