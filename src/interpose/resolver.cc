#include "interpose/resolver.h"

#include <dlfcn.h>
#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <array>
#include <cstring>
#include <set>
#include <string_view>
#include <vector>

#include "interpose/handles.h"

namespace halfwire {
namespace {

// The load address of the object that holds this code.
const void* ownBase() {
  Dl_info info{};
  return dladdr(reinterpret_cast<const void*>(&ownBase), &info) != 0 ? info.dli_fbase : nullptr;
}

const void* baseOf(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

// A handle on the loaded object that holds `address`; null for our own object.
void* handleOf(const void* address, std::string* path) {
  Dl_info info{};
  if (address == nullptr || dladdr(address, &info) == 0 || info.dli_fname == nullptr) return nullptr;
  if (info.dli_fbase == ownBase()) return nullptr;
  *path = info.dli_fname;
  void* handle = realDlopen()(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
  // The program itself is not found by name.
  return handle != nullptr ? handle : realDlopen()(nullptr, RTLD_LAZY | RTLD_NOLOAD);
}

struct Candidates {
  std::vector<std::string> names;
};

int collectNames(dl_phdr_info* info, size_t, void* data) {
  if (info->dlpi_name != nullptr && info->dlpi_name[0] != '\0') {
    static_cast<Candidates*>(data)->names.emplace_back(info->dlpi_name);
  }
  return 0;
}

// The first loaded object other than ours that defines `symbol` itself.
void* handleDefining(const char* symbol, std::string* path) {
  Candidates candidates;
  dl_iterate_phdr(collectNames, &candidates);
  for (const std::string& name : candidates.names) {
    void* handle = realDlopen()(name.c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
    if (handle == nullptr) continue;
    void* found = dlsym(handle, symbol);
    Dl_info info{};
    // dlsym also searches the object's dependencies; only the definer counts.
    if (found != nullptr && dladdr(found, &info) != 0 && info.dli_fbase != ownBase() &&
        info.dli_fname == name) {
      *path = name;
      return handle;
    }
    dlclose(handle);
  }
  return nullptr;
}

bool isNcclLibrary(std::string_view path) {
  return path.substr(path.find_last_of('/') + 1).find("nccl") != std::string_view::npos;
}

struct TextQuery {
  const void* base;
  uintptr_t begin = UINTPTR_MAX;
  uintptr_t end = 0;
  const ElfW(Dyn) * dynamic = nullptr;
  uintptr_t bias = 0;
};

int collectText(dl_phdr_info* info, size_t, void* data) {
  auto* query = static_cast<TextQuery*>(data);
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& p = info->dlpi_phdr[i];
    if (p.p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + p.p_vaddr;
    const auto base = reinterpret_cast<uintptr_t>(query->base);
    mine = mine || (base >= begin && base < begin + p.p_memsz);
  }
  if (!mine) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& p = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + p.p_vaddr;
    if (p.p_type == PT_DYNAMIC) query->dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
    if (p.p_type != PT_LOAD || (p.p_flags & PF_X) == 0) continue;
    query->begin = std::min(query->begin, begin);
    query->end = std::max(query->end, begin + p.p_memsz);
  }
  query->bias = info->dlpi_addr;
  return 1;
}

const std::set<std::string_view>& knownNames() {
  static const auto* names = new std::set<std::string_view>{
#define HALFWIRE_NAME(ret, name, params, args) #name,
      HALFWIRE_NCCL_FUNCTIONS(HALFWIRE_NAME)
#undef HALFWIRE_NAME
#define HALFWIRE_DEVICE_NAME(name) #name,
          HALFWIRE_NCCL_DEVICE_FUNCTIONS(HALFWIRE_DEVICE_NAME)
#undef HALFWIRE_DEVICE_NAME
              "ncclResetDebugInitInternal",
  };
  return *names;
}

// Number of dynamic symbols, from the hash table that the object has.
size_t symbolCount(const ElfW(Word) * sysv, const uint32_t* gnu) {
  if (sysv != nullptr) return sysv[1];
  if (gnu == nullptr) return 0;
  const uint32_t buckets = gnu[0], first = gnu[1], bloom = gnu[2];
  const uint32_t* bucket = gnu + 4 + bloom * (sizeof(ElfW(Addr)) / 4);
  const uint32_t* chain = bucket + buckets;
  uint32_t last = 0;
  for (uint32_t i = 0; i < buckets; ++i) last = std::max(last, bucket[i]);
  if (last < first) return first;
  while ((chain[last - first] & 1) == 0) ++last;
  return last + 1;
}

// Names beginning with "nccl" that the object defines and this version does not know.
std::string unknownNames(const TextQuery& query) {
  if (query.dynamic == nullptr) return {};
  const char* strings = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  const ElfW(Word)* sysv = nullptr;
  const uint32_t* gnu = nullptr;
  const auto pointer = [&](ElfW(Addr) value) {
    // glibc relocates the addresses in the dynamic section on x86-64; other loaders may not.
    return value < query.bias ? value + query.bias : value;
  };
  for (const ElfW(Dyn)* d = query.dynamic; d->d_tag != DT_NULL; ++d) {
    if (d->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(pointer(d->d_un.d_ptr));
    if (d->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(pointer(d->d_un.d_ptr));
    if (d->d_tag == DT_HASH) sysv = reinterpret_cast<const ElfW(Word)*>(pointer(d->d_un.d_ptr));
    if (d->d_tag == DT_GNU_HASH) gnu = reinterpret_cast<const uint32_t*>(pointer(d->d_un.d_ptr));
  }
  if (strings == nullptr || symbols == nullptr) return {};
  std::string out;
  const size_t count = symbolCount(sysv, gnu);
  for (size_t i = 0; i < count; ++i) {
    if (symbols[i].st_shndx == SHN_UNDEF || ELF64_ST_TYPE(symbols[i].st_info) != STT_FUNC) continue;
    const std::string_view name = strings + symbols[i].st_name;
    if (!name.starts_with("nccl") || knownNames().contains(name)) continue;
    if (!out.empty()) out += ' ';
    out += name;
  }
  return out;
}

}  // namespace

Result<RealNccl> resolveNccl(const std::string& path) {
  RealNccl real;
  void* handle = nullptr;
  if (!path.empty()) {
    handle = realDlopen()(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* why = dlerror();
      return Status(StatusCode::kUnavailable,
                    fmt::format("HALFWIRE_NCCL={} cannot be loaded: {}", path, why ? why : "?"));
    }
    real.path = path;
  }
  if (handle == nullptr) handle = handleOf(dlsym(RTLD_NEXT, "ncclAllReduce"), &real.path);
  if (handle == nullptr) {
    handle = realDlopen()("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
    real.path = "libnccl.so.2";
  }
  if (handle == nullptr) handle = handleDefining("pncclAllReduce", &real.path);
  if (handle == nullptr) {
    return Status(
        StatusCode::kUnavailable,
        "the real NCCL was not found in this process: set HALFWIRE_NCCL to the path of its libnccl.so.2");
  }

  const void* own = ownBase();
#define HALFWIRE_RESOLVE(ret, name, params, args)                          \
  if (void* found = dlsym(handle, #name); found && baseOf(found) != own) { \
    real.api.name = reinterpret_cast<ret(*) params>(found);                \
  }
  HALFWIRE_NCCL_FUNCTIONS(HALFWIRE_RESOLVE)
#undef HALFWIRE_RESOLVE
  if (real.api.ncclAllReduce == nullptr || real.api.ncclCommInitRank == nullptr ||
      real.api.ncclGetUniqueId == nullptr || real.api.ncclGroupStart == nullptr ||
      real.api.ncclGroupEnd == nullptr) {
    return Status(
        StatusCode::kUnavailable,
        fmt::format("{} lacks functions every NCCL has: set HALFWIRE_NCCL to the path of a libnccl.so.2",
                    real.path));
  }
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(real.api.ncclAllReduce), &info) != 0) {
    if (info.dli_fname != nullptr) real.path = info.dli_fname;
    TextQuery query{info.dli_fbase};
    dl_iterate_phdr(collectText, &query);
    if (query.end > query.begin && isNcclLibrary(real.path)) {
      real.text_begin = query.begin;
      real.text_end = query.end;
    }
    real.unknown_entry_points = unknownNames(query);
  }
  if (real.api.ncclGetVersion != nullptr) (void)real.api.ncclGetVersion(&real.version);
  if (void* sentinel = dlsym(handle, HALFWIRE_HOST_ENGINE_SYMBOL)) {
    const HalfwireHostEngine* engine = reinterpret_cast<HalfwireHostEngineFunction>(sentinel)();
    if (engine == nullptr || engine->version != 1 || engine->bytes < sizeof(HalfwireHostEngine)) {
      return Status(
          StatusCode::kUnavailable,
          fmt::format("{} is a host engine of another version: rebuild it together with libhalfwire.so",
                      real.path));
    }
    real.host_engine = engine;
  }
  return real;
}

const void* loadedNccl(const char* path) {
  if (path == nullptr || *path == '\0') {
    const void* next = baseOf(dlsym(RTLD_NEXT, "ncclAllReduce"));
    if (next != nullptr && next != ownBase()) return next;
    path = "libnccl.so.2";
  }
  void* handle = realDlopen()(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  const void* base = baseOf(dlsym(handle, "ncclAllReduce"));
  dlclose(handle);
  return base;
}

const void* ncclLibraryAt(const void* address, std::string* path) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return nullptr;
  if (info.dli_fbase == ownBase() || !isNcclLibrary(info.dli_fname)) return nullptr;
  *path = info.dli_fname;
  return info.dli_fbase;
}

}  // namespace halfwire
