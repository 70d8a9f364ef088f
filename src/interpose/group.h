// Groups and turns: what happens to calls on communicators that compress.
#pragma once

#include "interpose/thread_state.h"

namespace halfwire {

// A data call of the program on a communicator that is followed: decides, counts, and forwards, compresses or
// queues it.
ncclResult_t dataCall(Communicator& c, const QueuedCall& call);

// Keeps the samples of a communicator that is about to be destroyed, after waiting for them.
void finishShadow(Communicator& communicator);

// The program's group calls; `real` is the library it reached.
ncclResult_t groupStart(const RealNccl& real);
ncclResult_t groupEnd(const RealNccl& real);
ncclResult_t groupSimulateEnd(const RealNccl& real, ncclSimInfo_t* info);

}  // namespace halfwire
