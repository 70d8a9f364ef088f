// A tool for NVTX as a profiler is one, loaded through NVTX_INJECTION64_PATH: writes the ranges of the domain
// "halfwire" to the file that NVTX_TOOL_OUT names, a line each, indented by how deep they are.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

std::FILE* out() {
  static std::FILE* const file = [] {
    const char* path = std::getenv("NVTX_TOOL_OUT");
    const char* rank = std::getenv("RANK");
    const std::string name =
        std::string(path != nullptr ? path : "/dev/null") + (rank != nullptr ? rank : "");
    return std::fopen(name.c_str(), "w");
  }();
  return file;
}

thread_local int depth = 0;

nvtxDomainHandle_t domainCreate(const char* name) {
  return reinterpret_cast<nvtxDomainHandle_t>(
      static_cast<uintptr_t>(std::strcmp(name, "halfwire") == 0 ? 1 : 2));
}

int rangePush(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  if (reinterpret_cast<uintptr_t>(domain) == 1) {
    std::fprintf(out(), "%d %s\n", depth, event->message.ascii);
    std::fflush(out());
  }
  return depth++;
}

int rangePop(nvtxDomainHandle_t) { return --depth; }

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size) == 0)
    return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(domainCreate);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(rangePush);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(rangePop);
  return 1;
}
