// Legal programs of groups and ungrouped calls that a library which queues calls could turn into deadlocks.
// Each runs compressed and passing through, with one hardware queue and with many.
#include <gtest/gtest.h>

#include "programs/programs.h"

namespace halfwire::testing {
namespace {

constexpr int kRounds = 12;

struct Variant {
  const char* name;
  Environment env;
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

class GroupPrograms : public ::testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  }
  void runs(const std::string& program, int ranks, const Environment& more = {}) {
    const LaunchOutcome outcome = launchWith(program, ranks, with(GetParam().env, more));
    EXPECT_TRUE(outcome.ok()) << (outcome.timed_out ? "HANG\n" : "") << outcome.describe();
  }
};

INSTANTIATE_TEST_SUITE_P(
    Settings, GroupPrograms,
    ::testing::Values(
        Variant{"Compressing", compressing()}, Variant{"Passing", passing()},
        Variant{"CompressingDelayed", with(compressing(), {{"HALFWIRE_HOST_DELAY_US", "1500"}})},
        Variant{"CompressingSmallChunks", with(compressing(), {{"HALFWIRE_CHUNK_BYTES", "2KiB"}})},
        Variant{"CompressingMessages",
                with(compressing(), {{"HALFWIRE_OPS", "allreduce,reducescatter,sendrecv-fp32"}})},
        Variant{"CompressingOneQueue", with(compressing(), {{"HALFWIRE_HOST_HW_QUEUES", "1"}})},
        Variant{"Off", {{"HALFWIRE_MODE", "off"}}}),
    [](const auto& info) { return std::string(info.param.name); });

// Rank 0: group{AllReduce(A), AllReduce(B)}; the others: AllReduce(A); AllReduce(B). One stream each.
RANK_PROGRAM(GroupedAgainstUngrouped) {
  std::vector<int> all;
  for (int i = 0; i < rank.ranks(); ++i) all.push_back(i);
  const ncclComm_t a = makeComm(rank, all);
  const ncclComm_t b = makeComm(rank, all);
  const Stream stream;
  Buffer a_in(ncclBfloat16, 3000), a_out(ncclBfloat16, 3000), b_in(ncclBfloat16, 5000),
      b_out(ncclBfloat16, 5000);
  a_in.fill(rank.rank() + 1);
  b_in.fill(2 * (rank.rank() + 1));
  const int w = rank.ranks();
  for (int round = 0; round < kRounds; ++round) {
    Rank::note("round", round);
    const bool grouped = (rank.rank() + round) % w == 0;
    if (grouped) CHECK_NCCL(ncclGroupStart());
    CHECK_NCCL(allReduce(a_in, a_out, a, stream));
    CHECK_NCCL(allReduce(b_in, b_out, b, stream));
    if (grouped) CHECK_NCCL(ncclGroupEnd());
  }
  stream.synchronize();
  a_out.expect(w * (w + 1) / 2, "A");
  b_out.expect(w * (w + 1), "B");
  CHECK_NCCL(ncclCommDestroy(b));
  CHECK_NCCL(ncclCommDestroy(a));
}

TEST_P(GroupPrograms, GroupedAgainstUngroupedTwoRanks) { runs("GroupedAgainstUngrouped", 2); }
TEST_P(GroupPrograms, GroupedAgainstUngroupedThreeRanks) { runs("GroupedAgainstUngrouped", 3); }

// Rank 0's group holds {A1, A2, B}, rank 1's {A1, A2, C}: where A's calls are cut into batches must not
// depend on what else is in the group. Rank 2 is the other end of B and C. A's calls together exceed what one
// pass takes.
RANK_PROGRAM(UnequalNeighboursInGroups) {
  const ncclComm_t a = makeComm(rank, {0, 1});
  const ncclComm_t b = makeComm(rank, {0, 2});
  const ncclComm_t c = makeComm(rank, {1, 2});
  const Stream stream;
  const size_t small = 700, large = 40000;
  Buffer a1_in(ncclBfloat16, small), a1_out(ncclBfloat16, small), a2_in(ncclFloat16, large),
      a2_out(ncclFloat16, large);
  Buffer b_in(ncclBfloat16, large), b_out(ncclBfloat16, large), c_in(ncclBfloat16, small),
      c_out(ncclBfloat16, small);
  for (Buffer* in : {&a1_in, &a2_in, &b_in, &c_in}) in->fill(rank.rank() + 1);
  for (int round = 0; round < kRounds; ++round) {
    Rank::note("round", round);
    const auto callA = [&] {
      CHECK_NCCL(allReduce(a1_in, a1_out, a, stream));
      CHECK_NCCL(allReduce(a2_in, a2_out, a, stream));
    };
    // The other communicator's call comes before, between or behind A's; A is first called first.
    const auto group = [&](const Buffer& in, const Buffer& out, ncclComm_t other) {
      CHECK_NCCL(ncclGroupStart());
      CHECK_NCCL(allReduce(a1_in, a1_out, a, stream));
      if (round % 2 == 0) CHECK_NCCL(allReduce(in, out, other, stream));
      CHECK_NCCL(allReduce(a2_in, a2_out, a, stream));
      if (round % 2 == 1) CHECK_NCCL(allReduce(in, out, other, stream));
      CHECK_NCCL(ncclGroupEnd());
    };
    switch (rank.rank()) {
      case 0:
        group(b_in, b_out, b);
        break;
      case 1:
        if (round % 3 == 2) {
          callA();
          CHECK_NCCL(allReduce(c_in, c_out, c, stream));
        } else {
          group(c_in, c_out, c);
        }
        break;
      default:
        if (round % 3 == 0) CHECK_NCCL(ncclGroupStart());
        CHECK_NCCL(allReduce(b_in, b_out, b, stream));
        CHECK_NCCL(allReduce(c_in, c_out, c, stream));
        if (round % 3 == 0) CHECK_NCCL(ncclGroupEnd());
    }
  }
  stream.synchronize();
  if (a != nullptr) a1_out.expect(3, "A1");
  if (a != nullptr) a2_out.expect(3, "A2");
  if (b != nullptr) b_out.expect(4, "B");
  if (c != nullptr) c_out.expect(5, "C");
  for (const ncclComm_t comm : {a, b, c}) {
    if (comm != nullptr) CHECK_NCCL(ncclCommDestroy(comm));
  }
}

TEST_P(GroupPrograms, UnequalNeighboursInGroups) { runs("UnequalNeighboursInGroups", 3); }

// Rank 0: group{AllReduce, Send to 1}, in either order of calls; rank 1: AllReduce; Recv from 0. NCCL runs a
// group's collectives before its sends.
RANK_PROGRAM(SendInGroupWithCollective) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  Buffer in(ncclBfloat16, 9000), out(ncclBfloat16, 9000), message(ncclFloat32, 5000);
  in.fill(rank.rank() + 1);
  if (rank.rank() == 0) message.fill(7.25);
  for (int round = 0; round < kRounds; ++round) {
    Rank::note("round", round);
    if (rank.rank() == 0) {
      CHECK_NCCL(ncclGroupStart());
      if (round % 2 == 0) CHECK_NCCL(allReduce(in, out, comm, stream));
      CHECK_NCCL(ncclSend(message.data(), message.count(), ncclFloat32, 1, comm, stream));
      if (round % 2 == 1) CHECK_NCCL(allReduce(in, out, comm, stream));
      CHECK_NCCL(ncclGroupEnd());
    } else {
      CHECK_NCCL(allReduce(in, out, comm, stream));
      CHECK_NCCL(ncclRecv(message.data(), message.count(), ncclFloat32, 0, comm, stream));
    }
  }
  stream.synchronize();
  out.expect(3, "sum");
  message.expect(7.25, "message");
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_P(GroupPrograms, SendInGroupWithCollective) { runs("SendInGroupWithCollective", 2); }

// Rank 0: group{AllToAll, AllReduce}; the others: AllReduce; AlltoAll. NCCL makes AlltoAll of sends and
// receives, which a group runs behind its collectives.
RANK_PROGRAM(AlltoAllBehindCollectives) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  const int w = rank.ranks(), me = rank.rank();
  const size_t part = 1100;
  Buffer in(ncclBfloat16, part * w), out(ncclBfloat16, part * w), sum_in(ncclBfloat16, 5000),
      sum(ncclBfloat16, 5000);
  in.fill(me + 1);
  sum_in.fill(me + 1);
  for (int round = 0; round < kRounds; ++round) {
    Rank::note("round", round);
    const bool grouped = (me + round) % w == 0;
    if (grouped) CHECK_NCCL(ncclGroupStart());
    if (grouped) CHECK_NCCL(ncclAlltoAll(in.data(), out.data(), part, ncclBfloat16, comm, stream));
    CHECK_NCCL(allReduce(sum_in, sum, comm, stream));
    if (!grouped) CHECK_NCCL(ncclAlltoAll(in.data(), out.data(), part, ncclBfloat16, comm, stream));
    if (grouped) CHECK_NCCL(ncclGroupEnd());
  }
  stream.synchronize();
  sum.expect(w * (w + 1) / 2, "sum");
  for (int k = 0; k < w; ++k) RANK_CHECK(out.get(static_cast<size_t>(k) * part + 7) == k + 1);
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_P(GroupPrograms, AlltoAllBehindCollectives) { runs("AlltoAllBehindCollectives", 3); }

// Rank 0: group{AllReduce(A) of nothing, AllReduce(B), AllReduce(A)}; the others: AllReduce(B); AllReduce(A).
// A call without elements gives its communicator no place in the order of the group.
RANK_PROGRAM(EmptyCallFirst) {
  const ncclComm_t a = makeWorld(rank);
  const ncclComm_t b = makeWorld(rank);
  const Stream stream;
  const int w = rank.ranks();
  Buffer a_in(ncclBfloat16, 3000), a_out(ncclBfloat16, 3000), b_in(ncclBfloat16, 5000),
      b_out(ncclBfloat16, 5000);
  a_in.fill(rank.rank() + 1);
  b_in.fill(2 * (rank.rank() + 1));
  for (int round = 0; round < kRounds; ++round) {
    Rank::note("round", round);
    const bool grouped = (rank.rank() + round) % w == 0;
    if (grouped) CHECK_NCCL(ncclGroupStart());
    if (grouped) CHECK_NCCL(ncclAllReduce(a_in.data(), a_out.data(), 0, ncclBfloat16, ncclSum, a, stream));
    CHECK_NCCL(allReduce(b_in, b_out, b, stream));
    CHECK_NCCL(allReduce(a_in, a_out, a, stream));
    if (grouped) CHECK_NCCL(ncclGroupEnd());
  }
  stream.synchronize();
  a_out.expect(w * (w + 1) / 2, "A");
  b_out.expect(w * (w + 1), "B");
  CHECK_NCCL(ncclCommDestroy(b));
  CHECK_NCCL(ncclCommDestroy(a));
}

TEST_P(GroupPrograms, EmptyCallFirst) { runs("EmptyCallFirst", 2); }

// Everyone sends to the next and receives from the one before, in a group with collectives of two kinds.
RANK_PROGRAM(RingShiftInGroup) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream, other;
  const int w = rank.ranks(), me = rank.rank();
  const size_t part = 1500;
  Buffer in(ncclBfloat16, part * w), out(ncclBfloat16, part * w), mine(ncclBfloat16, part),
      to(ncclFloat32, 333), from(ncclFloat32, 333);
  in.fill(me + 1);
  to.fill(me);
  for (int round = 0; round < kRounds; ++round) {
    Rank::note("round", round);
    const cudaStream_t second =
        round % 2 == 0 ? static_cast<cudaStream_t>(stream) : static_cast<cudaStream_t>(other);
    CHECK_NCCL(ncclGroupStart());
    CHECK_NCCL(ncclSend(to.data(), to.count(), ncclFloat32, (me + 1) % w, comm, stream));
    CHECK_NCCL(ncclReduceScatter(in.data(), mine.data(), part, ncclBfloat16, ncclSum, comm, second));
    CHECK_NCCL(ncclGroupStart());
    CHECK_NCCL(ncclRecv(from.data(), from.count(), ncclFloat32, (me + w - 1) % w, comm, second));
    CHECK_NCCL(allReduce(in, out, comm, stream));
    CHECK_NCCL(ncclGroupEnd());
    CHECK_NCCL(ncclGroupEnd());
  }
  stream.synchronize();
  other.synchronize();
  mine.expect(w * (w + 1) / 2, "ReduceScatter");
  out.expect(w * (w + 1) / 2, "AllReduce");
  from.expect((me + w - 1) % w, "message");
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_P(GroupPrograms, RingShiftInGroup) { runs("RingShiftInGroup", 3); }

// ncclGroupSimulateEnd ends a group and launches nothing; the calls after it belong to no group.
RANK_PROGRAM(SimulateEnd) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  Buffer in(ncclBfloat16, 2000), out(ncclBfloat16, 2000);
  in.fill(rank.rank() + 1);
  ncclSimInfo_t info = {sizeof(ncclSimInfo_t), 0x74685283, NCCL_VERSION_CODE, 0.0f};
  CHECK_NCCL(ncclGroupStart());
  CHECK_NCCL(allReduce(in, out, comm, stream));
  const ncclResult_t simulated = ncclGroupSimulateEnd(&info);
  // An engine may not know how to simulate; it has to end the group all the same.
  if (simulated != ncclSuccess && simulated != ncclInvalidUsage)
    RANK_FAIL("ncclGroupSimulateEnd returned " + std::to_string(simulated));
  stream.synchronize();
  out.expect(0, "a simulated call");
  CHECK_NCCL(allReduce(in, out, comm, stream));
  stream.synchronize();
  out.expect(3, "the call after it");
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_P(GroupPrograms, SimulateEnd) { runs("SimulateEnd", 2); }

// A refused call in a group fails the group, drops what it held, and leaves nothing behind for the next one.
RANK_PROGRAM(ErrorInGroup) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  Buffer in(ncclBfloat16, 2000), out(ncclBfloat16, 2000), second(ncclBfloat16, 2000);
  in.fill(rank.rank() + 1);
  for (int round = 0; round < 4; ++round) {
    Rank::note("round", round);
    CHECK_NCCL(ncclGroupStart());
    if (round % 2 == 0) CHECK_NCCL(allReduce(in, out, comm, stream));
    if (round == 3) CHECK_NCCL(ncclGroupStart());
    const ncclResult_t bad =
        ncclAllReduce(in.data(), out.data(), in.count(), ncclBfloat16, ncclSum, nullptr, stream);
    if (bad == ncclSuccess) RANK_FAIL("a call without a communicator succeeded");
    if (round == 3) (void)ncclGroupEnd();
    const ncclResult_t end = ncclGroupEnd();
    if (end == ncclSuccess) RANK_FAIL("the group of a refused call succeeded");
    stream.synchronize();
    out.expect(0, "a call of a failed group");
  }
  RANK_CHECK(ncclGroupEnd() == ncclInvalidUsage);
  CHECK_NCCL(allReduce(in, second, comm, stream));
  stream.synchronize();
  second.expect(3, "the call after the failed groups");
  CHECK_NCCL(ncclGroupStart());
  CHECK_NCCL(allReduce(in, out, comm, stream));
  CHECK_NCCL(ncclGroupEnd());
  stream.synchronize();
  out.expect(3, "the group after the failed groups");
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_P(GroupPrograms, ErrorInGroup) { runs("ErrorInGroup", 2); }

// An operator may be destroyed as soon as the call that uses it has returned, also inside the group. Scalars
// differ by rank and live in host memory that is gone at once, or in device memory that is written by the
// stream.
RANK_PROGRAM(RedOpDestroyedInGroup) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  Buffer in(ncclBfloat16, 3000), out(ncclBfloat16, 3000), exact_in(ncclFloat32, 50),
      exact_out(ncclFloat32, 50), scalar(ncclBfloat16, 1);
  for (int round = 0; round < kRounds; ++round) {
    Rank::note("round", round);
    in.fill(rank.rank() + 1);
    exact_in.fill(rank.rank() + 1);
    const double factor = rank.rank() == 0 ? 0.5 : -3;
    CHECK_NCCL(ncclGroupStart());
    ncclRedOp_t op = ncclSum;
    char immediate[4];
    soak::store(ncclBfloat16, immediate, 0, factor);
    scalar.fill(factor);
    const bool device = round % 2 == 1;
    CHECK_NCCL(ncclRedOpCreatePreMulSum(&op, device ? scalar.data() : immediate, ncclBfloat16,
                                        device ? ncclScalarDevice : ncclScalarHostImmediate, comm));
    CHECK_NCCL(allReduce(in, out, comm, stream, op));
    CHECK_NCCL(ncclRedOpDestroy(op, comm));
    memset(immediate, 0, sizeof immediate);
    // Its number may be given to the next operator while the first call still waits for the end of the group.
    ncclRedOp_t next = ncclSum;
    float two = 2.0f * static_cast<float>(rank.rank() + 1);
    CHECK_NCCL(ncclRedOpCreatePreMulSum(&next, &two, ncclFloat32, ncclScalarHostImmediate, comm));
    CHECK_NCCL(
        ncclReduce(exact_in.data(), exact_out.data(), exact_in.count(), ncclFloat32, next, 0, comm, stream));
    CHECK_NCCL(ncclRedOpDestroy(next, comm));
    CHECK_NCCL(ncclGroupEnd());
    stream.synchronize();
    out.expect(0.5 * 1 - 3 * 2, "AllReduce");
    if (rank.rank() == 0) exact_out.expect(2 * 1 + 4 * 2, "Reduce");
  }
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_P(GroupPrograms, RedOpDestroyedInGroup) { runs("RedOpDestroyedInGroup", 2); }

// Many calls in one group, far more than one pass of the scratch takes, beside a second communicator whose
// number of calls differs from rank to rank.
RANK_PROGRAM(ManyCallsInGroup) {
  const ncclComm_t a = makeWorld(rank);
  const ncclComm_t b = makeComm(rank, {0, 1});
  const Stream stream, other;
  constexpr int kCalls = 40;
  std::vector<std::unique_ptr<Buffer>> in, out;
  for (int i = 0; i < kCalls; ++i) {
    const size_t count = static_cast<size_t>(1 + i * i * 7);
    in.push_back(std::make_unique<Buffer>(i % 3 == 0 ? ncclFloat16 : ncclBfloat16, count));
    out.push_back(std::make_unique<Buffer>(in.back()->type(), count));
    in.back()->fill(rank.rank() + 1 + i % 5);
  }
  const int w = rank.ranks();
  for (int round = 0; round < 3; ++round) {
    Rank::note("round", round);
    CHECK_NCCL(ncclGroupStart());
    for (int i = 0; i < kCalls; ++i) {
      CHECK_NCCL(allReduce(*in[i], *out[i], a, i % 4 == 1 ? other : stream));
    }
    CHECK_NCCL(ncclGroupEnd());
    if (b == nullptr) continue;
    Buffer extra(ncclBfloat16, 100);
    CHECK_NCCL(allReduce(extra, extra, b, stream));
    stream.synchronize();
  }
  stream.synchronize();
  other.synchronize();
  for (int i = 0; i < kCalls; ++i) out[i]->expect(w * (w + 1) / 2 + w * (i % 5), "a call of the group");
  if (b != nullptr) CHECK_NCCL(ncclCommDestroy(b));
  CHECK_NCCL(ncclCommDestroy(a));
}

TEST_P(GroupPrograms, ManyCallsInGroup) { runs("ManyCallsInGroup", 3); }

}  // namespace
}  // namespace halfwire::testing
