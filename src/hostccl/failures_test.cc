// Strangers, dead, slow and leaving peers, aborts: what must end, ends in time and says why; nothing else
// does.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "abi/nccl.h"
#include "hostccl/digest.h"
#include "hostccl/ranks_for_test.h"
#include "hostccl/unique_id.h"

namespace halfwire {
namespace {

using hostccl::Identity;
using testing::Rank;
using testing::runRanks;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

float* floats(size_t n) {
  float* data = nullptr;
  OK(cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(float)));
  std::fill_n(data, n, 1.0f);
  return data;
}

// Polls like a watchdog does.
ncclResult_t awaitAsyncError(ncclComm_t comm, std::chrono::milliseconds limit) {
  ncclResult_t state = ncclSuccess;
  for (const auto start = Clock::now(); state == ncclSuccess && Clock::now() - start < limit;) {
    OK(ncclCommGetAsyncError(comm, &state));
    std::this_thread::sleep_for(2ms);
  }
  return state;
}

TEST(Digest, SipHashVectors) {
  // From the reference implementation's vectors_sip128: key 00..0f, messages 00, 00 01, ...
  std::array<uint8_t, 16> key;
  for (uint8_t i = 0; i < 16; ++i) key[i] = i;
  const hostccl::Digest empty = {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6,
                                 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93};
  const hostccl::Digest one = {0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44,
                               0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc, 0x45};
  const uint8_t zero = 0;
  EXPECT_EQ(hostccl::sipHash128(key, {}), empty);
  EXPECT_EQ(hostccl::sipHash128(key, {&zero, 1}), one);
}

int connectTo(const hostccl::Endpoint& endpoint) {
  sockaddr_storage address;
  const socklen_t length = endpoint.toSockaddr(&address);
  const int fd = socket(address.ss_family, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  return fd;
}

// Everything that comes until the other side closes, or for a second.
std::string readAll(int fd) {
  std::string all;
  for (;;) {
    pollfd p{fd, POLLIN, 0};
    if (poll(&p, 1, 1000) != 1) return all + "(still open)";
    char buffer[4096];
    const ssize_t n = recv(fd, buffer, sizeof(buffer), 0);
    if (n <= 0) return all;
    all.append(buffer, static_cast<size_t>(n));
  }
}

// Passes one connection through to `to` and keeps what the visitor said.
class Eavesdropper {
 public:
  explicit Eavesdropper(const hostccl::Endpoint& to) : to_(to) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    thread_ = std::thread([this] { pass(); });
  }
  ~Eavesdropper() {
    thread_.join();
    close(listener_);
  }
  hostccl::Endpoint endpoint() const { return *hostccl::Endpoint::ofSocket(listener_); }
  std::string heard() {
    std::lock_guard lock(mutex_);
    return heard_;
  }

 private:
  void pass() {
    const int in = accept(listener_, nullptr, nullptr), out = connectTo(to_);
    bool open = true;
    while (open) {
      pollfd p[2] = {{in, POLLIN, 0}, {out, POLLIN, 0}};
      poll(p, 2, -1);
      for (int i = 0; i < 2; ++i) {
        if (p[i].revents == 0) continue;
        char buffer[4096];
        const ssize_t n = recv(i == 0 ? in : out, buffer, sizeof(buffer), 0);
        if (n <= 0) {
          open = false;
          break;
        }
        if (i == 0) {
          std::lock_guard lock(mutex_);
          heard_.append(buffer, static_cast<size_t>(n));
        }
        (void)!send(i == 0 ? out : in, buffer, static_cast<size_t>(n), MSG_NOSIGNAL);
      }
    }
    close(in);
    close(out);
  }
  hostccl::Endpoint to_;
  std::mutex mutex_;
  std::string heard_;
  int listener_ = -1;
  std::thread thread_;
};

// Garbage, silence and a replayed handshake reach the port while a communicator is made; it is made all the
// same, and the visitors get nothing.
TEST(Strangers, AreTurnedAway) {
  runRanks(2, [](Rank& self) {
    ncclUniqueId id = self.id();
    const Identity identity = *Identity::decode(id);
    const cudaStream_t stream = Rank::stream();
    if (self.rank == 0) {
      const int silent = connectTo(identity.root);
      const int garbage = connectTo(identity.root);
      const std::string junk(4000, 'x');
      (void)!send(garbage, junk.data(), junk.size(), MSG_NOSIGNAL);
      EXPECT_EQ(readAll(garbage), "");
      ncclComm_t comm = nullptr;
      OK(ncclCommInitRank(&comm, 2, id, 0));
      float* x = floats(100);
      OK(ncclAllReduce(x, x, 100, ncclFloat32, ncclSum, comm, stream));
      OK(cudaStreamSynchronize(stream));
      EXPECT_EQ(x[99], 2);
      OK(ncclCommDestroy(comm));
      close(silent);
      close(garbage);
      return;
    }
    // Rank 1 joins through somebody who listens. (The id's tail is not the engine's: it may hold anything.)
    std::memset(id.internal + 64, 0x5a, 64);
    Identity detour = identity;
    std::string heard;
    {
      Eavesdropper ear(identity.root);
      detour.root = ear.endpoint();
      ncclComm_t comm = nullptr;
      ncclUniqueId through = detour.encode();
      std::memcpy(through.internal + 64, id.internal + 64, 64);
      OK(ncclCommInitRank(&comm, 2, through, 1));
      float* x = floats(100);
      OK(ncclAllReduce(x, x, 100, ncclFloat32, ncclSum, comm, stream));
      OK(cudaStreamSynchronize(stream));
      OK(ncclCommDestroy(comm));
      heard = ear.heard();  // complete once the engine has closed the connection
    }
    EXPECT_GT(heard.size(), 60u);
  });
}

// What a member said when it joined convinces nobody a second time, even while the communicator is still
// being made.
TEST(Strangers, ReplayIsRefused) {
  runRanks(3, [](Rank& self) {
    const ncclUniqueId id = self.id();
    const Identity identity = *Identity::decode(id);
    ncclComm_t comm = nullptr;
    if (self.rank == 1) {
      Eavesdropper ear(identity.root);
      Identity detour = identity;
      detour.root = ear.endpoint();
      std::thread joining([&] { OK(ncclCommInitRank(&comm, 3, detour.encode(), 1)); });
      while (self.shared.stage[1] == 0) {
        std::this_thread::sleep_for(200ms);  // rank 1 has joined and waits for rank 2
        const int fd = connectTo(identity.root);
        const std::string said = ear.heard();
        (void)!send(fd, said.data(), said.size(), MSG_NOSIGNAL);
        const std::string answer = readAll(fd);
        // A challenge of 32 bytes, then the door.
        EXPECT_LE(answer.size(), 32u) << "the replay got further than the challenge";
        close(fd);
        self.shared.reach(1);
      }
      joining.join();
    } else {
      if (self.rank == 2) self.shared.await(1, 1);
      OK(ncclCommInitRank(&comm, 3, id, self.rank));
    }
    OK(ncclCommDestroy(comm));
  });
}

TEST(Strangers, AWrongTokenIsRefused) {
  runRanks(1, [](Rank& self) {
    Identity identity = *Identity::decode(self.id());
    identity.token[0] ^= 1;
    ncclComm_t comm = nullptr;
    EXPECT_NE(ncclCommInitRank(&comm, 1, identity.encode(), 0), ncclSuccess);
    EXPECT_EQ(comm, nullptr);
    EXPECT_STRNE(ncclGetLastError(nullptr), "");
  });
}

TEST(Members, WhoDisagreeAreTold) {
  runRanks(2, [](Rank& self) {
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, self.rank == 0 ? 2 : 3, self.id(), self.rank), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&comm, 2, self.id(1), 0), ncclInvalidArgument);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("rank 0"), std::string::npos);
  });
}

// SIGKILL in the middle of a big operation: every survivor's stream drains, the communicator says
// ncclRemoteError within 5 s, and the next call fails.
void killDuring(bool busy) {
  runRanks(4,
           [busy](Rank& self) {
             const ncclComm_t comm = self.world();
             const cudaStream_t stream = Rank::stream();
             const size_t count = 4 << 20;
             float* x = floats(count);
             OK(ncclAllReduce(x, x, 1000, ncclFloat32, ncclSum, comm, stream));
             OK(cudaStreamSynchronize(stream));
             self.shared.reach(0);
             self.shared.await(0, 4);
             const auto start = Clock::now();
             if (self.rank == 2) {
               if (busy) OK(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, comm, stream));
               std::this_thread::sleep_for(10ms);
               raise(SIGKILL);
             }
             if (busy) {
               for (int i = 0; i < 50; ++i)
                 OK(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, comm, stream));
             }
             EXPECT_EQ(awaitAsyncError(comm, 8s), ncclRemoteError);
             OK(cudaStreamSynchronize(stream));
             EXPECT_LT(since(start), 5);
             EXPECT_EQ(ncclAllReduce(x, x, 10, ncclFloat32, ncclSum, comm, stream), ncclRemoteError);
             EXPECT_NE(std::string(ncclGetLastError(comm)).find("rank"), std::string::npos)
                 << ncclGetLastError(comm);
             OK(ncclCommAbort(comm));
           },
           {}, 30, {2});
}
TEST(DeadPeer, EndsABigOperationEverywhere) { killDuring(true); }
TEST(DeadPeer, IsNoticedByIdleRanks) { killDuring(false); }

// Ranks 0 and 1 talk to each other while rank 2, whom neither waits for, dies.
TEST(DeadPeer, EndsOperationsBetweenTheLiving) {
  runRanks(3,
           [](Rank& self) {
             const ncclComm_t comm = self.world();
             const cudaStream_t stream = Rank::stream();
             float* x = floats(1000);
             if (self.rank == 2) {
               self.shared.await(0, 1);
               raise(SIGKILL);
             }
             if (self.rank == 0) {
               OK(ncclRecv(x, 1000, ncclFloat32, 1, comm, stream));  // rank 1 never sends
               self.shared.reach(0);
             }
             const auto start = Clock::now();
             EXPECT_EQ(awaitAsyncError(comm, 8s), ncclRemoteError);
             OK(cudaStreamSynchronize(stream));
             EXPECT_LT(since(start), 5);
             OK(ncclCommAbort(comm));
           },
           {}, 30, {2});
}

void stall(std::chrono::milliseconds time, unsigned limit) {
  runRanks(
      3,
      [time](Rank& self) {
        const ncclComm_t comm = self.world();
        const cudaStream_t stream = Rank::stream();
        const size_t count = 1 << 20;
        float* x = floats(count);
        self.shared.value[self.rank] = static_cast<uint64_t>(getpid());
        self.shared.reach(0);
        self.shared.await(0, 3);
        std::thread stopper;
        if (self.rank == 0) {
          stopper = std::thread([&] {
            const auto victim = static_cast<pid_t>(self.shared.value[2].load());
            kill(victim, SIGSTOP);
            self.shared.reach(1);
            std::this_thread::sleep_for(time);
            kill(victim, SIGCONT);
          });
        }
        for (int i = 0; i < 3; ++i) OK(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, comm, stream));
        if (self.rank == 0) {
          self.shared.await(1, 1);
          std::this_thread::sleep_for(time / 2);
          ncclResult_t state = ncclSystemError;
          OK(ncclCommGetAsyncError(comm, &state));
          EXPECT_EQ(state, ncclSuccess) << "slow is not dead";
        }
        OK(cudaStreamSynchronize(stream));
        EXPECT_EQ(x[count - 1], 27);
        if (stopper.joinable()) stopper.join();
        OK(ncclCommDestroy(comm));
      },
      {}, limit);
}
TEST(SlowPeer, TwoSecondsAreNoError) { stall(2s, 30); }
TEST(SlowPeer, AMinuteIsNoError) {
  if (std::getenv("HALFWIRE_SLOW_TESTS") == nullptr)
    GTEST_SKIP() << "takes a minute: set HALFWIRE_SLOW_TESTS=1";
  stall(60s, 120);
}

// Ranks leave at different times; those who stay still reach each other, and nobody sees an error.
TEST(Leaving, IsNotDying) {
  runRanks(3, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    float* x = floats(1 << 20);
    OK(ncclAllReduce(x, x, 1 << 20, ncclFloat32, ncclSum, comm, stream));
    if (self.rank == 0) {
      const auto start = Clock::now();
      OK(ncclCommDestroy(comm));  // waits for the queued work, not for the others to leave
      EXPECT_LT(since(start), 4);
      EXPECT_EQ(x[0], 3);
      self.shared.reach(0);
      return;
    }
    self.shared.await(0, 1);
    std::this_thread::sleep_for(300ms);
    if (self.rank == 1) OK(ncclSend(x, 1000, ncclFloat32, 2, comm, stream));
    if (self.rank == 2) OK(ncclRecv(x, 1000, ncclFloat32, 1, comm, stream));
    OK(cudaStreamSynchronize(stream));
    ncclResult_t state = ncclSystemError;
    OK(ncclCommGetAsyncError(comm, &state));
    EXPECT_EQ(state, ncclSuccess);
    OK(ncclCommFinalize(comm));
    OK(ncclCommDestroy(comm));
  });
}

// Who needs a rank that has left is told so.
TEST(Leaving, EndsWhatNeedsTheLeaver) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    float* x = floats(1000);
    if (self.rank == 0) {
      OK(ncclCommDestroy(comm));
      return;
    }
    OK(ncclAllReduce(x, x, 1000, ncclFloat32, ncclSum, comm, stream));
    OK(cudaStreamSynchronize(stream));
    EXPECT_EQ(awaitAsyncError(comm, 5s), ncclRemoteError);
    OK(ncclCommAbort(comm));
  });
}

TEST(Mismatch, OfCountsIsAnErrorNotACrash) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    float* x = floats(1000);
    OK(ncclAllReduce(x, x, self.rank == 0 ? 1000 : 900, ncclFloat32, ncclSum, comm, stream));
    OK(cudaStreamSynchronize(stream));
    EXPECT_EQ(awaitAsyncError(comm, 5s), ncclRemoteError);
    if (std::string(ncclGetLastError(comm)).find("were expected") != std::string::npos)
      ++self.shared.value[0];
    self.shared.reach(0);
    self.shared.await(0, 2);
    EXPECT_GE(self.shared.value[0], 1u) << "nobody said what was wrong";
    OK(ncclCommAbort(comm));
  });
}

// One thread is blocked on the stream (or in a split), another aborts.
TEST(Abort, EndsBlockedWorkAtOnce) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t comm = self.world();
    if (self.rank == 1) {  // takes no part, and is told of the abort
      EXPECT_EQ(awaitAsyncError(comm, 10s), ncclRemoteError);
      OK(ncclCommAbort(comm));
      return;
    }
    const cudaStream_t stream = Rank::stream();
    float* x = floats(1000);
    for (int i = 0; i < 20; ++i) OK(ncclAllReduce(x, x, 1000, ncclFloat32, ncclSum, comm, stream));
    std::atomic<int> synchronised{0};
    std::thread blocked([&] {
      OK(cudaStreamSynchronize(stream));
      synchronised = 1;
    });
    std::this_thread::sleep_for(100ms);
    EXPECT_EQ(synchronised, 0);
    const auto start = Clock::now();
    OK(ncclCommAbort(comm));
    blocked.join();
    EXPECT_LT(since(start), 1);
    EXPECT_EQ(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, stream), ncclInvalidArgument);
  });
}

TEST(Abort, EndsASplitThatWaits) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t comm = self.world();
    if (self.rank == 1) {
      EXPECT_EQ(awaitAsyncError(comm, 10s), ncclRemoteError);
      OK(ncclCommAbort(comm));
      return;
    }
    std::thread aborter([&] {
      std::this_thread::sleep_for(100ms);
      OK(ncclCommAbort(comm));
    });
    const auto start = Clock::now();
    ncclComm_t child = nullptr;
    EXPECT_EQ(ncclCommSplit(comm, 0, 0, &child, nullptr), ncclRemoteError);
    EXPECT_LT(since(start), 2);
    EXPECT_EQ(child, nullptr);
    aborter.join();
  });
}

// The other rank never comes; a watchdog gives up. Blocking, and non-blocking.
TEST(Abort, EndsAnInitThatWaits) {
  for (const int blocking : {1, 0}) {
    runRanks(2, [blocking](Rank& self) {
      const ncclUniqueId id = self.id();
      ncclComm_t comm = nullptr;
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = blocking;
      if (self.rank == 1) {
        self.shared.await(0, 1);
        EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 1), ncclRemoteError);
        self.shared.reach(1);
        return;
      }
      const auto start = Clock::now();
      std::thread init([&] {
        const ncclResult_t result = ncclCommInitRankConfig(&comm, 2, id, 0, &config);
        EXPECT_EQ(result, blocking == 1 ? ncclRemoteError : ncclInProgress);
      });
      std::this_thread::sleep_for(100ms);
      // As NCCL, the engine writes the handle before it waits.
      OK(ncclCommAbort(std::atomic_ref(comm).load()));
      init.join();
      EXPECT_LT(since(start), 2);
      self.shared.reach(0);
      self.shared.await(1, 1);
    });
  }
}

// What goes wrong behind a non-blocking call is the communicator's asynchronous error.
TEST(Members, WhoDisagreeAreToldLater) {
  runRanks(2, [](Rank& self) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRankConfig(&comm, self.rank == 0 ? 2 : 3, self.id(), self.rank, &config),
              ncclInProgress);
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      OK(ncclCommGetAsyncError(comm, &state));
      std::this_thread::sleep_for(1ms);
    }
    EXPECT_EQ(state, ncclInvalidArgument);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("members disagree"), std::string::npos);
    float* x = floats(10);
    EXPECT_EQ(ncclAllReduce(x, x, 10, ncclFloat32, ncclSum, comm, nullptr), ncclInvalidArgument);
    OK(ncclCommAbort(comm));
  });
}

// A data loader forked by a rank must not keep the rank's links open after the rank died.
TEST(Fork, ChildrenDoNotKeepADeadRankAlive) {
  runRanks(2,
           [](Rank& self) {
             const ncclComm_t comm = self.world();
             if (self.rank == 1) {
               const pid_t loader = fork();
               if (loader == 0) {
                 alarm(0);
                 ncclUniqueId id;
                 const bool refused = ncclGetUniqueId(&id) == ncclSystemError;
                 std::this_thread::sleep_for(3s);
                 _exit(refused ? 0 : 1);
               }
               std::this_thread::sleep_for(50ms);
               raise(SIGKILL);
             }
             const auto start = Clock::now();
             EXPECT_EQ(awaitAsyncError(comm, 8s), ncclRemoteError);
             EXPECT_LT(since(start), 2.5);
             OK(ncclCommAbort(comm));
           },
           {}, 30, {1});
}

}  // namespace
}  // namespace halfwire
