// Groups, streams, several communicators and several ranks in one process: programs that are legal with NCCL
// must run to the end here, each within a time limit.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "abi/host_engine.h"
#include "abi/nccl.h"
#include "hostccl/ranks_for_test.h"

namespace halfwire {
namespace {

using testing::Rank;
using testing::runRanks;
using namespace std::chrono_literals;

// A communicator of the ranks in `members`; every rank calls this, in the same order.
ncclComm_t among(Rank& self, int index, const std::vector<int>& members) {
  const ncclUniqueId id = self.id(index);
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] != self.rank) continue;
    ncclComm_t comm = nullptr;
    OK(ncclCommInitRank(&comm, static_cast<int>(members.size()), id, static_cast<int>(i)));
    return comm;
  }
  return nullptr;
}

struct Floats {
  explicit Floats(size_t n, float value = 0) : count(n) {
    OK(cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(float)));
    std::fill_n(data, n, value);
  }
  ~Floats() { cudaFree(data); }
  bool all(float value) const {
    return std::all_of(data, data + count, [&](float x) { return x == value; });
  }
  float* data = nullptr;
  size_t count;
};

ncclResult_t sum(Floats& buffer, ncclComm_t comm, cudaStream_t stream) {
  return ncclAllReduce(buffer.data, buffer.data, buffer.count, ncclFloat32, ncclSum, comm, stream);
}

constexpr size_t kBig = 300000;  // several segments

// One rank groups what the other calls one by one.
TEST(Groups, GroupedHereUngroupedThere) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t a = self.world(0), b = self.world(1);
    const cudaStream_t stream = Rank::stream();
    Floats x(kBig, 1), y(kBig, 2);
    for (int round = 0; round < 5; ++round) {
      if (self.rank == 0) OK(ncclGroupStart());
      OK(sum(x, a, stream));
      OK(sum(y, b, stream));
      if (self.rank == 0) OK(ncclGroupEnd());
    }
    OK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(x.all(32));
    EXPECT_TRUE(y.all(64));
    OK(ncclCommDestroy(a));
    OK(ncclCommDestroy(b));
  });
}

// Groups that hold the same calls of one communicator beside calls of different others.
TEST(Groups, SharedAndPrivateCommunicatorsInOneGroup) {
  runRanks(3, [](Rank& self) {
    const ncclComm_t a = among(self, 0, {0, 1}), b = among(self, 1, {0, 2}), c = among(self, 2, {1, 2});
    const cudaStream_t stream = Rank::stream();
    Floats first(kBig, 1), second(kBig, 1), third(kBig, 1);
    for (int round = 0; round < 5; ++round) {
      if (self.rank == 2) {
        OK(sum(first, b, stream));
        OK(sum(second, c, stream));
        continue;
      }
      OK(ncclGroupStart());
      OK(sum(first, a, stream));
      OK(sum(second, a, stream));
      OK(sum(third, self.rank == 0 ? b : c, stream));
      OK(ncclGroupEnd());
    }
    OK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(first.all(32));
    EXPECT_TRUE(second.all(32));
    for (const ncclComm_t comm : {a, b, c}) OK(ncclCommDestroy(comm));
  });
}

// In a group collectives run before point-to-point calls, in whatever order they were called.
TEST(Groups, CollectivesBeforePointToPoint) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    Floats x(kBig, 1), message(kBig, static_cast<float>(self.rank));
    for (int round = 0; round < 4; ++round) {
      if (self.rank == 0) {
        OK(ncclGroupStart());
        if (round % 2 == 0) OK(sum(x, comm, stream));
        OK(ncclSend(message.data, kBig, ncclFloat32, 1, comm, stream));
        if (round % 2 == 1) OK(sum(x, comm, stream));
        OK(ncclGroupEnd());
      } else {
        OK(sum(x, comm, stream));
        OK(ncclRecv(message.data, kBig, ncclFloat32, 0, comm, stream));
      }
    }
    OK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(x.all(16));
    EXPECT_TRUE(message.all(0));
    OK(ncclCommDestroy(comm));
  });
}

// AlltoAll, Gather and Scatter are sends and receives: between two ranks they keep their place among the
// program's own messages, whoever groups them with those.
TEST(Groups, ExchangesKeepTheirPlaceAmongMessages) {
  runRanks(3, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    const auto me = static_cast<float>(self.rank);
    const int after = (self.rank + 1) % 3, before = (self.rank + 2) % 3;
    Floats parts(3 * kBig), received(kBig), gathered(3 * kBig), scattered(kBig), exchanged(3 * kBig);
    for (size_t p = 0; p < 3; ++p) std::fill_n(parts.data + p * kBig, kBig, 10 * me + static_cast<float>(p));
    const auto is = [](const float* data, float value) {
      return std::all_of(data, data + kBig, [=](float x) { return x == value; });
    };
    for (int root = 0; root < 3; ++root) {
      if (self.rank == root) OK(ncclGroupStart());
      OK(ncclGroupStart());
      OK(ncclSend(parts.data, kBig, ncclFloat32, after, comm, stream));
      OK(ncclRecv(received.data, kBig, ncclFloat32, before, comm, stream));
      OK(ncclGroupEnd());
      OK(ncclGather(parts.data + kBig, gathered.data, kBig, ncclFloat32, root, comm, stream));
      OK(ncclAlltoAll(parts.data, exchanged.data, kBig, ncclFloat32, comm, stream));
      OK(ncclScatter(parts.data, scattered.data, kBig, ncclFloat32, root, comm, stream));
      if (self.rank == root) OK(ncclGroupEnd());
      OK(cudaStreamSynchronize(stream));
      EXPECT_TRUE(is(received.data, 10 * static_cast<float>(before)));
      EXPECT_TRUE(is(scattered.data, 10 * static_cast<float>(root) + me));
      for (size_t p = 0; p < 3; ++p) {
        const auto theirs = 10 * static_cast<float>(p);
        EXPECT_TRUE(is(exchanged.data + p * kBig, theirs + me));
        if (self.rank == root) {
          EXPECT_TRUE(is(gathered.data + p * kBig, theirs + 1));
        }
      }
    }
    OK(ncclCommDestroy(comm));
  });
}

// Sends to oneself, several messages to one peer (matched in order), uneven sizes, none at all.
TEST(Groups, ManyMessages) {
  runRanks(3, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    Floats out(30000), in(30000);
    std::iota(out.data, out.data + out.count, 1000.0f * static_cast<float>(self.rank));
    OK(ncclGroupStart());
    OK(ncclGroupStart());  // nesting
    for (int peer = 0; peer < 3; ++peer) {
      for (int k = 0; k < 4; ++k) {
        const size_t at = static_cast<size_t>(peer * 4 + k) * 2000;
        OK(ncclRecv(in.data + at, static_cast<size_t>(k * (peer + self.rank)) * 100, ncclFloat32, peer, comm,
                    stream));
        OK(ncclSend(out.data + at, static_cast<size_t>(k * (peer + self.rank)) * 100, ncclFloat32, peer, comm,
                    stream));
      }
      OK(ncclGroupEnd());
      EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess) << "an inner end must not launch";
      OK(ncclGroupStart());
    }
    OK(ncclGroupEnd());
    OK(ncclGroupEnd());
    OK(cudaStreamSynchronize(stream));
    for (int peer = 0; peer < 3; ++peer) {
      for (int k = 0; k < 4; ++k) {
        const size_t at = static_cast<size_t>(peer * 4 + k) * 2000,
                     theirs = static_cast<size_t>(self.rank * 4 + k) * 2000;
        for (size_t i = 0; i < static_cast<size_t>(k * (peer + self.rank)) * 100; ++i) {
          ASSERT_EQ(in.data[at + i], 1000.0f * static_cast<float>(peer) + static_cast<float>(theirs + i));
        }
      }
    }
    OK(ncclCommDestroy(comm));
  });
}

// Two streams in one group are joined before it and after it.
TEST(Groups, JoinsItsStreams) {
  runRanks(2,
           [](Rank& self) {
             const ncclComm_t comm = self.world();
             const cudaStream_t one = Rank::stream(), two = Rank::stream();
             Floats x(1000, 0), y(1000, 0), copy_x(1000, 0), copy_y(1000, 0);
             const size_t bytes = 1000 * sizeof(float);
             const auto set = [](void* p) { std::fill_n(static_cast<float*>(p), 1000, 1.0f); };
             const auto slow_set = [](void* p) {
               std::this_thread::sleep_for(100ms);
               std::fill_n(static_cast<float*>(p), 1000, 1.0f);
             };
             OK(cudaLaunchHostFunc(one, set, x.data));
             OK(cudaLaunchHostFunc(two, slow_set, y.data));
             OK(ncclGroupStart());
             OK(sum(x, comm, one));
             OK(sum(y, comm, two));
             OK(ncclGroupEnd());
             // Each stream sees what the group did on the other.
             OK(cudaMemcpyAsync(copy_y.data, y.data, bytes, cudaMemcpyDeviceToDevice, one));
             OK(cudaMemcpyAsync(copy_x.data, x.data, bytes, cudaMemcpyDeviceToDevice, two));
             OK(cudaDeviceSynchronize());
             EXPECT_TRUE(copy_x.all(2));
             EXPECT_TRUE(copy_y.all(2));
             OK(ncclCommDestroy(comm));
           },
           {{"HALFWIRE_HOST_DELAY_US", "2000"}});
}

// Calls of one communicator run in the order of the calls even if the streams would allow another.
TEST(Streams, OneCommunicatorIsSerial) {
  runRanks(2,
           [](Rank& self) {
             const ncclComm_t comm = self.world();
             const cudaStream_t streams[2] = {Rank::stream(), Rank::stream()};
             Floats x(5000, 1);
             for (int i = 0; i < 20; ++i) {
               // The ranks use the streams in opposite order.
               OK(sum(x, comm, streams[(i + self.rank) % 2]));
             }
             OK(cudaDeviceSynchronize());
             EXPECT_TRUE(x.all(1048576));
             OK(ncclCommDestroy(comm));
           },
           {{"HALFWIRE_HOST_DELAY_US", "1000"}});
}

// Two communicators on two streams are independent: each waits only for its own peers.
TEST(Streams, TwoCommunicatorsAreIndependent) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t a = self.world(0), b = self.world(1);
    const cudaStream_t one = Rank::stream(), two = Rank::stream();
    Floats x(1000, 1), y(1000, 1);
    // Opposite order of enqueueing: fine, because nothing orders the two.
    OK(sum(self.rank == 0 ? x : y, self.rank == 0 ? a : b, self.rank == 0 ? one : two));
    OK(sum(self.rank == 0 ? y : x, self.rank == 0 ? b : a, self.rank == 0 ? two : one));
    OK(cudaDeviceSynchronize());
    EXPECT_TRUE(x.all(2));
    EXPECT_TRUE(y.all(2));
    OK(ncclCommDestroy(a));
    OK(ncclCommDestroy(b));
  });
}

TEST(Streams, EnqueueReturnsBeforeThePeerIsThere) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    Floats x(1000, 1);
    if (self.rank == 1) self.shared.await(0, 1);  // only after rank 0 has seen its call return
    OK(sum(x, comm, stream));
    if (self.rank == 0) {
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
      self.shared.reach(0);
    }
    OK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(x.all(2));
    OK(ncclCommDestroy(comm));
  });
}

// A group whose streams share one hardware queue.
TEST(Streams, OneHardwareQueue) {
  runRanks(2,
           [](Rank& self) {
             const ncclComm_t a = self.world(0), b = self.world(1);
             const cudaStream_t one = Rank::stream(), two = Rank::stream();
             Floats x(kBig, 1), y(kBig, 1);
             for (int i = 0; i < 4; ++i) {
               OK(sum(x, a, one));
               OK(sum(y, b, two));
             }
             OK(cudaDeviceSynchronize());
             EXPECT_TRUE(x.all(16));
             EXPECT_TRUE(y.all(16));
             OK(ncclCommDestroy(a));
             OK(ncclCommDestroy(b));
           },
           {{"HALFWIRE_HOST_HW_QUEUES", "1"}});
}

void sumOnAll(const std::vector<ncclComm_t>& comms, const std::vector<cudaStream_t>& streams,
              std::vector<std::unique_ptr<Floats>>& buffers) {
  OK(ncclGroupStart());
  for (size_t i = 0; i < comms.size(); ++i) OK(sum(*buffers[i], comms[i], streams[i]));
  OK(ncclGroupEnd());
}

// One thread drives four ranks.
TEST(OneProcess, InitAll) {
  runRanks(1, [](Rank&) {
    std::vector<ncclComm_t> comms(4);
    OK(ncclCommInitAll(comms.data(), 4, nullptr));
    std::vector<cudaStream_t> streams;
    std::vector<std::unique_ptr<Floats>> buffers;
    for (int i = 0; i < 4; ++i) {
      int rank = -1, count = 0, device = -1;
      OK(ncclCommUserRank(comms[static_cast<size_t>(i)], &rank));
      OK(ncclCommCount(comms[static_cast<size_t>(i)], &count));
      OK(ncclCommCuDevice(comms[static_cast<size_t>(i)], &device));
      EXPECT_EQ(rank, i);
      EXPECT_EQ(count, 4);
      EXPECT_EQ(device, i);
      OK(cudaSetDevice(i));
      streams.push_back(Rank::stream());
      buffers.push_back(std::make_unique<Floats>(kBig, 1.0f + static_cast<float>(i)));
    }
    const uint64_t before = halfwire_host_egress_bytes();
    sumOnAll(comms, streams, buffers);
    for (const cudaStream_t stream : streams) OK(cudaStreamSynchronize(stream));
    EXPECT_EQ(halfwire_host_egress_bytes() - before, kBig * 4 * 6)
        << "bytes between ranks of one process count";
    for (const auto& buffer : buffers) EXPECT_TRUE(buffer->all(10));
    // Collectives of several communicators of one clique and messages between them, in one group.
    OK(ncclGroupStart());
    for (size_t i = 0; i < 4; ++i) {
      OK(ncclSend(buffers[i]->data, 10, ncclFloat32, static_cast<int>((i + 1) % 4), comms[i], streams[i]));
      OK(ncclRecv(buffers[i]->data + 100, 10, ncclFloat32, static_cast<int>((i + 3) % 4), comms[i],
                  streams[i]));
      OK(sum(*buffers[i], comms[i], streams[i]));
    }
    OK(ncclGroupEnd());
    for (const cudaStream_t stream : streams) OK(cudaStreamSynchronize(stream));
    for (const auto& buffer : buffers) EXPECT_TRUE(buffer->all(40));
    for (const ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
  });
}

// Two processes with two ranks each; the inits of a group run together.
TEST(OneProcess, TwoRanksInEachOfTwo) {
  runRanks(2, [](Rank& self) {
    const ncclUniqueId id = self.id();
    std::vector<ncclComm_t> comms(2);
    std::vector<cudaStream_t> streams;
    std::vector<std::unique_ptr<Floats>> buffers;
    OK(ncclGroupStart());
    for (int i = 0; i < 2; ++i) {
      OK(cudaSetDevice(i));
      OK(ncclCommInitRank(&comms[static_cast<size_t>(i)], 4, id, self.rank * 2 + i));
    }
    OK(ncclGroupEnd());
    for (int i = 0; i < 2; ++i) {
      OK(cudaSetDevice(i));
      streams.push_back(Rank::stream());
      buffers.push_back(std::make_unique<Floats>(1001, 1));
    }
    sumOnAll(comms, streams, buffers);
    for (const cudaStream_t stream : streams) OK(cudaStreamSynchronize(stream));
    for (const auto& buffer : buffers) EXPECT_TRUE(buffer->all(4));

    // Both ranks split in one group: even and odd.
    std::vector<ncclComm_t> halves(2);
    OK(ncclGroupStart());
    for (int i = 0; i < 2; ++i)
      OK(ncclCommSplit(comms[static_cast<size_t>(i)], i, self.rank, &halves[static_cast<size_t>(i)],
                       nullptr));
    OK(ncclGroupEnd());
    sumOnAll(halves, streams, buffers);
    for (const cudaStream_t stream : streams) OK(cudaStreamSynchronize(stream));
    for (const auto& buffer : buffers) EXPECT_TRUE(buffer->all(8));
    for (const ncclComm_t comm : halves) OK(ncclCommDestroy(comm));
    for (const ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
  });
}

TEST(OneProcess, TwoRanksNeedTwoDevices) {
  runRanks(1, [](Rank& self) {
    const ncclUniqueId id = self.id();
    ncclComm_t comms[2] = {};
    OK(ncclGroupStart());
    for (int i = 0; i < 2; ++i) OK(ncclCommInitRank(&comms[i], 2, id, i));
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("cudaSetDevice"), std::string::npos);
    EXPECT_EQ(comms[0], nullptr);
  });
}

TEST(Split, ColoursKeysAndNoColour) {
  runRanks(4, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    // Ranks 0, 1 and 3, in reverse order.
    ncclComm_t child = comm;
    OK(ncclCommSplit(comm, self.rank == 2 ? NCCL_SPLIT_NOCOLOR : 7, -self.rank, &child, nullptr));
    if (self.rank == 2) {
      EXPECT_EQ(child, nullptr);
    } else {
      int rank = -1, count = 0;
      OK(ncclCommUserRank(child, &rank));
      OK(ncclCommCount(child, &count));
      EXPECT_EQ(count, 3);
      EXPECT_EQ(rank, self.rank == 3 ? 0 : self.rank == 1 ? 1 : 2);
      Floats mine(1, static_cast<float>(self.rank)), all(3, 0);
      OK(ncclAllGather(mine.data, all.data, 1, ncclFloat32, child, stream));
      OK(cudaStreamSynchronize(stream));
      EXPECT_EQ(all.data[0], 3);
      EXPECT_EQ(all.data[1], 1);
      EXPECT_EQ(all.data[2], 0);
    }
    // Again, and a split of the split; the parent goes first.
    ncclComm_t pair = nullptr, single = nullptr;
    OK(ncclCommSplit(comm, self.rank / 2, 0, &pair, nullptr));
    OK(ncclCommSplit(pair, self.rank, 0, &single, nullptr));
    OK(ncclCommDestroy(comm));
    Floats x(1000, 1);
    OK(sum(x, pair, stream));
    OK(sum(x, single, stream));
    OK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(x.all(2));
    for (const ncclComm_t c : {child, pair, single}) OK(ncclCommDestroy(c));
  });
}

TEST(Config, IsReadByItsSize) {
  runRanks(2, [](Rank& self) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    ncclComm_t comm = nullptr;
    const ncclUniqueId id = self.id();
    OK(ncclCommInitRankConfig(&comm, 2, id, self.rank, &config));
    ncclResult_t state = ncclInProgress;
    OK(ncclCommGetAsyncError(comm, &state));
    EXPECT_EQ(state, ncclSuccess);
    OK(ncclCommDestroy(comm));
    // A config of an older program, which ends before `cgaClusterSize`; what follows is not ours to read.
    std::vector<char> old(offsetof(ncclConfig_t, cgaClusterSize));
    config.size = old.size();
    std::memcpy(old.data(), &config, old.size());
    OK(ncclCommInitRankConfig(&comm, 2, self.id(1), self.rank, reinterpret_cast<ncclConfig_t*>(old.data())));
    OK(ncclCommDestroy(comm));
    config.magic = 1;
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, self.rank, &config), ncclInvalidArgument);
  });
}

ncclResult_t settled(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress) {
    OK(ncclCommGetAsyncError(comm, &state));
    std::this_thread::sleep_for(200us);
  }
  return state;
}

// True if `result` is that of a call on a non-blocking communicator which goes well.
bool goesWell(ncclResult_t result, ncclComm_t comm) {
  return (result == ncclSuccess || result == ncclInProgress) && settled(comm) == ncclSuccess;
}

TEST(NonBlocking, CallsReturnAtOnceAndAreOverLater) {
  runRanks(2, [](Rank& self) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr, child = nullptr;
    const ncclUniqueId id = self.id();
    const cudaStream_t stream = Rank::stream();
    Floats x(kBig, 1), y(kBig, 1);
    if (self.rank == 1) self.shared.await(0, 1);
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, self.rank, &config), ncclInProgress);
    ASSERT_NE(comm, nullptr);
    if (self.rank == 0) {
      ncclResult_t state = ncclSuccess;
      OK(ncclCommGetAsyncError(comm, &state));
      EXPECT_EQ(state, ncclInProgress) << "the other rank has not come";
      int count = 0;
      EXPECT_EQ(ncclCommCount(comm, &count), ncclInvalidArgument);
      EXPECT_EQ(sum(x, comm, stream), ncclInvalidArgument);
      EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("in progress"), std::string::npos);
      self.shared.reach(0);
    }
    EXPECT_EQ(settled(comm), ncclSuccess);
    EXPECT_TRUE(goesWell(sum(x, comm, stream), comm));
    OK(ncclGroupStart());
    OK(sum(x, comm, stream));
    OK(sum(y, comm, stream));
    EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
    EXPECT_EQ(settled(comm), ncclSuccess);
    // Settled means enqueued: what follows on the stream is behind it.
    OK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(x.all(4));
    EXPECT_TRUE(y.all(2));
    // The child is there when the parent is no longer in progress, and is as its parent.
    EXPECT_EQ(ncclCommSplit(comm, 0, -self.rank, &child, nullptr), ncclInProgress);
    EXPECT_EQ(settled(comm), ncclSuccess);
    ASSERT_NE(child, nullptr);
    int rank = -1;
    OK(ncclCommUserRank(child, &rank));
    EXPECT_EQ(rank, 1 - self.rank);
    EXPECT_EQ(sum(y, child, stream), ncclInProgress);
    EXPECT_EQ(settled(child), ncclSuccess);
    OK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(y.all(4));
    for (const ncclComm_t c : {child, comm}) {
      EXPECT_EQ(ncclCommFinalize(c), ncclInProgress);
      EXPECT_EQ(settled(c), ncclSuccess);
      OK(ncclCommDestroy(c));
    }
  });
}

TEST(NonBlocking, ShareNoGroupWithBlocking) {
  runRanks(2, [](Rank& self) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclComm_t blocking = self.world();
    ncclComm_t other = nullptr;
    EXPECT_EQ(ncclCommInitRankConfig(&other, 2, self.id(1), self.rank, &config), ncclInProgress);
    EXPECT_EQ(settled(other), ncclSuccess);
    Floats x(10, 1);
    OK(ncclGroupStart());
    OK(sum(x, blocking, nullptr));
    OK(sum(x, other, nullptr));
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    // Who aborts first must not be the cause of what the other sees.
    self.shared.reach(0);
    self.shared.await(0, 2);
    OK(ncclCommAbort(other));
    OK(ncclCommAbort(blocking));
  });
}

TEST(Arguments, AreCheckedAsNcclDoes) {
  runRanks(1, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    Floats x(10, 1);
    const ncclUniqueId id = self.id();
    ncclComm_t other = nullptr;
    int number = 0;
    OK(ncclGetVersion(&number));
    EXPECT_EQ(number, 22809);
    EXPECT_EQ(ncclGetVersion(nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclGetUniqueId(nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&other, 0, id, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&other, 2, id, 2), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&other, 2, id, -1), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(nullptr, 2, id, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&other, 2, ncclUniqueId{}, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommCount(nullptr, &number), ncclInvalidArgument);
    EXPECT_EQ(ncclAllReduce(x.data, x.data, 1, ncclFloat32, ncclSum, nullptr, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclAllReduce(nullptr, x.data, 1, ncclFloat32, ncclSum, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclAllReduce(x.data, x.data, 1, static_cast<ncclDataType_t>(12), ncclSum, comm, stream),
              ncclInvalidArgument);
    EXPECT_EQ(ncclAllReduce(x.data, x.data, 1, ncclFloat32, static_cast<ncclRedOp_t>(5), comm, stream),
              ncclInvalidArgument);
    EXPECT_EQ(ncclAllReduce(x.data, x.data, SIZE_MAX, ncclFloat32, ncclSum, comm, stream),
              ncclInvalidArgument);
    EXPECT_EQ(ncclBroadcast(x.data, x.data, 1, ncclFloat32, 1, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclReduce(x.data, x.data, 1, ncclFloat32, ncclSum, -1, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclSend(x.data, 1, ncclFloat32, 1, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclGather(x.data, x.data, 1, ncclFloat32, 1, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclScatter(x.data, x.data, 1, ncclFloat32, -1, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclGather(x.data, nullptr, 1, ncclFloat32, 0, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclScatter(nullptr, x.data, 1, ncclFloat32, 0, comm, stream), ncclInvalidArgument);
    OK(ncclGather(nullptr, nullptr, 0, ncclFloat32, 0, comm, stream));
    EXPECT_EQ(ncclAllReduce(x.data, x.data, 1, ncclFloat8e4m3, ncclSum, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    OK(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, comm, stream));
    // An error inside a group is reported at the call and again at the end, and drops the group.
    OK(ncclGroupStart());
    OK(sum(x, comm, stream));
    EXPECT_EQ(ncclAllReduce(nullptr, x.data, 1, ncclFloat32, ncclSum, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("NULL"), std::string::npos);
    OK(sum(x, comm, stream));
    OK(ncclCommFinalize(comm));
    EXPECT_EQ(sum(x, comm, stream), ncclInvalidArgument);
    OK(ncclCommDestroy(comm));
    EXPECT_EQ(ncclCommDestroy(comm), ncclInvalidArgument) << "a stale pointer is an error, not a crash";
  });
}

std::vector<std::string> allNames() {
  return {
#define HALFWIRE_NAME(ret, name, params, args) #name,
      HALFWIRE_NCCL_FUNCTIONS(HALFWIRE_NAME)
#undef HALFWIRE_NAME
#define HALFWIRE_NAME(name) #name,
          HALFWIRE_NCCL_DEVICE_FUNCTIONS(HALFWIRE_NAME)
#undef HALFWIRE_NAME
  };
}

void namesBody(Rank&) {
  void* self = dlopen(nullptr, RTLD_NOW);
  for (const std::string& name : allNames()) {
    EXPECT_NE(dlsym(self, name.c_str()), nullptr) << name;
    EXPECT_NE(dlsym(self, ("p" + name).c_str()), nullptr) << name;
  }
  for (const char* name : {"ncclAllReduce",      "ncclReduceScatter",
                           "ncclAllGather",      "ncclBroadcast",
                           "ncclBcast",          "ncclReduce",
                           "ncclAlltoAll",       "ncclSend",
                           "ncclRecv",           "ncclGroupStart",
                           "ncclGroupEnd",       "ncclGroupSimulateEnd",
                           "ncclCommInitRank",   "ncclCommInitRankConfig",
                           "ncclCommInitAll",    "ncclCommSplit",
                           "ncclCommDestroy",    "ncclCommFinalize",
                           "ncclCommAbort",      "ncclCommGetAsyncError",
                           "ncclCommCount",      "ncclCommUserRank",
                           "ncclCommCuDevice",   "ncclGetUniqueId",
                           "ncclGetVersion",     "ncclGetLastError",
                           "ncclGetErrorString", "ncclRedOpCreatePreMulSum",
                           "ncclRedOpDestroy",   "ncclMemAlloc",
                           "ncclMemFree",        "ncclGather",
                           "ncclScatter",        "ncclCommInitRankScalable"}) {
    EXPECT_EQ(dlsym(self, name), dlsym(self, (std::string("p") + name).c_str())) << name;
  }
  void* handle = nullptr;
  EXPECT_EQ(ncclCommRegister(nullptr, nullptr, 0, &handle), ncclInvalidUsage);
  EXPECT_STREQ(ncclGetLastError(nullptr), "ncclCommRegister is not implemented by the host engine");
  EXPECT_EQ(pncclCommRevoke(nullptr, 0), ncclInvalidUsage);
  EXPECT_EQ(reinterpret_cast<ncclResult_t (*)()>(dlsym(self, "ncclTeamWorld"))(), ncclInvalidUsage);
  // Ends the group, as in NCCL, although it refuses.
  OK(ncclGroupStart());
  EXPECT_EQ(ncclGroupSimulateEnd(nullptr), ncclInvalidUsage);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  const HalfwireHostEngine* engine = halfwire_host_engine_v1();
  EXPECT_EQ(engine->version, 1u);
  EXPECT_EQ(engine->bytes, sizeof(HalfwireHostEngine));
}

// Every name of NCCL is there twice; those the engine has are the same code under both.
TEST(Names, TwinsAndRefusals) { runRanks(1, namesBody); }

}  // namespace
}  // namespace halfwire
