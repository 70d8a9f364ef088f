// NCCL's names. Argument checks are NCCL's: a null or foreign communicator, a bad type, operator, root or
// buffer is ncclInvalidArgument. Each public function is a thin layer that lets no exception out.
#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "abi/host_engine.h"
#include "abi/nccl.h"
#include "abi/nccl_types.h"
#include "hostccl/api.h"
#include "hostccl/communicator.h"
#include "hostccl/group.h"
#include "hostrt/hostrt.h"

// What a program holds. Only its address is used; the state is shared with work that still runs.
struct ncclComm {
  std::shared_ptr<halfwire::hostccl::Communicator> communicator;
};

namespace halfwire::hostccl {
namespace {

std::string& lastError() {
  thread_local std::string text;
  return text;
}

// The communicators that exist, so that a stale or foreign pointer is an error instead of a crash.
struct Registry {
  std::mutex mutex;
  std::map<const ncclComm*, std::unique_ptr<ncclComm>> alive;
};
Registry& registry() {
  static auto* registry = new Registry;
  return *registry;
}

std::shared_ptr<Communicator> find(const ncclComm* comm) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().alive.find(comm);
  return found == registry().alive.end() ? nullptr : found->second->communicator;
}

ncclComm* makeHandle(std::shared_ptr<Communicator> communicator) {
  auto handle = std::make_unique<ncclComm>();
  handle->communicator = std::move(communicator);
  ncclComm* const raw = handle.get();
  std::lock_guard lock(registry().mutex);
  registry().alive.emplace(raw, std::move(handle));
  return raw;
}

std::shared_ptr<Communicator> dropHandle(ncclComm* handle) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().alive.find(handle);
  if (found == registry().alive.end()) return nullptr;
  std::shared_ptr<Communicator> communicator = std::move(found->second->communicator);
  registry().alive.erase(found);
  return communicator;
}

// A watchdog may read the program's pointer meanwhile.
void store(ncclComm_t* out, ncclComm_t value) { std::atomic_ref(*out).store(value); }

ncclResult_t report(const Outcome& outcome) {
  if (!outcome.ok() && outcome.code != ncclInProgress) lastError() = outcome.text;
  return outcome.code;
}

template <class Body>
ncclResult_t guarded(Body body) {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report({ncclSystemError, "out of memory"});
  } catch (const std::exception& e) {
    return report({ncclInternalError, e.what()});
  } catch (...) {
    return report({ncclInternalError, "an unknown exception"});
  }
}

// Runs `body`, which adds to the thread's group, inside a group.
template <class Body>
ncclResult_t grouped(Body body) {
  return guarded([&]() -> Outcome {
    Group& group = Group::ofThread();
    group.start();
    Outcome outcome;
    try {
      outcome = group.note(body(group));
    } catch (...) {
      (void)group.note({ncclSystemError, "out of memory"});
      (void)group.end();
      throw;
    }
    Outcome end = group.end();
    return outcome.ok() ? end : outcome;
  });
}

Outcome invalid(const char* function, const std::string& what) {
  return {ncclInvalidArgument, std::string(function) + ": " + what};
}

Outcome findComm(const char* function, const ncclComm* comm, std::shared_ptr<Communicator>* out) {
  if (comm == nullptr) return invalid(function, "the communicator is NULL");
  *out = find(comm);
  if (*out == nullptr) {
    return invalid(function, "this is no communicator of the host engine, or it was destroyed");
  }
  return {};
}

// A communicator whose last call is over.
Outcome readyComm(const char* function, const ncclComm* comm, std::shared_ptr<Communicator>* out) {
  if (Outcome o = findComm(function, comm, out); !o.ok()) return o;
  const Outcome state = (*out)->asyncError();
  if (!state.ok() && state.code != ncclInProgress && !(*out)->connected()) return state;
  if ((*out)->connected() && state.code != ncclInProgress) return {};
  return invalid(function,
                 "the communicator is still being made or its last call is in progress: ask "
                 "ncclCommGetAsyncError until it is done");
}

// A communicator that takes work.
Outcome usableComm(const char* function, const ncclComm* comm, std::shared_ptr<Communicator>* out) {
  if (Outcome o = readyComm(function, comm, out); !o.ok()) return o;
  if ((*out)->finalized()) {
    return invalid(function, "the communicator was finalized or aborted");
  }
  return (*out)->asyncError();
}

Outcome checkConfig(const char* function, const ncclConfig_t* config) {
  if (config == nullptr) return {};
  // Fields beyond the caller's size do not exist.
  if (config->size < offsetof(ncclConfig_t, cgaClusterSize) || config->magic != 0xcafebeef) {
    return invalid(function, "the ncclConfig_t was not set up with NCCL_CONFIG_INITIALIZER");
  }
  const int blocking = config->blocking;
  if (blocking != NCCL_CONFIG_UNDEF_INT && blocking != 0 && blocking != 1) {
    return invalid(function, "config.blocking must be 0 or 1");
  }
  return {};
}

// `inherited` is for a child made without a configuration. NCCL_COMM_BLOCKING overrides the program, as in
// NCCL.
bool isBlocking(const ncclConfig_t* config, bool inherited) {
  const char* forced = std::getenv("NCCL_COMM_BLOCKING");
  if (forced != nullptr && (std::strcmp(forced, "0") == 0 || std::strcmp(forced, "1") == 0))
    return *forced == '1';
  return config != nullptr ? config->blocking != 0 : inherited;
}

int currentDevice() {
  int device = 0;
  halfwire_hostrt_engine()->getDevice(&device);
  return device;
}

Outcome initRank(const char* function, ncclComm_t* comm, int nranks, const ncclUniqueId& id, int rank,
                 int device, bool blocking, Group& group) {
  if (comm == nullptr) return invalid(function, "the pointer for the communicator is NULL");
  store(comm, nullptr);
  if (nranks < 1 || nranks > kMaxRanks) {
    return invalid(function, "nranks is " + std::to_string(nranks) + ", the host engine takes 1 to " +
                                 std::to_string(kMaxRanks));
  }
  if (rank < 0 || rank >= nranks) {
    return invalid(function,
                   "rank " + std::to_string(rank) + " is not in 0 to " + std::to_string(nranks - 1));
  }
  const std::optional<Identity> identity = Identity::decode(id);
  if (!identity) {
    return invalid(function,
                   "the unique id was not made by the host engine's ncclGetUniqueId (all ranks must use the "
                   "same library)");
  }
  auto communicator = std::make_shared<Communicator>(rank, nranks, device, blocking);
  ncclComm* const handle = makeHandle(communicator);
  store(comm, handle);
  group.add(communicator, [=, identity = *identity]() -> Outcome {
    Outcome outcome = communicator->connect(identity);
    // Who did not wait still has to be told, and aborts it then.
    if (!outcome.ok() && blocking) {
      dropHandle(handle);
      store(comm, nullptr);
    }
    return outcome;
  });
  return {};
}

Outcome checkBuffers(const char* function, size_t count, size_t width, const void* send, const void* receive,
                     bool needs_send, bool needs_receive) {
  if (width == 0) return invalid(function, "the data type is not one of NCCL 2.28");
  if (count > static_cast<size_t>(PTRDIFF_MAX) / (width * kMaxRanks)) {
    return invalid(function, "the count is too large");
  }
  if (count == 0) return {};
  if (needs_send && send == nullptr) return invalid(function, "the send buffer is NULL");
  if (needs_receive && receive == nullptr) return invalid(function, "the receive buffer is NULL");
  return {};
}

ncclResult_t collective(const char* function, ncclComm_t comm, cudaStream_t stream, CollectiveCall call,
                        const ncclRedOp_t* op) {
  return grouped([&](Group& group) -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = usableComm(function, comm, &communicator); !o.ok()) return o;
    const bool rooted = call.kind == Collective::kBroadcast || call.kind == Collective::kReduce;
    if (rooted && (call.root < 0 || call.root >= communicator->size())) {
      return invalid(function, "root " + std::to_string(call.root) + " is not a rank of the communicator");
    }
    const bool at_root = !rooted || call.root == communicator->rank();
    if (Outcome o = checkBuffers(function, call.count, ncclTypeBytes(call.type), call.send, call.receive,
                                 call.kind != Collective::kBroadcast || at_root,
                                 call.kind != Collective::kReduce || at_root);
        !o.ok()) {
      return o;
    }
    if (op != nullptr) {
      if (!canReduce(call.type)) return invalid(function, "FP8 cannot be reduced, as on GPUs before sm_90");
      if (Outcome o = communicator->findOperator(*op, call.type, &call.reduction); !o.ok()) return o;
    }
    if (call.count > 0) group.add(communicator, call, stream);
    return {};
  });
}

ncclResult_t pointToPoint(const char* function, ncclComm_t comm, cudaStream_t stream, bool sends, void* data,
                          size_t count, ncclDataType_t type, int peer) {
  return grouped([&](Group& group) -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = usableComm(function, comm, &communicator); !o.ok()) return o;
    if (peer < 0 || peer >= communicator->size()) {
      return invalid(function, "peer " + std::to_string(peer) + " is not a rank of the communicator");
    }
    const size_t width = ncclTypeBytes(type);
    if (Outcome o = checkBuffers(function, count, width, data, data, sends, !sends); !o.ok()) return o;
    group.add(communicator, PointToPoint{sends, data, count * width, peer}, stream);
    return {};
  });
}

Outcome finalizeBehind(const std::shared_ptr<Communicator>& communicator) {
  communicator->begin();
  try {
    std::thread([communicator] {
      communicator->finalize();
      communicator->finish({});
    }).detach();
  } catch (const std::system_error&) {
    communicator->finish({});
    return {ncclSystemError, "cannot start a thread: raise the limit of threads"};
  }
  return {ncclInProgress, ""};
}

// What NCCL makes of sends and receives: a group runs them with these, behind its collectives, and they match
// in order with the program's own between the same two ranks.
enum class Exchange { kAlltoAll, kGather, kScatter };

ncclResult_t exchange(const char* function, Exchange kind, const void* send, void* receive, size_t count,
                      ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return grouped([&](Group& group) -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = usableComm(function, comm, &communicator); !o.ok()) return o;
    const int ranks = communicator->size();
    if (kind != Exchange::kAlltoAll && (root < 0 || root >= ranks)) {
      return invalid(function, "root " + std::to_string(root) + " is not a rank of the communicator");
    }
    const bool at_root = root == communicator->rank();
    const bool sends_parts = kind == Exchange::kAlltoAll || (kind == Exchange::kScatter && at_root);
    const bool takes_parts = kind == Exchange::kAlltoAll || (kind == Exchange::kGather && at_root);
    const size_t width = ncclTypeBytes(type);
    if (Outcome o =
            checkBuffers(function, count, width, send, receive, sends_parts || kind == Exchange::kGather,
                         takes_parts || kind == Exchange::kScatter);
        !o.ok()) {
      return o;
    }
    if (count == 0) return {};
    const size_t bytes = count * width;
    auto* const from = static_cast<char*>(const_cast<void*>(send));
    auto* const to = static_cast<char*>(receive);
    for (int p = 0; p < ranks; ++p) {
      const size_t at = static_cast<size_t>(p) * bytes;
      if (sends_parts) group.add(communicator, PointToPoint{true, from + at, bytes, p}, stream);
      if (takes_parts) group.add(communicator, PointToPoint{false, to + at, bytes, p}, stream);
    }
    if (kind == Exchange::kGather) group.add(communicator, PointToPoint{true, from, bytes, root}, stream);
    if (kind == Exchange::kScatter) group.add(communicator, PointToPoint{false, to, bytes, root}, stream);
    return {};
  });
}

}  // namespace

ncclResult_t refuse(const char* function) {
  return report({ncclInvalidUsage, std::string(function) + " is not implemented by the host engine"});
}

}  // namespace halfwire::hostccl

using namespace halfwire::hostccl;
using halfwire::ncclTypeBytes;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  return guarded([&]() -> Outcome {
    if (version == nullptr) return invalid("ncclGetVersion", "the pointer is NULL");
    *version = NCCL_VERSION_CODE;
    return {};
  });
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded([&]() -> Outcome {
    if (id == nullptr) return invalid("ncclGetUniqueId", "the pointer is NULL");
    Service* service = nullptr;
    if (Outcome o = Service::get(&service); !o.ok()) return o;
    Identity identity;
    if (Outcome o = service->makeIdentity(&identity); !o.ok()) return o;
    *id = identity.encode();
    return {};
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return grouped([&](Group& group) -> Outcome {
    if (Outcome o = checkConfig("ncclCommInitRankConfig", config); !o.ok()) return o;
    return initRank("ncclCommInitRankConfig", comm, nranks, id, rank, currentDevice(),
                    isBlocking(config, true), group);
  });
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int ids, ncclUniqueId* id,
                                      ncclConfig_t* config) {
  return grouped([&](Group& group) -> Outcome {
    if (Outcome o = checkConfig("ncclCommInitRankScalable", config); !o.ok()) return o;
    if (id == nullptr || ids < 1 || ids > nranks)
      return invalid("ncclCommInitRankScalable", "there must be from one id to one for each rank");
    // Several ids spread the load of meeting over several roots; here one is enough for all.
    return initRank("ncclCommInitRankScalable", comm, nranks, id[0], rank, currentDevice(),
                    isBlocking(config, true), group);
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return grouped([&](Group& group) {
    return initRank("ncclCommInitRank", comm, nranks, id, rank, currentDevice(), isBlocking(nullptr, true),
                    group);
  });
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ndev, const int* devices) {
  ncclUniqueId id;
  return grouped([&](Group& group) -> Outcome {
    if (comms == nullptr || ndev < 1) return invalid("ncclCommInitAll", "no communicators are asked for");
    // As NCCL does, through the public name: wrappers of it must cope with being called from inside.
    if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess) return {result, lastError()};
    for (int i = 0; i < ndev; ++i) {
      const int device = devices != nullptr ? devices[i] : i;
      if (Outcome o = initRank("ncclCommInitAll", &comms[i], ndev, id, i, device, true, group); !o.ok())
        return o;
    }
    return {};
  });
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  return grouped([&](Group& group) -> Outcome {
    std::shared_ptr<Communicator> parent;
    if (Outcome o = usableComm("ncclCommSplit", comm, &parent); !o.ok()) return o;
    if (Outcome o = checkConfig("ncclCommSplit", config); !o.ok()) return o;
    if (newcomm == nullptr) return invalid("ncclCommSplit", "the pointer for the communicator is NULL");
    if (color < NCCL_SPLIT_NOCOLOR)
      return invalid("ncclCommSplit", "color must be NCCL_SPLIT_NOCOLOR or at least 0");
    store(newcomm, nullptr);
    // A non-blocking parent's child is there when the parent is no longer in progress.
    group.add(parent, [=, blocking = isBlocking(config, parent->blocking())]() -> Outcome {
      std::shared_ptr<Communicator> child;
      if (Outcome o = parent->split(color, key, blocking, &child); !o.ok()) return o;
      if (child) store(newcomm, makeHandle(std::move(child)));
      return {};
    });
    return {};
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return guarded([&]() -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = readyComm("ncclCommFinalize", comm, &communicator); !o.ok()) return o;
    if (communicator->finalized())
      return invalid("ncclCommFinalize", "the communicator was finalized before");
    if (!communicator->blocking()) return finalizeBehind(communicator);
    communicator->finalize();
    return {};
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return guarded([&]() -> Outcome {
    if (comm == nullptr) return {};
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = readyComm("ncclCommDestroy", comm, &communicator); !o.ok()) return o;
    dropHandle(comm);
    communicator->finalize();
    return {};
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return guarded([&]() -> Outcome {
    if (comm == nullptr) return {};
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = findComm("ncclCommAbort", comm, &communicator); !o.ok()) return o;
    dropHandle(comm);
    communicator->abort();
    return {};
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return guarded([&]() -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = findComm("ncclCommGetAsyncError", comm, &communicator); !o.ok()) return o;
    if (error == nullptr) return invalid("ncclCommGetAsyncError", "the pointer is NULL");
    const Outcome outcome = communicator->asyncError();
    if (!outcome.ok() && outcome.code != ncclInProgress) lastError() = outcome.text;
    *error = outcome.code;
    return {};
  });
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return guarded([&]() -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = readyComm("ncclCommCount", comm, &communicator); !o.ok()) return o;
    if (count == nullptr) return invalid("ncclCommCount", "the pointer is NULL");
    *count = communicator->size();
    return {};
  });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return guarded([&]() -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = readyComm("ncclCommCuDevice", comm, &communicator); !o.ok()) return o;
    if (device == nullptr) return invalid("ncclCommCuDevice", "the pointer is NULL");
    *device = communicator->device();
    return {};
  });
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return guarded([&]() -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = readyComm("ncclCommUserRank", comm, &communicator); !o.ok()) return o;
    if (rank == nullptr) return invalid("ncclCommUserRank", "the pointer is NULL");
    *rank = communicator->rank();
    return {};
  });
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t comm) {
  try {
    // Why the communicator failed, if it did; otherwise the thread's last error.
    const std::shared_ptr<Communicator> communicator = comm != nullptr ? find(comm) : nullptr;
    const Outcome failure = communicator ? communicator->asyncError() : Outcome{};
    if (!failure.ok() && failure.code != ncclInProgress) lastError() = failure.text;
  } catch (...) {
  }
  return lastError().c_str();
}

ncclResult_t ncclGroupStart() {
  Group::ofThread().start();
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  return guarded([] { return Group::ofThread().end(); });
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  return guarded([&]() -> Outcome {
    constexpr const char* kName = "ncclRedOpCreatePreMulSum";
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = usableComm(kName, comm, &communicator); !o.ok()) return o;
    if (op == nullptr || scalar == nullptr) return invalid(kName, "a pointer is NULL");
    if (!canReduce(type)) return invalid(kName, "the host engine reduces no values of this type");
    Reduction reduction;
    reduction.op = Operator::kPreMulSum;
    if (residence == ncclScalarHostImmediate) {
      std::memcpy(&reduction.factor, scalar, ncclTypeBytes(type));
    } else if (residence == ncclScalarDevice) {
      reduction.device_factor = scalar;
    } else {
      return invalid(kName, "the residence is neither device nor host");
    }
    return communicator->createOperator(reduction, type, op);
  });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return guarded([&]() -> Outcome {
    std::shared_ptr<Communicator> communicator;
    if (Outcome o = findComm("ncclRedOpDestroy", comm, &communicator); !o.ok()) return o;
    return communicator->destroyOperator(op);
  });
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclAllReduce", comm, stream, {Collective::kAllReduce, send, receive, count, type}, &op);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclReduceScatter", comm, stream,
                    {Collective::kReduceScatter, send, receive, count, type}, &op);
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclAllGather", comm, stream, {Collective::kAllGather, send, receive, count, type},
                    nullptr);
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  return exchange("ncclAlltoAll", Exchange::kAlltoAll, send, receive, count, type, 0, comm, stream);
}

ncclResult_t ncclGather(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return exchange("ncclGather", Exchange::kGather, send, receive, count, type, root, comm, stream);
}

ncclResult_t ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  return exchange("ncclScatter", Exchange::kScatter, send, receive, count, type, root, comm, stream);
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclReduce", comm, stream, {Collective::kReduce, send, receive, count, type, {}, root},
                    &op);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclBroadcast", comm, stream,
                    {Collective::kBroadcast, send, receive, count, type, {}, root}, nullptr);
}

// As NCCL does, through the public name.
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return pointToPoint("ncclSend", comm, stream, true, const_cast<void*>(data), count, type, peer);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return pointToPoint("ncclRecv", comm, stream, false, data, count, type, peer);
}

ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return guarded([&]() -> Outcome {
    if (pointer == nullptr) return invalid("ncclMemAlloc", "the pointer is NULL");
    const cudaError_t error = halfwire_hostrt_engine()->malloc(pointer, size);
    if (error == cudaSuccess) return {};
    return {ncclUnhandledCudaError, std::string("ncclMemAlloc: ") + cudaGetErrorString(error)};
  });
}

ncclResult_t ncclMemFree(void* pointer) {
  return guarded([&]() -> Outcome {
    const cudaError_t error = halfwire_hostrt_engine()->free(pointer);
    if (error == cudaSuccess) return {};
    return {ncclUnhandledCudaError, std::string("ncclMemFree: ") + cudaGetErrorString(error)};
  });
}

// Ends the group in NCCL too; here without an estimate.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  Group::ofThread().discard();
  return refuse("ncclGroupSimulateEnd");
}

const HalfwireHostEngine* halfwire_host_engine_v1(void) { return halfwire_hostrt_engine(); }

uint64_t halfwire_host_egress_bytes(void) { return egressBytes(); }

// The twins, which wrappers of NCCL call: the same code under a name that nobody interposes.
#define HALFWIRE_TWIN(name) __attribute__((alias(#name))) decltype(name) p##name;
HALFWIRE_TWIN(ncclMemAlloc)
HALFWIRE_TWIN(ncclMemFree)
HALFWIRE_TWIN(ncclGetVersion)
HALFWIRE_TWIN(ncclGetUniqueId)
HALFWIRE_TWIN(ncclCommInitRankConfig)
HALFWIRE_TWIN(ncclCommInitRank)
HALFWIRE_TWIN(ncclCommInitRankScalable)
HALFWIRE_TWIN(ncclCommInitAll)
HALFWIRE_TWIN(ncclCommFinalize)
HALFWIRE_TWIN(ncclCommDestroy)
HALFWIRE_TWIN(ncclCommAbort)
HALFWIRE_TWIN(ncclCommSplit)
HALFWIRE_TWIN(ncclGetErrorString)
HALFWIRE_TWIN(ncclGetLastError)
HALFWIRE_TWIN(ncclCommGetAsyncError)
HALFWIRE_TWIN(ncclCommCount)
HALFWIRE_TWIN(ncclCommCuDevice)
HALFWIRE_TWIN(ncclCommUserRank)
HALFWIRE_TWIN(ncclRedOpCreatePreMulSum)
HALFWIRE_TWIN(ncclRedOpDestroy)
HALFWIRE_TWIN(ncclReduce)
HALFWIRE_TWIN(ncclBcast)
HALFWIRE_TWIN(ncclBroadcast)
HALFWIRE_TWIN(ncclAllReduce)
HALFWIRE_TWIN(ncclReduceScatter)
HALFWIRE_TWIN(ncclAllGather)
HALFWIRE_TWIN(ncclAlltoAll)
HALFWIRE_TWIN(ncclGather)
HALFWIRE_TWIN(ncclScatter)
HALFWIRE_TWIN(ncclSend)
HALFWIRE_TWIN(ncclRecv)
HALFWIRE_TWIN(ncclGroupStart)
HALFWIRE_TWIN(ncclGroupEnd)
HALFWIRE_TWIN(ncclGroupSimulateEnd)
#undef HALFWIRE_TWIN

}  // extern "C"
