// Making communicators: NCCL's own initialisation, then the meeting of the members, then the scratch.
#pragma once

#include <vector>

#include "interpose/thread_state.h"

namespace halfwire {

// What is known when the program asks. `config` may be null.
NewCommunicator startCommunicator(const RealNccl& real, ncclComm_t* out, int ranks, int rank,
                                  const ncclUniqueId& id, const ncclConfig_t* config);

// For communicators that are followed but whose peers cannot be met. 0 ranks: NCCL is asked once it has made
// it.
NewCommunicator startUnfollowed(const RealNccl& real, ncclComm_t* out, int ranks, int rank);

// The part that runs once NCCL has made them (`made` is its result): loads kernels, allocates scratch, meets
// the peers of all of them at once, connects them, registers them. On a refusal the communicators are
// aborted, set to null and the error says who and why.
ncclResult_t finishCommunicators(std::vector<NewCommunicator>& communicators, ncclResult_t made);

// A child of a followed communicator.
NewCommunicator startSplit(Communicator& parent, int color, ncclComm_t* out, const ncclConfig_t* config);

// All ranks of a communicator in this process (ncclCommInitAll).
ncclResult_t finishInitAll(const RealNccl& real, ncclComm_t* comms, int ranks);

// What cannot be right about it whoever answers: its id was made without this library, or with it switched
// off.
Status objection(const NewCommunicator& communicator);

// Whether the caller's configuration asks for a non-blocking communicator.
bool asksNonBlocking(const ncclConfig_t* config, bool parent_blocking);

}  // namespace halfwire
