// Runs a test body on several ranks, each a child process of the test.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "abi/cuda_runtime.h"
#include "abi/nccl.h"

namespace halfwire::testing {

using Environment = std::vector<std::pair<std::string, std::string>>;

// Memory that all ranks of one test see.
struct Shared {
  std::atomic<int> ids_made{0};
  ncclUniqueId ids[8];
  std::atomic<int> stage[8] = {};
  std::atomic<uint64_t> value[64] = {};

  void reach(int i) { ++stage[i]; }
  // Waits until `count` ranks have reached stage `i`.
  void await(int i, int count) {
    while (stage[i] < count) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

inline void expectOk(ncclResult_t result, const char* what, int line) {
  EXPECT_EQ(result, ncclSuccess) << what << " in line " << line << ": " << ncclGetLastError(nullptr);
}
inline void expectOk(cudaError_t result, const char* what, int line) {
  EXPECT_EQ(result, cudaSuccess) << what << " in line " << line;
}
#define OK(call) ::halfwire::testing::expectOk(call, #call, __LINE__)

// What a rank's body works with.
class Rank {
 public:
  Rank(int rank, int size, Shared& shared) : rank(rank), size(size), shared(shared) {}

  // The `index`th unique id, made by rank 0.
  ncclUniqueId id(int index = 0) {
    if (rank == 0) {
      while (shared.ids_made <= index) {
        OK(ncclGetUniqueId(&shared.ids[shared.ids_made]));
        ++shared.ids_made;
      }
    }
    while (shared.ids_made <= index) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return shared.ids[index];
  }
  // A communicator of all ranks.
  ncclComm_t world(int index = 0) {
    ncclComm_t comm = nullptr;
    OK(ncclCommInitRank(&comm, size, id(index), rank));
    return comm;
  }
  static cudaStream_t stream() {
    cudaStream_t stream = nullptr;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }

  const int rank, size;
  Shared& shared;
};

// Expects every rank's body to end within `seconds` without a failed expectation. Ranks in `killed` must die
// by SIGKILL.
inline void runRanks(int size, const std::function<void(Rank&)>& body, const Environment& environment = {},
                     unsigned seconds = 30, const std::set<int>& killed = {}) {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* shared = new (memory) Shared;
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int r = 0; r < size; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(seconds);
      for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
      Rank rank(r, size, *shared);
      body(rank);
      std::fflush(nullptr);
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(child);
  }
  for (int r = 0; r < size; ++r) {
    int status = 0;
    waitpid(children[static_cast<size_t>(r)], &status, 0);
    if (!WIFSIGNALED(status)) {
      EXPECT_TRUE(killed.count(r) == 0 && WEXITSTATUS(status) == 0)
          << "rank " << r << " ended with status " << WEXITSTATUS(status);
      continue;
    }
    EXPECT_TRUE(killed.count(r) == 1 && WTERMSIG(status) == SIGKILL)
        << "rank " << r << " ended by signal " << WTERMSIG(status)
        << (WTERMSIG(status) == SIGALRM ? ": it hung" : "");
  }
  shared->~Shared();
  munmap(memory, sizeof(Shared));
}

}  // namespace halfwire::testing
