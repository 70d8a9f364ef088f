// What the fake NCCL tells a test about the calls that reached it. The fake exports NCCL's names as the real
// library does (weak ncclX, strong pncclX), calls its own public functions through the PLT and from a thread
// of its own as the real one does, and moves no data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/nccl.h"

extern "C" {
#pragma GCC visibility push(default)

// Calls of `name` ("ncclAllReduce") that came from outside, and calls the fake made of its own public
// functions. 0 for an unknown name.
uint64_t fake_nccl_calls(const char* name);
uint64_t fake_nccl_inner_calls(const char* name);

// Communicators made by another copy of the library that were passed to this one.
uint64_t fake_nccl_foreign_comms(void);

// Group depth of the calling thread.
int fake_nccl_group_depth(void);

// From now on the order of outside calls is kept: "ncclGroupStart ncclAllReduce:17 ..." with the count of
// data calls.
void fake_nccl_record(void);

// Writes the record, zero-terminated, and returns its length (without the zero).
size_t fake_nccl_recorded(char* buffer, size_t bytes);

// Every data call from now on returns `result`.
void fake_nccl_fail_with(ncclResult_t result);

#pragma GCC visibility pop
}
