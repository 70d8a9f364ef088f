#include "interpose/handles.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "interpose/process_log.h"
#include "interpose/registry.h"

namespace halfwire {
namespace {

constexpr char kSoname[] = "libnccl.so.2";
constexpr char kFacade[] = "libhalfwire-nccl.so";

// Constant initialisation: other libraries' constructors call dlopen before ours have run.
constinit std::atomic<DlopenFunction> next_dlopen{nullptr};

void* noDlopen(const char*, int) { return nullptr; }

bool namesNccl(const char* file) {
  const char* slash = std::strrchr(file, '/');
  const std::string_view name = slash != nullptr ? slash + 1 : file;
  return name == "libnccl.so" || name == kSoname ||
         (name.starts_with(kSoname) && name[sizeof kSoname - 1] == '.');
}

const void* baseOf(const void* address) {
  Dl_info info{};
  return address != nullptr && dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

const void* ownBase() { return baseOf(reinterpret_cast<const void*>(&noDlopen)); }

link_map* mapOf(const void* address) {
  Dl_info info{};
  void* map = nullptr;
  return dladdr1(address, &info, &map, RTLD_DL_LINKMAP) != 0 ? static_cast<link_map*>(map) : nullptr;
}

// The directories in which the loader looks for what this object opens by a bare name, apart from the cache.
std::vector<std::string> searchPath(link_map* map) {
  Dl_serinfo size{};
  if (map == nullptr || dlinfo(map, RTLD_DI_SERINFOSIZE, &size) != 0) return {};
  const std::unique_ptr<char[]> memory(new char[size.dls_size]);
  auto* info = reinterpret_cast<Dl_serinfo*>(memory.get());
  if (dlinfo(map, RTLD_DI_SERINFOSIZE, info) != 0 || dlinfo(map, RTLD_DI_SERINFO, info) != 0) return {};
  std::vector<std::string> path;
  for (unsigned i = 0; i < info->dls_cnt; ++i) path.emplace_back(info->dls_serpath[i].dls_name);
  return path;
}

// Whether the loader would stop its search at this file. It passes over libraries for other machines.
bool endsSearch(const char* path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  ElfW(Ehdr) theirs{};
  const bool is_elf = pread(fd, &theirs, sizeof theirs, 0) == static_cast<ssize_t>(sizeof theirs) &&
                      std::memcmp(theirs.e_ident, ELFMAG, SELFMAG) == 0;
  close(fd);
  const auto* ours = static_cast<const ElfW(Ehdr)*>(ownBase());
  return !is_elf ||
         (theirs.e_ident[EI_CLASS] == ours->e_ident[EI_CLASS] && theirs.e_machine == ours->e_machine);
}

// The loader takes the caller of dlopen, which is us here, for the object whose RPATH or RUNPATH it follows.
// Writes the file that it would have found on the path of the program's own caller; false where that is
// searched like ours. Its glibc-hwcaps subdirectories are not looked at.
bool onCallersPath(const char* file, const void* caller, char (&path)[PATH_MAX]) {
  std::vector<std::string> theirs = searchPath(mapOf(caller));
  std::vector<std::string> ours = searchPath(mapOf(ownBase()));
  // What both end with, the system's directories at least, is searched alike, and after the cache.
  while (!theirs.empty() && !ours.empty() && theirs.back() == ours.back()) {
    theirs.pop_back();
    ours.pop_back();
  }
  for (const std::string& directory : theirs) {
    const int length = std::snprintf(path, sizeof path, "%s/%s", directory.c_str(), file);
    if (length > 0 && static_cast<size_t>(length) < sizeof path && endsSearch(path)) return true;
  }
  return false;
}

// Nothing of ours is allocated, locked or caught while NCCL's constructors run.
void* openLikeCaller(const char* file, int mode, const void* caller) {
  if (std::strchr(file, '/') == nullptr) {
    // A loaded library of this name comes before any search.
    void* loaded = std::strcmp(file, kSoname) == 0 ? realDlopen()(file, mode | RTLD_NOLOAD) : nullptr;
    if (loaded != nullptr) return loaded;
    char path[PATH_MAX];
    bool found = false;
    try {
      found = onCallersPath(file, caller, path);
    } catch (const std::exception&) {  // out of memory
    }
    if (found) return realDlopen()(path, mode);
  }
  return realDlopen()(file, mode);
}

// The load address of the NCCL behind a handle; null if it is none.
const void* ncclBehind(void* handle) {
  const void* version = baseOf(dlsym(handle, "ncclGetVersion"));
  return version != nullptr && version == baseOf(dlsym(handle, "ncclAllReduce")) ? version : nullptr;
}

// libhalfwire-nccl.so beside our own file; empty if that is not known by an absolute path.
std::string facadePath() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&noDlopen), &info) == 0 || info.dli_fname == nullptr ||
      info.dli_fname[0] != '/')
    return {};
  const std::string_view own = info.dli_fname;
  return std::string(own.substr(0, own.rfind('/') + 1)) + kFacade;
}

// A handle of the facade for the NCCL behind `handle`, or null and why not.
void* openFacade(void* handle, std::string* why) {
  const void* base = ncclBehind(handle);
  if (base == nullptr) {
    *why = "it lacks functions that every NCCL has";
    return nullptr;
  }
  // The facade's need for libnccl.so.2 must be met by what is loaded, and by this very library.
  void* named = realDlopen()(kSoname, RTLD_LAZY | RTLD_NOLOAD);
  if (named != nullptr) dlclose(named);
  if (named != handle) {
    *why = named == nullptr ? "its SONAME is not libnccl.so.2"
                            : "another copy of libnccl.so.2 is loaded, for which Halfwire stands";
    return nullptr;
  }
  const RealNccl* used = Registry::realIfFound();
  const void* ours = used != nullptr ? baseOf(reinterpret_cast<const void*>(used->api.ncclAllReduce))
                                     : loadedNccl(std::getenv("HALFWIRE_NCCL"));
  if (ours != base) {
    *why =
        "Halfwire stands for another copy of NCCL: the one that the program is linked with, or HALFWIRE_NCCL";
    return nullptr;
  }
  const std::string path = facadePath();
  if (path.empty()) {
    *why = "libhalfwire.so was preloaded by a relative path: give LD_PRELOAD its absolute path";
    return nullptr;
  }
  void* facade = realDlopen()(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (facade == nullptr) {
    const char* words = dlerror();
    *why =
        fmt::format("{}: keep it beside libhalfwire.so, of the same build", words != nullptr ? words : path);
    return nullptr;
  }
  if (baseOf(dlsym(facade, "ncclAllReduce")) == ownBase() && baseOf(dlsym(facade, "ncclGetVersion")) == base)
    return facade;
  dlclose(facade);
  *why = fmt::format("{} stands for another copy of NCCL", path);
  return nullptr;
}

// What a program gets that opens NCCL. Reached by a jump: the return address is the program's.
void* openNccl(const char* file, int mode) {
  void* const handle = openLikeCaller(file, mode, __builtin_return_address(0));
  if (handle == nullptr) return nullptr;
  try {
    std::string why;
    if (void* facade = openFacade(handle, &why)) {
      // The facade needs NCCL and so keeps it for as long as the program keeps the facade.
      dlclose(handle);
      return facade;
    }
    (void)dlerror();  // of our own attempts: the program's call has succeeded
    logNote(fmt::format(
        "NCCL opened by handle as {} is left alone, its calls are neither counted nor compressed: {}", file,
        why));
  } catch (const std::exception&) {  // out of memory
  }
  return handle;
}

}  // namespace

DlopenFunction realDlopen() {
  if (const DlopenFunction known = next_dlopen.load(std::memory_order_relaxed)) return known;
  auto found = reinterpret_cast<DlopenFunction>(dlsym(RTLD_NEXT, "dlopen"));
  if (found == nullptr) found = &noDlopen;
  next_dlopen.store(found, std::memory_order_relaxed);
  return found;
}

Status checkHandles(const RealNccl& real) {
  const std::string path = facadePath();
  void* facade = path.empty() ? nullptr : realDlopen()(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (facade == nullptr) return {};
  Dl_info info{};
  const bool known = dladdr(dlsym(facade, "ncclGetVersion"), &info) != 0;
  const bool same = known && info.dli_fbase == baseOf(reinterpret_cast<const void*>(real.api.ncclAllReduce));
  const std::string other = known ? info.dli_fname : "?";
  dlclose(facade);
  if (same) return {};
  return {StatusCode::kUnavailable,
          fmt::format(
              "two copies of NCCL: {} was opened by handle, and {} is what the program is linked with; use "
              "one, or set HALFWIRE_HANDLES=off to leave the first alone",
              other, real.path)};
}

}  // namespace halfwire

// Where dlopen.S goes on to with the same arguments. `caller` is the address that the call returns to.
extern "C" __attribute__((used, visibility("hidden"))) halfwire::DlopenFunction halfwire_dlopen_target(
    const char* file, int, const void* caller) {
  using namespace halfwire;
  const DlopenFunction real = realDlopen();
  if (file == nullptr || !namesNccl(file)) return real;
  const char* handles = std::getenv("HALFWIRE_HANDLES");
  if (handles != nullptr && std::strcmp(handles, "off") == 0) return real;
  // Our own calls, and what only the loader can make sense of: $ORIGIN of the caller, another namespace.
  Lmid_t space = LM_ID_BASE;
  link_map* map = mapOf(caller);
  if (map != nullptr && dlinfo(map, RTLD_DI_LMID, &space) != 0) return real;
  if (baseOf(caller) == ownBase() || space != LM_ID_BASE || std::strchr(file, '$') != nullptr) return real;
  return &openNccl;
}
