#include "interpose/thread_state.h"

namespace halfwire {
namespace {

// Initial-exec: the library is loaded at start, so the fast path needs no call into the loader.
thread_local ThreadState state __attribute__((tls_model("initial-exec")));

}  // namespace

ThreadState& threadState() { return state; }

GroupQueue& threadQueue() {
  thread_local std::unique_ptr<GroupQueue> owner;
  if (state.queue == nullptr) {
    owner = std::make_unique<GroupQueue>();
    state.queue = owner.get();
  }
  return *state.queue;
}

ncclResult_t refuse(ncclResult_t result, const std::string& words) {
  thread_local std::string kept;
  kept = "Halfwire: " + words;
  state.last_error = kept.c_str();
  Registry::get().noteError(words);
  return result;
}

ncclResult_t issue(const NcclApi& api, const QueuedCall& c) {
  switch (c.op) {
    case CollectiveOp::kAllReduce:
      return api.ncclAllReduce(c.send, c.recv, c.count, c.type, c.redop, c.comm, c.stream);
    case CollectiveOp::kReduceScatter:
      return api.ncclReduceScatter(c.send, c.recv, c.count, c.type, c.redop, c.comm, c.stream);
    case CollectiveOp::kAllGather:
      return api.ncclAllGather(c.send, c.recv, c.count, c.type, c.comm, c.stream);
    case CollectiveOp::kBroadcast:
      if (c.bcast) return api.ncclBcast(c.recv, c.count, c.type, c.peer, c.comm, c.stream);
      return api.ncclBroadcast(c.send, c.recv, c.count, c.type, c.peer, c.comm, c.stream);
    case CollectiveOp::kReduce:
      return api.ncclReduce(c.send, c.recv, c.count, c.type, c.redop, c.peer, c.comm, c.stream);
    case CollectiveOp::kAlltoAll:
      return api.ncclAlltoAll != nullptr ? api.ncclAlltoAll(c.send, c.recv, c.count, c.type, c.comm, c.stream)
                                         : ncclInvalidUsage;
    case CollectiveOp::kGather:
      return api.ncclGather != nullptr
                 ? api.ncclGather(c.send, c.recv, c.count, c.type, c.peer, c.comm, c.stream)
                 : ncclInvalidUsage;
    case CollectiveOp::kScatter:
      return api.ncclScatter != nullptr
                 ? api.ncclScatter(c.send, c.recv, c.count, c.type, c.peer, c.comm, c.stream)
                 : ncclInvalidUsage;
    case CollectiveOp::kSend:
      return api.ncclSend(c.send, c.count, c.type, c.peer, c.comm, c.stream);
    case CollectiveOp::kRecv:
      return api.ncclRecv(c.recv, c.count, c.type, c.peer, c.comm, c.stream);
    case CollectiveOp::kCount:
      break;
  }
  return ncclInternalError;
}

}  // namespace halfwire
