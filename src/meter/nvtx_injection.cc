// libhalfwire-nvtx.so: what NVTX loads, by NVTX_INJECTION64_PATH, into a program under the meter. It tells
// the meter where the program's own ranges say that a step begins, and is otherwise as if nobody listened:
// every call returns what it returns without a tool, and domains stay null, so that libraries which ask
// whether a tool is there hear no. A library of its own, never preloaded: the name of its entry point is the
// one that every tool exports, and in front of all others it would be taken for theirs.
#include <dlfcn.h>
#include <nvtx3/nvToolsExt.h>
#include <string.h>

#include <cstdlib>
#include <string_view>

#include "meter/hooks.h"
#include "meter/nvtx_steps.h"

namespace {

using halfwire::meter::MeterHooks;
using halfwire::meter::StepRanges;

// A name and a number are shorter; longer texts are not looked at further.
constexpr size_t kMostText = 128;

// The preloaded meter's; null where there is none, as in a child without the preload.
const MeterHooks* hooks() {
  static const MeterHooks* const found = []() -> const MeterHooks* {
    const auto find =
        reinterpret_cast<halfwire::meter::MeterHooksFunction>(dlsym(RTLD_DEFAULT, HALFWIRE_METER_SYMBOL));
    const MeterHooks* h = find != nullptr ? find() : nullptr;
    return h != nullptr && h->version == 1 && h->bytes == sizeof(MeterHooks) ? h : nullptr;
  }();
  return found;
}

const StepRanges& ranges() {
  static const StepRanges made = [] {
    const char* wanted = std::getenv("HALFWIRE_METER_RANGE");
    return StepRanges(wanted != nullptr ? wanted : "");
  }();
  return made;
}

const char* nameOf(const char* text) {
  return text != nullptr ? ranges().nameOf(std::string_view(text, strnlen(text, kMostText))) : nullptr;
}

const char* nameOf(const wchar_t* text) {
  if (text == nullptr) return nullptr;
  char narrow[kMostText];
  size_t n = 0;
  for (; n < kMostText && text[n] != L'\0'; ++n) {
    if (text[n] < L' ' || text[n] > L'~') return nullptr;
    narrow[n] = static_cast<char>(text[n]);
  }
  return ranges().nameOf(std::string_view(narrow, n));
}

const char* nameOf(const nvtxEventAttributes_t* event) {
  if (event == nullptr || event->size < offsetof(nvtxEventAttributes_t, message) + sizeof(event->message))
    return nullptr;
  switch (event->messageType) {
    case NVTX_MESSAGE_TYPE_ASCII:
      return nameOf(event->message.ascii);
    case NVTX_MESSAGE_TYPE_UNICODE:
      return nameOf(event->message.unicode);
    case NVTX_MESSAGE_TYPE_REGISTERED:
      return ranges().nameOfHandle(event->message.registered);
    default:
      return nullptr;
  }
}

template <class Text>
void see(Text text) {
  if (const char* name = nameOf(text); name != nullptr) hooks()->range(name);
}

template <class Text>
int push(Text text) {
  see(text);
  return NVTX_NO_PUSH_POP_TRACKING;
}
template <class Text>
nvtxRangeId_t start(Text text) {
  see(text);
  return 0;
}
int pushInDomain(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) { return push(event); }
nvtxRangeId_t startInDomain(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) { return start(event); }

// A registered string that is a step's is its name's place; all others have the null that they have without a
// tool.
template <class Character>
nvtxStringHandle_t registerString(nvtxDomainHandle_t, const Character* text) {
  return reinterpret_cast<nvtxStringHandle_t>(const_cast<char*>(nameOf(text)));
}

struct Slot {
  unsigned id;
  NvtxFunctionPointer function;
};

template <class Function>
NvtxFunctionPointer plain(Function* function) {
  return reinterpret_cast<NvtxFunctionPointer>(function);
}

template <size_t N>
bool fill(const NvtxExportTableCallbacks& callbacks, NvtxCallbackModule module, const Slot (&slots)[N]) {
  NvtxFunctionTable functions = nullptr;
  unsigned size = 0;
  if (callbacks.GetModuleFunctionTable(module, &functions, &size) == 0 || functions == nullptr) return false;
  for (const Slot& s : slots) {
    if (s.id < size && functions[s.id] != nullptr) *functions[s.id] = s.function;
  }
  return true;
}

}  // namespace

// Once for each binary that has NVTX in it, by that binary. Zero: as without a tool.
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t table) {
  if (hooks() == nullptr || table == nullptr) return 0;
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(table(NVTX_ETID_CALLBACKS));
  if (callbacks == nullptr || callbacks->struct_size < sizeof(NvtxExportTableCallbacks)) return 0;
  const bool core = fill(*callbacks, NVTX_CB_MODULE_CORE,
                         {{NVTX_CBID_CORE_RangePushA, plain(push<const char*>)},
                          {NVTX_CBID_CORE_RangePushW, plain(push<const wchar_t*>)},
                          {NVTX_CBID_CORE_RangePushEx, plain(push<const nvtxEventAttributes_t*>)},
                          {NVTX_CBID_CORE_RangeStartA, plain(start<const char*>)},
                          {NVTX_CBID_CORE_RangeStartW, plain(start<const wchar_t*>)},
                          {NVTX_CBID_CORE_RangeStartEx, plain(start<const nvtxEventAttributes_t*>)}});
  const bool domains = fill(*callbacks, NVTX_CB_MODULE_CORE2,
                            {{NVTX_CBID_CORE2_DomainRangePushEx, plain(pushInDomain)},
                             {NVTX_CBID_CORE2_DomainRangeStartEx, plain(startInDomain)},
                             {NVTX_CBID_CORE2_DomainRegisterStringA, plain(registerString<char>)},
                             {NVTX_CBID_CORE2_DomainRegisterStringW, plain(registerString<wchar_t>)}});
  return core || domains ? 1 : 0;
}
