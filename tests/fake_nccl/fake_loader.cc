// Loads a caller of NCCL with dlopen and lets it call. Usage: fake_loader LIBRARY local|global|local-lazy
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const bool global = strcmp(argv[2], "global") == 0;
  const bool lazy = strcmp(argv[2], "local-lazy") == 0;
  void* library = dlopen(argv[1], (global ? RTLD_GLOBAL : RTLD_LOCAL) | (lazy ? RTLD_LAZY : RTLD_NOW));
  if (library == nullptr) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const auto makeFiveCalls = reinterpret_cast<int (*)()>(dlsym(library, "makeFiveCalls"));
  if (makeFiveCalls == nullptr) return 1;
  printf("%d calls arrived\n", makeFiveCalls());
  return 0;
}
