// The functions of NCCL that libhalfwire.so defines in front of the real library. Each finds the real
// function, lets NCCL's calls to itself through untouched, and hands the rest on.
#include <chrono>
#include <cstring>
#include <thread>

#include "halfwire/halfwire.h"
#include "interpose/create.h"
#include "interpose/group.h"
#include "interpose/registry.h"
#include "wire/convert.h"

// Exceptions end here: a failure of ours must not unwind through the program's C frames.
#define HALFWIRE_GUARDED(...) \
  try __VA_ARGS__ catch (const std::exception& e) { return halfwire::refuse(ncclInternalError, e.what()); }

#define HALFWIRE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace halfwire;

// The real library, or null after noting why.
const RealNccl* realOrRefuse() {
  Status status;
  const RealNccl* real = Registry::get().real(&status);
  if (real == nullptr) (void)refuse(ncclSystemError, status.message());
  return real;
}

// Whether this call comes from NCCL itself: from inside a call of ours, or from one of its own threads.
bool fromNccl(const RealNccl& real, const void* caller) {
  return threadState().inside_real > 0 || real.contains(caller);
}

// The settings are valid, or the refusal that names the variable.
ncclResult_t checkSettings() {
  const auto& settings = Registry::get().settings();
  return settings.ok() ? ncclSuccess : refuse(ncclInvalidUsage, settings.status().message());
}

// Passes NCCL's own failures on, so that its error text is asked for and not an old one of ours.
ncclResult_t theirs(ncclResult_t result) {
  if (result != ncclSuccess && result != ncclInProgress) threadState().last_error = nullptr;
  return result;
}

ncclResult_t data(const QueuedCall& call, const void* caller) {
  HALFWIRE_GUARDED({
    const RealNccl* real = realOrRefuse();
    if (real == nullptr) return ncclSystemError;
    if (fromNccl(*real, caller)) return issue(real->api, call);
    if (Communicator* c = Registry::get().find(call.comm)) return dataCall(*c, call);
    // Nobody we know made the communicator: perhaps another copy of NCCL, calling itself.
    if (const RealNccl* other = Registry::get().otherCopy(caller)) return issue(other->api, call);
    const InsideReal inside;
    return issue(real->api, call);
  })
}

// Runs NCCL's initialisation, then meets the peers: at once, or when the outermost group ends.
template <class Init>
ncclResult_t create(NewCommunicator&& communicator, Init&& init) {
  ncclResult_t result;
  {
    const InsideReal inside;
    result = init();
  }
  if (result != ncclSuccess && result != ncclInProgress) {
    // A peer with the same objection may have given up already; then NCCL's error names the wrong rank.
    const Status status = objection(communicator);
    return status.ok() ? theirs(result) : refuse(ncclInvalidUsage, status.message());
  }
  if (threadState().group_depth > 0) {
    threadQueue().inits.push_back(std::move(communicator));
    return result;
  }
  std::vector<NewCommunicator> one;
  one.push_back(std::move(communicator));
  const ncclResult_t met = finishCommunicators(one, result);
  return met != ncclSuccess ? met : result;
}

float scalarValue(const void* scalar, ncclDataType_t type) {
  uint16_t half = 0;
  float value = 0;
  switch (type) {
    case ncclFloat32:
      std::memcpy(&value, scalar, sizeof value);
      return value;
    case ncclBfloat16:
      std::memcpy(&half, scalar, sizeof half);
      return bf16ToFloat(half);
    case ncclFloat16:
      std::memcpy(&half, scalar, sizeof half);
      return fp16ToFloat(half);
    default:
      return 0;
  }
}

}  // namespace

HALFWIRE_EXPORT const char* halfwire_version(void) { return HALFWIRE_VERSION; }

HALFWIRE_EXPORT const char* halfwire_last_error(void) {
  const char* error = halfwire::threadState().last_error;
  return error != nullptr ? error : "";
}

HALFWIRE_EXPORT int halfwire_set_allocator(void* (*allocate)(size_t, int, void*),
                                           void (*release)(void*, size_t, int, void*),
                                           void* context){HALFWIRE_GUARDED({
  if ((allocate == nullptr) != (release == nullptr))
    return refuse(ncclInvalidArgument, "halfwire_set_allocator takes both functions, or neither");
  if (!Registry::get().setAllocator({allocate, release, context}))
    return refuse(ncclInvalidUsage,
                  "halfwire_set_allocator comes before the first communicator, whose scratch it is to give");
  return ncclSuccess;
})}

HALFWIRE_EXPORT void halfwire_step(void) {
  if (const halfwire::meter::MeterHooks* meter = halfwire::Registry::get().meter()) meter->step();
}

HALFWIRE_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  const bool self = fromNccl(*real, __builtin_return_address(0));
  if (!self) {
    if (const RealNccl* other = Registry::get().otherCopy(__builtin_return_address(0))) {
      return other->api.ncclGetUniqueId(uniqueId);
    }
    if (const ncclResult_t bad = checkSettings(); bad != ncclSuccess) return bad;
  }
  ncclResult_t result;
  {
    const InsideReal inside;
    result = real->api.ncclGetUniqueId(uniqueId);
  }
  if (self || result != ncclSuccess || std::getenv("NCCL_COMM_ID") != nullptr)
    return self ? result : theirs(result);
  auto mark = Registry::get().invite();
  if (!mark.ok()) return refuse(ncclSystemError, mark.status().message());
  if (const Status written = writeMark(mark.value(), uniqueId); !written.ok() && mark.value().port != 0) {
    return refuse(ncclSystemError, written.message());
  }
  return ncclSuccess;
})}

HALFWIRE_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId,
                                                    int rank, ncclConfig_t* config){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  const auto init = [&] { return real->api.ncclCommInitRankConfig(comm, nranks, commId, rank, config); };
  if (real->api.ncclCommInitRankConfig == nullptr) return ncclInvalidUsage;
  if (fromNccl(*real, __builtin_return_address(0)) || comm == nullptr || nranks < 1 || rank < 0 ||
      rank >= nranks)
    return init();
  if (const ncclResult_t bad = checkSettings(); bad != ncclSuccess) return bad;
  return create(startCommunicator(*real, comm, nranks, rank, commId, config), init);
})}

HALFWIRE_EXPORT ncclResult_t
    ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank){HALFWIRE_GUARDED({
      const RealNccl* real = realOrRefuse();
      if (real == nullptr) return ncclSystemError;
      const auto init = [&] { return real->api.ncclCommInitRank(comm, nranks, commId, rank); };
      if (fromNccl(*real, __builtin_return_address(0)) || comm == nullptr || nranks < 1 || rank < 0 ||
          rank >= nranks)
        return init();
      if (const ncclResult_t bad = checkSettings(); bad != ncclSuccess) return bad;
      return create(startCommunicator(*real, comm, nranks, rank, commId, nullptr), init);
    })}

HALFWIRE_EXPORT ncclResult_t
    ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds,
                             ncclConfig_t* config){HALFWIRE_GUARDED({
      const RealNccl* real = realOrRefuse();
      if (real == nullptr) return ncclSystemError;
      if (real->api.ncclCommInitRankScalable == nullptr) return ncclInvalidUsage;
      const auto init = [&] {
        return real->api.ncclCommInitRankScalable(newcomm, nranks, myrank, nId, commIds, config);
      };
      if (fromNccl(*real, __builtin_return_address(0)) || newcomm == nullptr || nranks < 1 || myrank < 0 ||
          myrank >= nranks || nId < 1 || commIds == nullptr)
        return init();
      if (const ncclResult_t bad = checkSettings(); bad != ncclSuccess) return bad;
      // Every rank is given the same ids in the same order: the first says where they meet.
      return create(startCommunicator(*real, newcomm, nranks, myrank, commIds[0], config), init);
    })}

HALFWIRE_EXPORT ncclResult_t
    ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist){HALFWIRE_GUARDED({
      const RealNccl* real = realOrRefuse();
      if (real == nullptr) return ncclSystemError;
      const bool self = fromNccl(*real, __builtin_return_address(0));
      if (!self) {
        if (const ncclResult_t bad = checkSettings(); bad != ncclSuccess) return bad;
      }
      ncclResult_t result;
      {
        const InsideReal inside;
        result = real->api.ncclCommInitAll(comm, ndev, devlist);
      }
      if (self || result != ncclSuccess || comm == nullptr || ndev < 1) return self ? result : theirs(result);
      return finishInitAll(*real, comm, ndev);
    })}

HALFWIRE_EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                                           ncclConfig_t* config){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (real->api.ncclCommSplit == nullptr) return ncclInvalidUsage;
  Communicator* parent = Registry::get().find(comm);
  const auto init = [&] {
    return (parent != nullptr ? parent->real : real)->api.ncclCommSplit(comm, color, key, newcomm, config);
  };
  if (fromNccl(*real, __builtin_return_address(0)) || parent == nullptr || newcomm == nullptr) return init();
  *newcomm = nullptr;
  return create(startSplit(*parent, color, newcomm, config), init);
})}

HALFWIRE_EXPORT ncclResult_t
    ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm,
                   ncclConfig_t* config, int shrinkFlags){HALFWIRE_GUARDED({
      const RealNccl* real = realOrRefuse();
      if (real == nullptr) return ncclSystemError;
      if (real->api.ncclCommShrink == nullptr) return ncclInvalidUsage;
      Communicator* parent = Registry::get().find(comm);
      const auto init = [&] {
        return (parent != nullptr ? parent->real : real)
            ->api.ncclCommShrink(comm, excludeRanksList, excludeRanksCount, newcomm, config, shrinkFlags);
      };
      if (fromNccl(*real, __builtin_return_address(0)) || parent == nullptr || newcomm == nullptr)
        return init();
      *newcomm = nullptr;
      return create(startUnfollowed(*parent->real, newcomm, 0, 0), init);
    })}

HALFWIRE_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (real->api.ncclCommFinalize == nullptr) return ncclInvalidUsage;
  const InsideReal inside;
  return theirs(real->api.ncclCommFinalize(comm));
})}

HALFWIRE_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (fromNccl(*real, __builtin_return_address(0))) return real->api.ncclCommDestroy(comm);
  std::unique_ptr<Communicator> state = Registry::get().remove(comm);
  ncclResult_t health = ncclSuccess;
  ncclResult_t result;
  {
    const InsideReal inside;
    const NcclApi& api = (state != nullptr ? state->real : real)->api;
    if (state != nullptr && api.ncclCommGetAsyncError != nullptr)
      (void)api.ncclCommGetAsyncError(comm, &health);
    if (state != nullptr && health == ncclSuccess) finishShadow(*state);
    result = api.ncclCommDestroy(comm);
  }
  // The kernels of a broken communicator may never end: waiting for its scratch would hang.
  if (health != ncclSuccess || result != ncclSuccess) Registry::get().park(std::move(state));
  return theirs(result);
})}

HALFWIRE_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (fromNccl(*real, __builtin_return_address(0))) return real->api.ncclCommAbort(comm);
  if (Communicator* c = Registry::get().find(comm)) {
    c->aborted.store(true);
    // Between two real calls the other thread only enqueues: it leaves soon, and then sees the flag.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (c->state.load() == CallState::kOurs && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  std::unique_ptr<Communicator> state = Registry::get().remove(comm);
  const NcclApi& api = (state != nullptr ? state->real : real)->api;
  Registry::get().park(std::move(state));
  const InsideReal inside;
  return theirs(api.ncclCommAbort(comm));
})}

HALFWIRE_EXPORT ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (real->api.ncclCommRevoke == nullptr) return ncclInvalidUsage;
  if (Communicator* c = Registry::get().find(comm)) c->aborted.store(true);
  const InsideReal inside;
  return theirs(real->api.ncclCommRevoke(comm, revokeFlags));
})}

HALFWIRE_EXPORT const char* ncclGetLastError(ncclComm_t comm) {
  if (halfwire::threadState().last_error != nullptr) return halfwire::threadState().last_error;
  const halfwire::RealNccl* real = realOrRefuse();
  if (real == nullptr) return halfwire_last_error();
  if (real->api.ncclGetLastError == nullptr) return "";
  const halfwire::InsideReal inside;
  return real->api.ncclGetLastError(comm);
}

HALFWIRE_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                                      ncclScalarResidence_t residence,
                                                      ncclComm_t comm){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (real->api.ncclRedOpCreatePreMulSum == nullptr) return ncclInvalidUsage;
  const bool self = fromNccl(*real, __builtin_return_address(0));
  ncclResult_t result;
  {
    const InsideReal inside;
    result = real->api.ncclRedOpCreatePreMulSum(op, scalar, datatype, residence, comm);
  }
  if (result != ncclSuccess) return theirs(result);
  Communicator* c = self ? nullptr : Registry::get().find(comm);
  DataType wire_type;
  if (c == nullptr || !c->compresses() || !wireDataType(datatype, &wire_type)) return result;
  CreatedOp created{*op, datatype, {}};
  created.factor.present = true;
  if (residence == ncclScalarDevice) {
    created.factor.device = scalar;
  } else {
    created.factor.value = scalarValue(scalar, datatype);
  }
  std::lock_guard lock(c->ops_mutex);
  c->ops.push_back(created);
  return result;
})}

HALFWIRE_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (real->api.ncclRedOpDestroy == nullptr) return ncclInvalidUsage;
  if (fromNccl(*real, __builtin_return_address(0))) return real->api.ncclRedOpDestroy(op, comm);
  if (Communicator* c = Registry::get().find(comm)) {
    std::lock_guard lock(c->ops_mutex);
    std::erase_if(c->ops, [&](const CreatedOp& created) { return created.op == op; });
  }
  // A call that waits for the end of its group may still use the operator.
  ThreadState& thread = threadState();
  if (thread.group_depth > 0 && thread.queue != nullptr && !thread.queue->turns.empty()) {
    thread.queue->destroyed_ops.push_back({real, op, comm});
    return ncclSuccess;
  }
  const InsideReal inside;
  return theirs(real->api.ncclRedOpDestroy(op, comm));
})}

HALFWIRE_EXPORT ncclResult_t
    ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                  ncclComm_t comm, cudaStream_t stream) {
  return data(
      {halfwire::CollectiveOp::kAllReduce, false, sendbuff, recvbuff, count, datatype, op, 0, comm, stream},
      __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                               cudaStream_t stream) {
  return data({halfwire::CollectiveOp::kReduceScatter, false, sendbuff, recvbuff, recvcount, datatype, op, 0,
               comm, stream},
              __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return data({halfwire::CollectiveOp::kAllGather, false, sendbuff, recvbuff, sendcount, datatype, ncclSum, 0,
               comm, stream},
              __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
                                           ncclDataType_t datatype, int root, ncclComm_t comm,
                                           cudaStream_t stream) {
  return data({halfwire::CollectiveOp::kBroadcast, false, sendbuff, recvbuff, count, datatype, ncclSum, root,
               comm, stream},
              __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root,
                                       ncclComm_t comm, cudaStream_t stream) {
  return data(
      {halfwire::CollectiveOp::kBroadcast, true, buff, buff, count, datatype, ncclSum, root, comm, stream},
      __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count,
                                        ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                                        cudaStream_t stream) {
  return data(
      {halfwire::CollectiveOp::kReduce, false, sendbuff, recvbuff, count, datatype, op, root, comm, stream},
      __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
                                          ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return data({halfwire::CollectiveOp::kAlltoAll, false, sendbuff, recvbuff, count, datatype, ncclSum, 0,
               comm, stream},
              __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count,
                                        ncclDataType_t datatype, int root, ncclComm_t comm,
                                        cudaStream_t stream) {
  return data({halfwire::CollectiveOp::kGather, false, sendbuff, recvbuff, count, datatype, ncclSum, root,
               comm, stream},
              __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count,
                                         ncclDataType_t datatype, int root, ncclComm_t comm,
                                         cudaStream_t stream) {
  return data({halfwire::CollectiveOp::kScatter, false, sendbuff, recvbuff, count, datatype, ncclSum, root,
               comm, stream},
              __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                                      ncclComm_t comm, cudaStream_t stream) {
  return data(
      {halfwire::CollectiveOp::kSend, false, sendbuff, nullptr, count, datatype, ncclSum, peer, comm, stream},
      __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                                      ncclComm_t comm, cudaStream_t stream) {
  return data(
      {halfwire::CollectiveOp::kRecv, false, nullptr, recvbuff, count, datatype, ncclSum, peer, comm, stream},
      __builtin_return_address(0));
}

HALFWIRE_EXPORT ncclResult_t ncclGroupStart(){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (fromNccl(*real, __builtin_return_address(0))) return real->api.ncclGroupStart();
  return theirs(groupStart(*real));
})}

HALFWIRE_EXPORT ncclResult_t ncclGroupEnd(){HALFWIRE_GUARDED({
  const RealNccl* real = realOrRefuse();
  if (real == nullptr) return ncclSystemError;
  if (fromNccl(*real, __builtin_return_address(0))) return real->api.ncclGroupEnd();
  return groupEnd(*real);
})}

HALFWIRE_EXPORT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo) {
  HALFWIRE_GUARDED({
    const RealNccl* real = realOrRefuse();
    if (real == nullptr) return ncclSystemError;
    if (fromNccl(*real, __builtin_return_address(0))) {
      return real->api.ncclGroupSimulateEnd != nullptr ? real->api.ncclGroupSimulateEnd(simInfo)
                                                       : ncclInvalidUsage;
    }
    return theirs(groupSimulateEnd(*real, simInfo));
  })
}
