#include "fake_nccl/fake_nccl.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

namespace {

// Its address tells copies of this library apart.
char g_copy;

}  // namespace

struct ncclComm {
  const char* owner = &g_copy;
  int ranks = 1;
  int rank = 0;
  int device = 0;
};

namespace {

#define FAKE_TAG(ret, name, params, args) \
  struct name##_tag {};
HALFWIRE_NCCL_FUNCTIONS(FAKE_TAG)
#undef FAKE_TAG

enum Function {
#define FAKE_INDEX(ret, name, params, args) kIndex_##name,
  HALFWIRE_NCCL_FUNCTIONS(FAKE_INDEX)
#undef FAKE_INDEX
      kFunctions
};

const char* const kNames[] = {
#define FAKE_NAME(ret, name, params, args) #name,
    HALFWIRE_NCCL_FUNCTIONS(FAKE_NAME)
#undef FAKE_NAME
};

std::atomic<uint64_t> g_calls[kFunctions];
std::atomic<uint64_t> g_inner_calls[kFunctions];
std::atomic<uint64_t> g_foreign_comms;
std::atomic<uint64_t> g_ids;
std::atomic<int> g_fail_with{ncclSuccess};
std::atomic<bool> g_recording;
std::mutex g_record_mutex;
std::string g_record;

thread_local int t_inside = 0;
thread_local int t_group_depth = 0;
thread_local ncclResult_t t_group_error = ncclSuccess;

// Counts a call and marks the thread as inside the library while it lasts.
class Entry {
 public:
  explicit Entry(Function function) {
    (t_inside == 0 ? g_calls : g_inner_calls)[function].fetch_add(1, std::memory_order_relaxed);
    if (t_inside == 0 && g_recording.load(std::memory_order_relaxed)) record(kNames[function]);
    ++t_inside;
  }
  ~Entry() { --t_inside; }

  static void record(const std::string& text) {
    const std::lock_guard<std::mutex> lock(g_record_mutex);
    if (!g_record.empty() && text.front() != ':') g_record += ' ';
    g_record += text;
  }
};

ncclResult_t finish(ncclResult_t result) {
  if (result == ncclSuccess) return result;
  // The real library's warnings call these two through the PLT.
  int version = 0;
  ncclGetErrorString(result);
  ncclGetVersion(&version);
  if (t_group_depth > 0) t_group_error = result;
  return result;
}

ncclResult_t check(const ncclComm* comm) {
  if (comm == nullptr) return ncclInvalidArgument;
  if (comm->owner == &g_copy) return ncclSuccess;
  g_foreign_comms.fetch_add(1, std::memory_order_relaxed);
  return ncclInvalidArgument;
}

void recordCount(size_t count) {
  if (t_inside == 1 && g_recording.load(std::memory_order_relaxed))
    Entry::record(":" + std::to_string(count));
}

ncclResult_t dataCall(const ncclComm* comm, size_t count) {
  recordCount(count);
  if (const ncclResult_t bad = check(comm); bad != ncclSuccess) return finish(bad);
  return finish(static_cast<ncclResult_t>(g_fail_with.load(std::memory_order_relaxed)));
}

ncclResult_t makeComm(ncclComm_t* out, int ranks, int rank) {
  if (out == nullptr || ranks < 1 || rank < 0 || rank >= ranks) return finish(ncclInvalidArgument);
  *out = new ncclComm{&g_copy, ranks, rank, 0};
  return ncclSuccess;
}

// What a call answers. The template is for calls that do nothing and succeed.
template <class Tag, class... Arguments>
ncclResult_t answer(Tag, Arguments...) {
  return ncclSuccess;
}

ncclResult_t answer(ncclGetVersion_tag, int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t answer(ncclGetUniqueId_tag, ncclUniqueId* id) {
  if (id == nullptr) return finish(ncclInvalidArgument);
  memset(id, 0, sizeof *id);
  for (int i = 0; i < 16; ++i) id->internal[i] = static_cast<char>(i + 1);
  const uint64_t number = g_ids.fetch_add(1);
  memcpy(id->internal + 8, &number, sizeof number);
  return ncclSuccess;
}

ncclResult_t answer(ncclCommInitRank_tag, ncclComm_t* comm, int ranks, ncclUniqueId, int rank) {
  return makeComm(comm, ranks, rank);
}
ncclResult_t answer(ncclCommInitRankConfig_tag, ncclComm_t* comm, int ranks, ncclUniqueId, int rank,
                    ncclConfig_t*) {
  return makeComm(comm, ranks, rank);
}
ncclResult_t answer(ncclCommInitRankScalable_tag, ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId*,
                    ncclConfig_t*) {
  return makeComm(comm, ranks, rank);
}

ncclResult_t answer(ncclCommInitAll_tag, ncclComm_t* comms, int devices, const int* list) {
  if (comms == nullptr || devices < 1) return finish(ncclInvalidArgument);
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  for (int i = 0; i < devices; ++i) {
    makeComm(&comms[i], devices, i);
    comms[i]->device = list != nullptr ? list[i] : i;
  }
  return ncclSuccess;
}

ncclResult_t answer(ncclCommSplit_tag, ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  if (const ncclResult_t bad = check(comm); bad != ncclSuccess) return finish(bad);
  if (out == nullptr) return finish(ncclInvalidArgument);
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  return makeComm(out, comm->ranks, key >= 0 && key < comm->ranks ? key : comm->rank);
}

ncclResult_t answer(ncclCommShrink_tag, ncclComm_t comm, int*, int, ncclComm_t* out, ncclConfig_t*, int) {
  if (const ncclResult_t bad = check(comm); bad != ncclSuccess) return finish(bad);
  return makeComm(out, comm->ranks, comm->rank);
}

// The real library takes communicators apart in threads of its own, which call public functions.
ncclResult_t discard(ncclComm_t comm) {
  if (const ncclResult_t bad = check(comm); bad != ncclSuccess) return finish(bad);
  std::thread([comm] {
    ++t_inside;
    ncclResult_t error = ncclSuccess;
    ncclCommGetAsyncError(comm, &error);
    --t_inside;
  }).join();
  comm->owner = nullptr;
  delete comm;
  return ncclSuccess;
}
ncclResult_t answer(ncclCommDestroy_tag, ncclComm_t comm) { return discard(comm); }
ncclResult_t answer(ncclCommAbort_tag, ncclComm_t comm) { return discard(comm); }

ncclResult_t answer(ncclCommFinalize_tag, ncclComm_t comm) { return finish(check(comm)); }
ncclResult_t answer(ncclCommGetAsyncError_tag, ncclComm_t comm, ncclResult_t* error) {
  if (check(comm) != ncclSuccess || error == nullptr) return ncclInvalidArgument;
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t answer(ncclCommCount_tag, const ncclComm_t comm, int* count) {
  if (check(comm) != ncclSuccess || count == nullptr) return finish(ncclInvalidArgument);
  *count = comm->ranks;
  return ncclSuccess;
}
ncclResult_t answer(ncclCommUserRank_tag, const ncclComm_t comm, int* rank) {
  if (check(comm) != ncclSuccess || rank == nullptr) return finish(ncclInvalidArgument);
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t answer(ncclCommCuDevice_tag, const ncclComm_t comm, int* device) {
  if (check(comm) != ncclSuccess || device == nullptr) return finish(ncclInvalidArgument);
  *device = comm->device;
  return ncclSuccess;
}

const char* answer(ncclGetErrorString_tag, ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "fake error";
}
const char* answer(ncclGetLastError_tag, ncclComm_t) { return "last error of the fake"; }
void answer(ncclResetDebugInit_tag) {}

ncclResult_t answer(ncclCommRegister_tag, const ncclComm_t comm, void* buffer, size_t, void** handle) {
  if (handle != nullptr) *handle = buffer;
  return finish(check(comm));
}
ncclResult_t answer(ncclCommWindowRegister_tag, ncclComm_t comm, void* buffer, size_t bytes,
                    ncclWindow_t* window, int) {
  void* handle = nullptr;
  const ncclResult_t result = ncclCommRegister(comm, buffer, bytes, &handle);
  if (window != nullptr) *window = static_cast<ncclWindow_t>(handle);
  return result;
}
ncclResult_t answer(ncclCommWindowDeregister_tag, ncclComm_t comm, ncclWindow_t window) {
  return ncclCommDeregister(comm, window);
}

ncclResult_t answer(ncclRedOpCreatePreMulSum_tag, ncclRedOp_t* op, void*, ncclDataType_t,
                    ncclScalarResidence_t, ncclComm_t comm) {
  static std::atomic<int> next{ncclNumOps};
  if (op == nullptr) return finish(ncclInvalidArgument);
  *op = static_cast<ncclRedOp_t>(next.fetch_add(1));
  return finish(check(comm));
}

ncclResult_t answer(ncclReduce_tag, const void*, void*, size_t count, ncclDataType_t, ncclRedOp_t, int,
                    ncclComm_t comm, cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclBcast_tag, void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                    cudaStream_t stream) {
  recordCount(count);
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t answer(ncclBroadcast_tag, const void*, void*, size_t count, ncclDataType_t, int, ncclComm_t comm,
                    cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclAllReduce_tag, const void*, void*, size_t count, ncclDataType_t, ncclRedOp_t,
                    ncclComm_t comm, cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclReduceScatter_tag, const void*, void*, size_t count, ncclDataType_t, ncclRedOp_t,
                    ncclComm_t comm, cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclAllGather_tag, const void*, void*, size_t count, ncclDataType_t, ncclComm_t comm,
                    cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclAlltoAll_tag, const void*, void*, size_t count, ncclDataType_t, ncclComm_t comm,
                    cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclGather_tag, const void*, void*, size_t count, ncclDataType_t, int, ncclComm_t comm,
                    cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclScatter_tag, const void*, void*, size_t count, ncclDataType_t, int, ncclComm_t comm,
                    cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclSend_tag, const void*, size_t count, ncclDataType_t, int, ncclComm_t comm,
                    cudaStream_t) {
  return dataCall(comm, count);
}
ncclResult_t answer(ncclRecv_tag, void*, size_t count, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return dataCall(comm, count);
}

ncclResult_t answer(ncclGroupStart_tag) {
  ++t_group_depth;
  return ncclSuccess;
}
ncclResult_t endGroup() {
  if (t_group_depth == 0) return finish(ncclInvalidUsage);
  if (--t_group_depth > 0) return ncclSuccess;
  const ncclResult_t result = t_group_error;
  t_group_error = ncclSuccess;
  return result;
}
ncclResult_t answer(ncclGroupEnd_tag) { return endGroup(); }
ncclResult_t answer(ncclGroupSimulateEnd_tag, ncclSimInfo_t* info) {
  if (info != nullptr) info->estimatedTime = 1.5f;
  return endGroup();
}

uint64_t find(const std::atomic<uint64_t>* counters, const char* name) {
  for (int i = 0; i < kFunctions; ++i) {
    if (strcmp(kNames[i], name) == 0) return counters[i].load();
  }
  return 0;
}

}  // namespace

extern "C" {

#define FAKE_UNWRAP(...) __VA_OPT__(, ) __VA_ARGS__
#define FAKE_DEFINE(ret, name, params, args)       \
  ret p##name params {                             \
    const Entry entry(kIndex_##name);              \
    return answer(name##_tag {} FAKE_UNWRAP args); \
  }                                                \
  ret name params __attribute__((weak, alias("p" #name)));
HALFWIRE_NCCL_FUNCTIONS(FAKE_DEFINE)
#undef FAKE_DEFINE

uint64_t fake_nccl_calls(const char* name) { return find(g_calls, name); }
uint64_t fake_nccl_inner_calls(const char* name) { return find(g_inner_calls, name); }
uint64_t fake_nccl_foreign_comms(void) { return g_foreign_comms.load(); }
int fake_nccl_group_depth(void) { return t_group_depth; }
void fake_nccl_record(void) { g_recording = true; }
void fake_nccl_fail_with(ncclResult_t result) { g_fail_with = result; }

size_t fake_nccl_recorded(char* buffer, size_t bytes) {
  const std::lock_guard<std::mutex> lock(g_record_mutex);
  const size_t n = g_record.size() < bytes ? g_record.size() : bytes - 1;
  memcpy(buffer, g_record.data(), n);
  buffer[n] = '\0';
  return n;
}
}
