// Programs that are more than one rank to a process, or more than one thread to a rank: communicators made by
// ncclCommInitAll and in groups, one thread for several ranks, a thread for each, aborting from another
// thread.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "programs/programs.h"

namespace halfwire::testing {
namespace {

class ProcessPrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  }
  static void runs(const std::string& program, int processes, const Environment& env,
                   const std::vector<std::string>& args = {}) {
    const LaunchOutcome outcome = launchWith(program, processes, env, args);
    EXPECT_TRUE(outcome.ok()) << (outcome.timed_out ? "HANG\n" : "") << outcome.describe();
  }
};

// One rank of several in this process.
struct Local {
  int device = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  std::unique_ptr<Buffer> in, out;
};

// `own_stream`: or the device's default stream.
void prepare(Local* local, int device, int global_rank, size_t count, bool own_stream = true) {
  CHECK_CUDA(cudaSetDevice(device));
  local->device = device;
  if (own_stream) CHECK_CUDA(cudaStreamCreateWithFlags(&local->stream, cudaStreamNonBlocking));
  local->in = std::make_unique<Buffer>(ncclBfloat16, count);
  local->out = std::make_unique<Buffer>(ncclBfloat16, count);
  local->in->fill(global_rank + 1);
}

void synchronize(const Local& local) {
  CHECK_CUDA(cudaSetDevice(local.device));
  CHECK_CUDA(cudaStreamSynchronize(local.stream));
}

// A group over all local ranks, then a group of two calls each, then per-rank sends around the ring.
void useFromOneThread(std::vector<Local>& locals, int first_rank, int world) {
  const double sum = world * (world + 1) / 2;
  for (int round = 0; round < 5; ++round) {
    Rank::note("round", round);
    CHECK_NCCL(ncclGroupStart());
    for (Local& l : locals) CHECK_NCCL(allReduce(*l.in, *l.out, l.comm, l.stream));
    CHECK_NCCL(ncclGroupEnd());
    for (Local& l : locals) synchronize(l);
    for (Local& l : locals) {
      l.out->expect(sum, "one call each");
      l.out->fill(0);
    }
    CHECK_NCCL(ncclGroupStart());
    for (size_t i = 0; i < locals.size(); ++i) {
      Local& l = locals[i];
      const int me = first_rank + static_cast<int>(i);
      const size_t part = l.in->count() / 2;
      CHECK_NCCL(ncclSend(l.in->at(0), part, ncclBfloat16, (me + 1) % world, l.comm, l.stream));
      CHECK_NCCL(ncclRecv(l.out->at(part), part, ncclBfloat16, (me + world - 1) % world, l.comm, l.stream));
      CHECK_NCCL(ncclAllReduce(l.in->at(0), l.out->at(0), part, ncclBfloat16, ncclAvg, l.comm, l.stream));
    }
    CHECK_NCCL(ncclGroupEnd());
    for (size_t i = 0; i < locals.size(); ++i) {
      Local& l = locals[i];
      synchronize(l);
      const int me = first_rank + static_cast<int>(i);
      const size_t part = l.in->count() / 2;
      for (size_t k = 0; k < part; ++k) {
        if (l.out->get(k) != sum / world) RANK_FAIL("an average is " + std::to_string(l.out->get(k)));
        if (l.out->get(part + k) != (me + world - 1) % world + 1) RANK_FAIL("a message went wrong");
      }
    }
  }
}

void destroy(std::vector<Local>& locals) {
  for (Local& l : locals) {
    CHECK_NCCL(ncclCommDestroy(l.comm));
    if (l.stream != nullptr) CHECK_CUDA(cudaStreamDestroy(l.stream));
  }
}

// The mean of 1 .. 3 is 2 and that of 1 .. 4 is 2.5: both survive the wire.
RANK_PROGRAM(InitAll) {
  constexpr int kRanks = 3;
  std::vector<ncclComm_t> comms(kRanks);
  CHECK_NCCL(ncclCommInitAll(comms.data(), kRanks, nullptr));
  std::vector<Local> locals(kRanks);
  for (int i = 0; i < kRanks; ++i) {
    prepare(&locals[i], i, i, 6000, rank.args().empty());
    locals[i].comm = comms[i];
  }
  useFromOneThread(locals, 0, kRanks);
  destroy(locals);
}

TEST_F(ProcessPrograms, InitAllDefaultStreams) {
  for (const Environment& env : {compressing(), passing()}) runs("InitAll", 1, env, {"default"});
}

TEST_F(ProcessPrograms, InitAllOneThread) {
  for (const Environment& env : {compressing(), passing(), Environment{{"HALFWIRE_MODE", "off"}}})
    runs("InitAll", 1, env);
  runs("InitAll", 1,
       with(compressing(), {{"HALFWIRE_CHUNK_BYTES", "1KiB"}, {"HALFWIRE_HOST_DELAY_US", "500"}}));
}

// Each process is several ranks of one communicator, made in a group by one thread. Argument: ranks per
// process.
RANK_PROGRAM(GroupedInit) {
  const int per_process = std::stoi(rank.args().at(0));
  const int world = per_process * rank.ranks();
  const ncclUniqueId id = shareId(rank);
  std::vector<Local> locals(per_process);
  Rank::note("making the communicators");
  CHECK_NCCL(ncclGroupStart());
  for (int i = 0; i < per_process; ++i) {
    CHECK_CUDA(cudaSetDevice(i));
    CHECK_NCCL(ncclCommInitRank(&locals[i].comm, world, id, rank.rank() * per_process + i));
  }
  CHECK_NCCL(ncclGroupEnd());
  for (int i = 0; i < per_process; ++i) prepare(&locals[i], i, rank.rank() * per_process + i, 6000);
  useFromOneThread(locals, rank.rank() * per_process, world);
  destroy(locals);
}

TEST_F(ProcessPrograms, GroupedInitOneThread) {
  for (const Environment& env : {compressing(), passing()}) {
    runs("GroupedInit", 1, env, {"3"});
    runs("GroupedInit", 2, env, {"2"});
  }
  runs("GroupedInit", 2,
       with(compressing(), {{"HALFWIRE_CHUNK_BYTES", "1KiB"}, {"HALFWIRE_HOST_DELAY_US", "500"}}), {"2"});
}

// Each process is several ranks, and each rank has a thread of its own. Argument: ranks per process.
RANK_PROGRAM(ThreadPerRank) {
  const int per_process = std::stoi(rank.args().at(0));
  const int world = per_process * rank.ranks();
  const ncclUniqueId id = shareId(rank);
  std::vector<std::thread> threads;
  for (int i = 0; i < per_process; ++i) {
    threads.emplace_back([&, i] {
      const int me = rank.rank() * per_process + i;
      Local l;
      CHECK_CUDA(cudaSetDevice(i));
      CHECK_NCCL(ncclCommInitRank(&l.comm, world, id, me));
      prepare(&l, i, me, 6000);
      for (int round = 0; round < 10; ++round) {
        const bool grouped = (me + round) % 2 == 0;
        if (grouped) CHECK_NCCL(ncclGroupStart());
        CHECK_NCCL(allReduce(*l.in, *l.out, l.comm, l.stream));
        CHECK_NCCL(ncclReduceScatter(l.in->data(), l.in->data(), 0, ncclBfloat16, ncclSum, l.comm, l.stream));
        if (grouped) CHECK_NCCL(ncclGroupEnd());
        CHECK_CUDA(cudaStreamSynchronize(l.stream));
        l.out->expect(world * (world + 1) / 2, "sum");
        l.out->fill(0);
      }
      CHECK_NCCL(ncclCommDestroy(l.comm));
      CHECK_CUDA(cudaStreamDestroy(l.stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ProcessPrograms, ThreadPerRank) {
  for (const Environment& env : {compressing(), passing()}) {
    runs("ThreadPerRank", 1, env, {"3"});
    runs("ThreadPerRank", 2, env, {"2"});
  }
}

// Split in groups and alone; children compress as their parent does, a rank without colour gets none.
RANK_PROGRAM(Splits) {
  const ncclComm_t world = makeWorld(rank);
  const Stream stream;
  const int w = rank.ranks(), me = rank.rank();
  for (int round = 0; round < 3; ++round) {
    Rank::note("round", round);
    ncclComm_t child = reinterpret_cast<ncclComm_t>(1);
    const bool out = me == round % w;
    CHECK_NCCL(ncclCommSplit(world, out ? NCCL_SPLIT_NOCOLOR : 7, -me, &child, nullptr));
    RANK_CHECK(out == (child == nullptr));
    Buffer in(ncclBfloat16, 2500), sum(ncclBfloat16, 2500);
    in.fill(me + 1);
    if (child != nullptr) {
      int child_rank = -1, before = 0;
      for (int k = me + 1; k < w; ++k) before += k == round % w ? 0 : 1;
      CHECK_NCCL(ncclCommUserRank(child, &child_rank));
      RANK_CHECK(child_rank == before);
      CHECK_NCCL(allReduce(in, sum, child, stream));
      stream.synchronize();
      sum.expect(w * (w + 1) / 2 - (round % w + 1), "child");
      CHECK_NCCL(ncclCommDestroy(child));
    }
    CHECK_NCCL(allReduce(in, sum, world, stream));
    stream.synchronize();
    sum.expect(w * (w + 1) / 2, "parent");
  }
  CHECK_NCCL(ncclCommDestroy(world));
}

TEST_F(ProcessPrograms, SplitsOfTheWorld) {
  for (const Environment& env : {compressing(), passing()}) runs("Splits", 4, env);
}

// Communicators come and go, at addresses that were used before, with two scratches alive at a time.
RANK_PROGRAM(ComeAndGo) {
  const Stream stream;
  ncclComm_t last = nullptr;
  Buffer in(ncclBfloat16, 1000), out(ncclBfloat16, 1000);
  in.fill(rank.rank() + 1);
  for (int i = 0; i < 12; ++i) {
    Rank::note("communicator", i);
    const ncclComm_t comm = makeWorld(rank);
    CHECK_NCCL(allReduce(in, out, comm, stream));
    if (last != nullptr) CHECK_NCCL(ncclCommDestroy(last));
    last = comm;
  }
  stream.synchronize();
  out.expect(3, "sum");
  CHECK_NCCL(ncclCommDestroy(last));
}

TEST_F(ProcessPrograms, CommunicatorsComeAndGo) { runs("ComeAndGo", 2, compressing()); }

// A watchdog aborts the communicator while the main thread makes call after call, grouped and not. The main
// thread comes back with an error; nothing hangs and nothing crashes.
RANK_PROGRAM(AbortWhileInside) {
  const ncclComm_t comm = makeWorld(rank);
  const bool partner_stays_away = rank.args().at(0) == "away";
  const Stream stream;
  Buffer in(ncclBfloat16, 200000), out(ncclBfloat16, 200000);
  in.fill(1);
  rank.barrier();
  if (partner_stays_away && rank.rank() == 1) {
    // Alive, but it does not call: rank 0's work can never end by itself.
    rank.barrier();
    CHECK_NCCL(ncclCommAbort(comm));
    return;
  }
  std::atomic<bool> aborted{false};
  std::thread watchdog([&] {
    usleep(static_cast<useconds_t>(150000 + 50000 * rank.rank()));
    aborted = true;
    (void)ncclCommAbort(comm);
  });
  ncclResult_t result = ncclSuccess;
  int calls = 0;
  Rank::note("calling");
  // After the abort the handle is gone: a real program stops using it, so does this one, as soon as it can
  // know.
  while (!aborted && result == ncclSuccess) {
    const bool grouped = calls++ % 3 == 0;
    if (grouped) result = ncclGroupStart();
    if (result == ncclSuccess) result = allReduce(in, out, comm, stream);
    if (grouped) {
      const ncclResult_t end = ncclGroupEnd();
      if (result == ncclSuccess) result = end;
    }
    if (calls % 20 == 0) {
      for (int i = 0; i < 1000 && !aborted && cudaStreamQuery(stream) == cudaErrorNotReady; ++i) usleep(500);
    }
  }
  Rank::note("joining the watchdog, calls", calls);
  watchdog.join();
  Rank::note("waiting for the stream");
  for (int i = 0; i < 100 && cudaStreamQuery(stream) == cudaErrorNotReady; ++i) usleep(50000);
  RANK_CHECK(calls > 0);
  if (partner_stays_away) rank.barrier();
}

TEST_F(ProcessPrograms, AbortWhileInside) {
  for (int round = 0; round < 3; ++round) {
    for (const Environment& env :
         {compressing(), with(compressing(), {{"HALFWIRE_CHUNK_BYTES", "4KiB"}}), passing()}) {
      runs("AbortWhileInside", 2, env, {"calling"});
      runs("AbortWhileInside", 2, env, {"away"});
    }
  }
}

// Two communicators aborted one after the other, work of both in flight.
RANK_PROGRAM(AbortInSequence) {
  const ncclComm_t a = makeWorld(rank);
  const ncclComm_t b = makeWorld(rank);
  const Stream stream, other;
  Buffer in(ncclBfloat16, 50000), out(ncclBfloat16, 50000), second(ncclBfloat16, 50000);
  rank.barrier();
  if (rank.rank() == 0) {
    CHECK_NCCL(allReduce(in, out, a, stream));
    CHECK_NCCL(allReduce(in, second, b, other));
  }
  rank.barrier();  // an abort before the call would be another test
  const auto start = std::chrono::steady_clock::now();
  (void)ncclCommAbort(rank.rank() == 0 ? a : b);
  (void)ncclCommAbort(rank.rank() == 0 ? b : a);
  RANK_CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

TEST_F(ProcessPrograms, AbortInSequence) {
  for (const Environment& env : {compressing(), passing()}) runs("AbortInSequence", 2, env);
}

}  // namespace
}  // namespace halfwire::testing
