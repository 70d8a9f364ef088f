// A program that holds two CUDA runtimes, opened as Python opens its extensions. Prints which answered each caller, and
// whether the meter's definitions were asked.
#include <dlfcn.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  for (int i = 1; i < argc; ++i) {
    void* handle = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      std::printf("%s\n", dlerror());
      return 1;
    }
    auto* call = reinterpret_cast<int (*)()>(dlsym(handle, "call"));
    std::printf("%d ", call != nullptr ? call() : -2);
  }
  Dl_info info{};
  void* hook = dlsym(RTLD_DEFAULT, "cudaEventRecord");
  std::printf("%s\n", hook != nullptr && dladdr(hook, &info) != 0 ? info.dli_fname : "none");
  return 0;
}
