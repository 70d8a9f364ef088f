#include "device/nvlink.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <type_traits>

namespace halfwire::cuda {
namespace {

// From nvml.h; the layout and the names with _v2 and _v3 are what its ABI keeps.
using NvmlDevice = struct nvmlDevice_st*;
struct NvmlPciInfo {
  char bus_id_legacy[16];
  unsigned domain;
  unsigned bus;
  unsigned device;
  unsigned pci_device_id;
  unsigned pci_subsystem_id;
  char bus_id[32];
};
constexpr unsigned kMostLinks = 18;
constexpr unsigned kLinkEnabled = 1;
constexpr int kRemoteSwitch = 2;  // nvmlIntNvLinkDeviceType_t

struct Nvml {
  int (*init)();
  int (*shutdown)();
  int (*handle)(const char* bus_id, NvmlDevice* device);
  int (*link_state)(NvmlDevice device, unsigned link, unsigned* active);
  int (*remote_type)(NvmlDevice device, unsigned link, int* type);
  int (*remote_pci)(NvmlDevice device, unsigned link, NvmlPciInfo* pci);
};

// Closes the library when done with it; whoever else uses it has a reference of its own.
struct Library {
  void* handle = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  ~Library() {
    if (handle != nullptr) dlclose(handle);
  }
};

bool forbidden() {
  const char* disabled = std::getenv("NCCL_P2P_DISABLE");
  if (disabled != nullptr && std::strcmp(disabled, "0") != 0 && *disabled != '\0') return true;
  const char* level = std::getenv("NCCL_P2P_LEVEL");
  return level != nullptr && (std::strcmp(level, "LOC") == 0 || std::strcmp(level, "0") == 0);
}

// As NCCL tells hosts apart: by NCCL_HOSTID, else by name and boot.
std::string hostId() {
  if (const char* id = std::getenv("NCCL_HOSTID"); id != nullptr && *id != '\0') return id;
  char name[256] = {};
  (void)gethostname(name, sizeof name - 1);
  char boot[64] = {};
  if (std::FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re"); file != nullptr) {
    (void)!std::fread(boot, 1, sizeof boot - 1, file);
    std::fclose(file);
  }
  return std::string(name) + '/' + boot;
}

// The bus ids of this GPU and of those its links lead to, or "switch"; empty without active links.
std::set<std::string> joined(const Nvml& nvml, const char* bus_id) {
  NvmlDevice device = nullptr;
  if (nvml.handle(bus_id, &device) != 0) return {};
  std::set<std::string> ids;
  for (unsigned link = 0; link < kMostLinks; ++link) {
    unsigned active = 0;
    if (nvml.link_state(device, link, &active) != 0 || active != kLinkEnabled) continue;
    int type = 0;
    if (nvml.remote_type != nullptr && nvml.remote_type(device, link, &type) == 0 && type == kRemoteSwitch)
      return {"switch"};
    NvmlPciInfo pci{};
    if (nvml.remote_pci(device, link, &pci) != 0) continue;
    pci.bus_id[sizeof pci.bus_id - 1] = '\0';
    ids.insert(pci.bus_id);
  }
  if (ids.empty()) return {};
  // In the spelling that the remote ends have.
  unsigned domain = 0, bus = 0, slot = 0, function = 0;
  if (std::sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) return {};
  char own[32];
  std::snprintf(own, sizeof own, "%08X:%02X:%02X.%X", domain, bus, slot, function);
  ids.insert(own);
  return ids;
}

uint64_t hash(const std::string& text) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return h == 0 ? 1 : h;
}

}  // namespace

uint64_t nvlinkDomain(const Driver& driver, CUdevice device) {
  if (forbidden()) return 0;
  char bus_id[32] = {};
  if (driver.cuDeviceGetPCIBusId(bus_id, sizeof bus_id - 1, device) != kSuccess) return 0;
  const Library library;
  if (library.handle == nullptr) return 0;
  Nvml nvml{};
  const auto take = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library.handle, name));
    return function != nullptr;
  };
  if (!take(nvml.init, "nvmlInit_v2") || !take(nvml.shutdown, "nvmlShutdown") ||
      !take(nvml.handle, "nvmlDeviceGetHandleByPciBusId_v2") ||
      !take(nvml.link_state, "nvmlDeviceGetNvLinkState") ||
      !take(nvml.remote_pci, "nvmlDeviceGetNvLinkRemotePciInfo_v2"))
    return 0;
  (void)take(nvml.remote_type, "nvmlDeviceGetNvLinkRemoteDeviceType");  // since driver 465
  if (nvml.init() != 0) return 0;
  const std::set<std::string> ids = joined(nvml, bus_id);
  (void)nvml.shutdown();
  if (ids.empty()) return 0;
  std::string all = hostId();
  for (const std::string& id : ids) all += ' ' + id;
  return hash(all);
}

}  // namespace halfwire::cuda
