// Passes that overlap, under every order of events that the streams allow: all ranks of a communicator in one
// thread, every stream a queue, whose heads a seeded generator runs in turn. A stream goes on when what it
// waits for has happened, a real group when every rank's transfer stream has come to it. A wait that is
// missing shows as a result of the wrong bits in some order, one too many as queues that never empty.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>

#include "collective/compressor.h"
#include "wire/codec.h"

namespace halfwire {
namespace {

// One entry of a stream: runs and returns true, or must wait and returns false.
using Entry = std::function<bool()>;

struct Machine {
  std::map<StreamHandle, std::deque<Entry>> streams;
  std::vector<uint64_t> recorded;   // of each event, records enqueued
  std::vector<uint64_t> completed;  // and done
  uint64_t streams_made = 0;
  std::mt19937 random;

  void enqueue(StreamHandle stream, Entry entry) { streams[stream].push_back(std::move(entry)); }

  // Runs entries in random order until none is left; false if none can go on.
  bool drain() {
    for (;;) {
      std::vector<std::deque<Entry>*> waiting;
      for (auto& [handle, queue] : streams) {
        if (!queue.empty()) waiting.push_back(&queue);
      }
      if (waiting.empty()) return true;
      std::shuffle(waiting.begin(), waiting.end(), random);
      bool moved = false;
      for (std::deque<Entry>* queue : waiting) {
        if (!queue->front()()) continue;
        queue->pop_front();
        moved = true;
        break;
      }
      if (!moved) return false;
    }
  }
};

class QueuedDevice final : public Device {
 public:
  explicit QueuedDevice(Machine* machine) : m_(machine) {}
  Status allocate(size_t bytes, void** out) override {
    *out = std::aligned_alloc(256, roundUp(bytes, 256));
    std::memset(*out, 0xa5, bytes);
    return {};
  }
  void release(void* pointer) override { std::free(pointer); }
  Status quantize(const QuantizeJob& job, StreamHandle s) override {
    return m_->enqueue(s, [job] { return reference::quantize(job), true; }), Status();
  }
  Status dequantize(const DequantizeJob& job, StreamHandle s) override {
    return m_->enqueue(s, [job] { return reference::dequantize(job), true; }), Status();
  }
  Status reduce(const ReduceJob& job, StreamHandle s) override {
    return m_->enqueue(s, [job] { return reference::reduce(job), true; }), Status();
  }
  Status createEvent(EventHandle* out) override {
    m_->recorded.push_back(0);
    m_->completed.push_back(0);
    *out = reinterpret_cast<EventHandle>(m_->recorded.size());
    return {};
  }
  void destroyEvent(EventHandle) override {}
  Status recordEvent(EventHandle event, StreamHandle s) override {
    const uint64_t mine = ++m_->recorded[index(event)];
    m_->enqueue(s, [this, event, mine] {
      uint64_t& done = m_->completed[index(event)];
      done = std::max(done, mine);
      return true;
    });
    return {};
  }
  // As in CUDA, of what has been recorded when the wait is enqueued; later records do not count.
  Status waitEvent(StreamHandle s, EventHandle event) override {
    const uint64_t wanted = m_->recorded[index(event)];
    m_->enqueue(s, [this, event, wanted] { return m_->completed[index(event)] >= wanted; });
    return {};
  }
  Status synchronizeEvent(EventHandle) override { return {}; }
  Status createStream(StreamHandle* out) override {
    *out = reinterpret_cast<StreamHandle>(0x1000 + ++m_->streams_made);
    return {};
  }
  Status finishStream(StreamHandle s) override {
    EXPECT_TRUE(m_->streams[s].empty());
    return {};
  }
  bool connectsLazily() const override { return false; }
  bool overlapsPasses() const override { return true; }
  Status compare(const CompareJob&, StreamHandle) override { return unused(); }
  Status copy(void* to, const void* from, size_t bytes, StreamHandle s) override {
    return m_->enqueue(s, [=] { return std::memcpy(to, from, bytes), true; }), Status();
  }
  Status zero(void*, size_t, StreamHandle) override { return unused(); }
  Status allocateHost(size_t, void**) override { return unused(); }
  void releaseHost(void*) override {}
  Status createTimedEvent(EventHandle*) override { return unused(); }
  Status elapsed(EventHandle, EventHandle, float*, bool*) override { return unused(); }
  static Status unused() { return Status(StatusCode::kInternal, "not part of a compressed collective"); }
  Status perturb(const PerturbJob& job, StreamHandle) override { return halfwire::perturb(job), Status(); }
  uint64_t nvlinkDomain() const override { return 0; }
  Status captureOf(StreamHandle, uint64_t* out) override { return *out = 0, Status(); }
  Status recordEventOutside(EventHandle, StreamHandle) override { return unused(); }
  Status waitEventOutside(StreamHandle, EventHandle) override { return unused(); }
  const char* codecName() const override { return "test"; }
  size_t freeBytes() override { return 0; }

 private:
  static size_t index(EventHandle event) { return reinterpret_cast<size_t>(event) - 1; }
  Machine* m_;
};

// A real group of one rank: what it sends, receives and gathers, and where its entry waits.
struct Transfers {
  struct Message {
    char* at;
    size_t bytes;
    int peer;
  };
  std::vector<Message> sends, recvs, gathers;  // of a gather, `at` is the whole buffer's start
  std::vector<Message> broadcasts;             // `peer` is the root
  StreamHandle stream = nullptr;
  bool arrived = false;
  bool moved = false;
};

// The groups between the ranks, matched by their order.
struct Fabric {
  Machine* machine = nullptr;
  int ranks = 0;
  std::map<int, Transfers> open;  // by rank
  std::vector<std::map<int, std::shared_ptr<Transfers>>> groups;
} fabric;

int rankOf(ncclComm_t comm) { return static_cast<int>(reinterpret_cast<intptr_t>(comm)) - 1; }

void move(const std::map<int, std::shared_ptr<Transfers>>& group) {
  for (const auto& [from, sender] : group) {
    std::map<int, size_t> taken;  // messages to a peer match its receives in order
    for (const auto& send : sender->sends) {
      size_t skip = taken[send.peer]++;
      const Transfers& receiver = *group.at(send.peer);
      const auto slot =
          std::find_if(receiver.recvs.begin(), receiver.recvs.end(),
                       [&, from = from](const auto& r) { return r.peer == from && skip-- == 0; });
      ASSERT_NE(slot, receiver.recvs.end());
      ASSERT_EQ(slot->bytes, send.bytes);
      std::memcpy(slot->at, send.at, send.bytes);
    }
    for (size_t i = 0; i < sender->broadcasts.size(); ++i) {
      const auto& mine = sender->broadcasts[i];
      const auto& source = group.at(mine.peer)->broadcasts[i];
      ASSERT_EQ(source.bytes, mine.bytes);
      if (from != mine.peer) std::memcpy(mine.at, source.at, mine.bytes);
    }
    for (size_t i = 0; i < sender->gathers.size(); ++i) {
      for (const auto& [to, receiver] : group) {
        if (to == from) continue;
        const size_t offset = static_cast<size_t>(from) * sender->gathers[i].bytes;
        std::memcpy(receiver->gathers[i].at + offset, sender->gathers[i].at + offset,
                    sender->gathers[i].bytes);
      }
    }
  }
}

NcclApi queuedApi() {
  NcclApi api;
  api.ncclGroupStart = [] { return ncclSuccess; };
  api.ncclSend = [](const void* p, size_t n, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s) {
    Transfers& t = fabric.open[rankOf(c)];
    t.stream = s;
    t.sends.push_back({const_cast<char*>(static_cast<const char*>(p)), n, peer});
    return ncclSuccess;
  };
  api.ncclRecv = [](void* p, size_t n, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s) {
    Transfers& t = fabric.open[rankOf(c)];
    t.stream = s;
    t.recvs.push_back({static_cast<char*>(p), n, peer});
    return ncclSuccess;
  };
  api.ncclAllGather = [](const void*, void* r, size_t n, ncclDataType_t, ncclComm_t c, cudaStream_t s) {
    Transfers& t = fabric.open[rankOf(c)];
    t.stream = s;
    t.gathers.push_back({static_cast<char*>(r), n, 0});
    return ncclSuccess;
  };
  api.ncclBroadcast = [](const void*, void* r, size_t n, ncclDataType_t, int root, ncclComm_t c,
                         cudaStream_t s) {
    Transfers& t = fabric.open[rankOf(c)];
    t.stream = s;
    t.broadcasts.push_back({static_cast<char*>(r), n, root});
    return ncclSuccess;
  };
  api.ncclGroupEnd = [] {
    std::map<int, std::shared_ptr<Transfers>> group;
    for (auto& [rank, t] : fabric.open) group[rank] = std::make_shared<Transfers>(std::move(t));
    fabric.open.clear();
    for (const auto& [rank, t] : group) {
      fabric.machine->enqueue(t->stream, [group, mine = t] {
        mine->arrived = true;
        for (const auto& [peer, other] : group) {
          if (!other->arrived) return false;
        }
        if (!mine->moved) {
          move(group);
          for (const auto& [peer, other] : group) other->moved = true;
        }
        return true;
      });
    }
    return ncclSuccess;
  };
  return api;
}

struct OpenGate final : CallGate {
  bool enter() override { return true; }
  void leave() override {}
};

constexpr uint32_t kMostRanks = 4;

// What every rank has after a program of four turns, one after the other on the same stream and the last two
// on another, so that a turn meets the scratch of the one before.
std::vector<std::vector<float>> results(uint32_t ranks, bool overlap, uint32_t seed, uint64_t chunk) {
  Machine machine;
  machine.random.seed(seed);
  QueuedDevice device(&machine);
  fabric = {};
  fabric.machine = &machine;
  const NcclApi api = queuedApi();
  std::vector<std::unique_ptr<Compressor>> members;
  for (uint32_t r = 0; r < ranks; ++r) {
    const auto comm = reinterpret_cast<ncclComm_t>(static_cast<intptr_t>(r) + 1);
    auto made = Compressor::create(&api, &device, {comm, r, ranks, {}, chunk, overlap});
    EXPECT_TRUE(made.ok());
    members.push_back(std::move(made).value());
  }
  // Past kPasses passes of the least size, so that slots come round more than once.
  const uint64_t count = 9 * 1024 + 77;
  std::vector<std::vector<float>> reduced(ranks), scattered(ranks), gathered(ranks), moved(ranks);
  std::mt19937 values(7);
  std::normal_distribution<float> normal;
  for (uint32_t r = 0; r < ranks; ++r) {
    reduced[r].resize(count);
    for (float& x : reduced[r]) x = normal(values);
    scattered[r].assign(count / ranks, -1.0f);
    gathered[r].assign(count / ranks * ranks, -1.0f);
    moved[r].assign(count + 4 * (count / ranks * ranks), -1.0f);
  }
  OpenGate gate;
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<std::vector<CompressedCall>> calls(ranks);
    std::vector<CompressedTurn> turns;
    for (uint32_t r = 0; r < ranks; ++r) {
      const auto stream =
          reinterpret_cast<StreamHandle>(static_cast<uintptr_t>(0x100 * (r + 1) + (turn >= 2)));
      CompressedCall reduce{
          CollectiveOp::kAllReduce, reduced[r].data(), reduced[r].data(), count, DataType::kFp32, true};
      CompressedCall scatter{CollectiveOp::kReduceScatter,
                             reduced[r].data(),
                             scattered[r].data(),
                             count / ranks,
                             DataType::kFp32,
                             false};
      CompressedCall gather{CollectiveOp::kAllGather, scattered[r].data(),
                            gathered[r].data(),       count / ranks,
                            DataType::kFp32,          false};
      // The operations that move data, and one that sums at a root, into stretches of one buffer.
      std::vector<CompressedCall> moves;
      float* to = moved[r].data();
      const uint64_t part = count / ranks;
      const uint32_t root = ranks - 1;
      const auto add = [&](CollectiveOp op, const float* from, uint64_t n, uint64_t length) {
        moves.push_back({op, from, to, n, DataType::kFp32, false, {}, nullptr, root});
        to += length;
      };
      add(CollectiveOp::kReduce, reduced[r].data(), count, count);
      add(CollectiveOp::kAlltoAll, gathered[r].data(), part, part * ranks);
      add(CollectiveOp::kBroadcast, gathered[r].data(), part * ranks, part * ranks);
      add(CollectiveOp::kGather, scattered[r].data(), part, part * ranks);
      add(CollectiveOp::kScatter, gathered[r].data(), part, part * ranks);
      calls[r] = turn == 0   ? std::vector{reduce}
                 : turn == 1 ? std::vector{scatter}
                 : turn == 2 ? std::vector{gather, reduce}
                             : moves;
      for (CompressedCall& c : calls[r]) c.stream = stream;
      // The program orders its own streams: the last turn's behind the turns before.
      if (turn == 2) {
        EventHandle e = nullptr;
        EXPECT_TRUE(device.createEvent(&e).ok());
        EXPECT_TRUE(device.recordEvent(e, reinterpret_cast<StreamHandle>(uintptr_t{0x100} * (r + 1))).ok());
        EXPECT_TRUE(device.waitEvent(stream, e).ok());
      }
    }
    for (uint32_t r = 0; r < ranks; ++r) {
      CompressedTurn t;
      t.compressor = members[r].get();
      t.calls = calls[r];
      turns.push_back(std::move(t));
    }
    std::string error;
    EXPECT_EQ(runCompressed(turns, gate, &error), ncclSuccess) << error;
  }
  EXPECT_TRUE(machine.drain()) << "queues that wait for each other";
  std::vector<std::vector<float>> all;
  for (uint32_t r = 0; r < ranks; ++r) {
    for (const auto* v : {&reduced[r], &scattered[r], &gathered[r], &moved[r]}) all.push_back(*v);
  }
  return all;
}

TEST(Overlap, EveryOrderOfEventsGivesTheBitsOfNoOverlap) {
  for (uint32_t ranks = 2; ranks <= kMostRanks; ++ranks) {
    for (const uint64_t chunk : {6144ull, 24576ull}) {
      const auto want = results(ranks, false, 1, chunk);
      for (uint32_t seed = 1; seed <= 60; ++seed) {
        const auto got = results(ranks, true, seed, chunk);
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_EQ(std::memcmp(got[i].data(), want[i].data(), want[i].size() * 4), 0)
              << ranks << " ranks, chunk " << chunk << ", seed " << seed << ", buffer " << i;
        }
      }
    }
  }
}

TEST(Overlap, ScratchStaysWithinItsBound) {
  for (const uint32_t ranks : {2u, 3u, 8u, 64u}) {
    Compressor::Config config{nullptr, 0, ranks, {}, 64u << 20, false};
    const uint64_t whole = Compressor::scratchBytes(config);
    config.overlap = true;
    EXPECT_LE(Compressor::scratchBytes(config), whole + whole / 100 + (1u << 20)) << ranks;
  }
}

// A message of many passes is in flight in two streams; a short one pays for no second stream and no events.
TEST(Overlap, ShortMessagesStayOnTheProgramsStream) {
  Machine machine;
  QueuedDevice device(&machine);
  fabric = {};
  fabric.machine = &machine;
  const NcclApi api = queuedApi();
  auto made = Compressor::create(&api, &device,
                                 {reinterpret_cast<ncclComm_t>(intptr_t{1}), 0, 4, {}, 64u << 20, true});
  ASSERT_TRUE(made.ok());
  const auto streamsOf = [&](uint64_t count) {
    machine.streams.clear();
    std::vector<float> buffer(count);
    CompressedCall call{CollectiveOp::kAllReduce, buffer.data(), buffer.data(), count,
                        DataType::kFp32,          false};
    call.stream = &machine;
    CompressedTurn turn;
    turn.compressor = made.value().get();
    turn.calls = {&call, 1};
    OpenGate gate;
    std::string error;
    EXPECT_EQ(runCompressed({&turn, 1}, gate, &error), ncclSuccess) << error;
    const size_t used = machine.streams.size();
    machine.streams.clear();
    return used;
  };
  EXPECT_EQ(streamsOf(1000), 1u);
  EXPECT_EQ(streamsOf(1u << 20), 2u);
}

}  // namespace
}  // namespace halfwire
