// Which bits come out: equal to what the format's reference gives, whatever the chunks, groups, streams and
// timing; NCCL's own where the library is switched off; and half the bytes on the wire.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "abi/host_engine.h"
#include "programs/programs.h"
#include "soak/random.h"
#include "wire/codec.h"

namespace halfwire::testing {
namespace {

using soak::Profile;

class Bits : public ::testing::Test {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  }
};

DataType wireType(ncclDataType_t type) {
  return type == ncclBfloat16 ? DataType::kBf16 : type == ncclFloat16 ? DataType::kFp16 : DataType::kFp32;
}

struct Case {
  enum Kind { kAllReduce, kReduceScatter, kAllGather } kind;
  ncclDataType_t type;
  ncclRedOp_t op;
  uint64_t count;
  Profile profile;
};

std::vector<Case> cases(int ranks) {
  std::vector<Case> all;
  const uint64_t w = static_cast<uint64_t>(ranks);
  int i = 0;
  for (const uint64_t count : {uint64_t{1}, w, w + 1, uint64_t{127}, uint64_t{128}, 128 * w, 128 * w + 1,
                               uint64_t{5000}, uint64_t{70001}}) {
    for (const Case::Kind kind : {Case::kAllReduce, Case::kReduceScatter, Case::kAllGather}) {
      const ncclDataType_t type = i % 3 == 0 ? ncclBfloat16 : i % 3 == 1 ? ncclFloat16 : ncclFloat32;
      const Profile profile = i % 4 == 0   ? Profile::kWild
                              : i % 4 == 1 ? Profile::kSpecials
                              : i % 4 == 2 ? Profile::kNormal
                                           : Profile::kMixed;
      all.push_back({kind, type, i % 2 == 0 ? ncclSum : ncclAvg, count, profile});
      ++i;
    }
  }
  return all;
}

uint64_t inputCount(const Case& c, int ranks) {
  return c.kind == Case::kReduceScatter ? c.count * static_cast<uint64_t>(ranks) : c.count;
}
uint64_t outputCount(const Case& c, int ranks) {
  return c.kind == Case::kAllGather ? c.count * static_cast<uint64_t>(ranks) : c.count;
}

std::vector<char> inputOf(const Case& c, size_t index, int rank, int ranks) {
  const uint64_t n = inputCount(c, ranks);
  std::vector<char> bytes(n * (c.type == ncclFloat32 ? 4 : 2) + 8);
  soak::generate(c.profile, c.type, soak::mix(index + 77, static_cast<uint64_t>(rank)), n, bytes.data());
  return bytes;
}

ncclResult_t call(const Case& c, const Buffer& in, const Buffer& out, ncclComm_t comm, cudaStream_t stream) {
  switch (c.kind) {
    case Case::kAllReduce:
      return ncclAllReduce(in.data(), out.data(), c.count, c.type, c.op, comm, stream);
    case Case::kReduceScatter:
      return ncclReduceScatter(in.data(), out.data(), c.count, c.type, c.op, comm, stream);
    default:
      return ncclAllGather(in.data(), out.data(), c.count, c.type, comm, stream);
  }
}

// --- equal to the reference
// -----------------------------------------------------------------------------------------

// A packet of elements [first, first + n) of a buffer.
std::vector<char> pack(const WireFormat& f, DataType type, const std::vector<char>& buffer, uint64_t first,
                       uint64_t n) {
  std::vector<char> packet(packetBytes(f, n) + kPacketAlignment);
  QuantizeJob job;
  job.format = f;
  job.type = type;
  job.in = buffer.data() + first * dataTypeBytes(type);
  job.in_pitch = job.in_total = job.segment_elements = n;
  job.out = packet.data();
  job.out_pitch = packetBytes(f, n);
  reference::quantize(job);
  return packet;
}

// The sum of equally long packets, as a packet or as elements.
std::vector<char> sum(const WireFormat& f, DataType type, const std::vector<std::vector<char>>& packets,
                      uint64_t n, float average, bool to_packet) {
  const uint64_t pitch = packetBytes(f, n);
  std::vector<char> in(pitch * packets.size() + kPacketAlignment);
  for (size_t k = 0; k < packets.size(); ++k) memcpy(in.data() + k * pitch, packets[k].data(), pitch);
  std::vector<char> out((to_packet ? pitch : n * dataTypeBytes(type)) + kPacketAlignment);
  ReduceJob job;
  job.format = f;
  job.type = type;
  job.to_packet = to_packet;
  job.packets = static_cast<uint32_t>(packets.size());
  job.in = in.data();
  job.in_pitch = pitch;
  job.average = average;
  job.elements = n;
  job.out = out.data();
  reference::reduce(job);
  return out;
}

void unpack(const WireFormat& f, DataType type, const std::vector<char>& packet, uint64_t n, char* out) {
  DequantizeJob job;
  job.format = f;
  job.type = type;
  job.in = packet.data();
  job.in_pitch = packetBytes(f, n);
  job.segment_elements = job.out_pitch = job.out_total = n;
  job.out = out;
  reference::dequantize(job);
}

// What `rank` has to hold, step by step as docs/wire-format.md and the algorithms say, without chunks.
std::vector<char> expected(const WireFormat& f, const Case& c, size_t index, int rank, int ranks) {
  const DataType type = wireType(c.type);
  const uint64_t e = dataTypeBytes(type);
  const float average = c.op == ncclAvg ? 1.0f / static_cast<float>(ranks) : 1.0f;
  std::vector<std::vector<char>> inputs;
  for (int k = 0; k < ranks; ++k) inputs.push_back(inputOf(c, index, k, ranks));
  std::vector<char> out(outputCount(c, ranks) * e);
  const auto packets = [&](uint64_t first, uint64_t n) {
    std::vector<std::vector<char>> all;
    for (const auto& input : inputs) all.push_back(pack(f, type, input, first, n));
    return all;
  };
  if (c.kind == Case::kAllGather) {
    for (int k = 0; k < ranks; ++k) {
      unpack(f, type, pack(f, type, inputs[k], 0, c.count), c.count,
             out.data() + static_cast<uint64_t>(k) * c.count * e);
    }
  } else if (c.kind == Case::kReduceScatter || ranks == 2) {
    // One rounding to codes: the sum of the packets goes straight to elements.
    const uint64_t first = c.kind == Case::kReduceScatter ? static_cast<uint64_t>(rank) * c.count : 0;
    const auto elements = sum(f, type, packets(first, c.count), c.count, average, false);
    memcpy(out.data(), elements.data(), c.count * e);
  } else {
    const uint64_t shard = shardElements(f, c.count, static_cast<uint32_t>(ranks));
    for (uint64_t first = 0; first < c.count; first += shard) {
      const uint64_t n = std::min(shard, c.count - first);
      unpack(f, type, sum(f, type, packets(first, n), n, average, true), n, out.data() + first * e);
    }
  }
  return out;
}

WireFormat formatOf(const std::string& name) {
  WireFormat f;
  for (const ElementFormat each : kElementFormats) {
    if (name.starts_with(elementFormatName(each))) f.element = each;
  }
  f.scale = name.find("e8m0") != std::string::npos ? ScaleFormat::kE8M0 : ScaleFormat::kFp32;
  f.block = static_cast<uint16_t>(std::stoi(name.substr(name.find('/') + 1)));
  return f;
}

Environment formatEnvironment(const std::string& name) {
  const size_t a = name.find('/'), b = name.rfind('/');
  return {{"HALFWIRE_FORMAT", name.substr(0, a)},
          {"HALFWIRE_BLOCK", name.substr(a + 1, b - a - 1)},
          {"HALFWIRE_SCALE", name.substr(b + 1)}};
}

RANK_PROGRAM(EqualsReference) {
  const WireFormat f = formatOf(rank.args().at(0));
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  const auto all = cases(rank.ranks());
  for (size_t i = 0; i < all.size(); ++i) {
    Rank::note("case", static_cast<long>(i));
    const Case& c = all[i];
    Buffer in(c.type, inputCount(c, rank.ranks())), out(c.type, outputCount(c, rank.ranks()));
    memcpy(in.data(), inputOf(c, i, rank.rank(), rank.ranks()).data(), in.bytes());
    CHECK_NCCL(call(c, in, out, comm, stream));
    stream.synchronize();
    const std::vector<char> want = expected(f, c, i, rank.rank(), rank.ranks());
    if (memcmp(want.data(), out.data(), out.bytes()) == 0) continue;
    for (uint64_t k = 0; k < out.count(); ++k) {
      if (memcmp(want.data() + k * (out.bytes() / out.count()), out.at(k), out.bytes() / out.count()) == 0)
        continue;
      RANK_FAIL("case " + std::to_string(i) + " kind " + std::to_string(c.kind) + " count " +
                std::to_string(c.count) + " type " + std::to_string(c.type) + ": element " +
                std::to_string(k) + " is " + std::to_string(out.get(k)) + ", the reference gives " +
                std::to_string(soak::load(c.type, want.data(), k)));
    }
  }
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_F(Bits, EqualTheReference) {
  for (const int ranks : {2, 3, 4}) {
    for (const char* format : {"e4m3/128/fp32", "e5m2/32/e8m0", "int8/256/fp32", "e3m4/64/e8m0"}) {
      const LaunchOutcome outcome =
          launchWith("EqualsReference", ranks, with(compressing(), formatEnvironment(format)), {format});
      EXPECT_TRUE(outcome.ok()) << format << ", " << ranks << " ranks\n" << outcome.describe();
    }
  }
}

TEST_F(Bits, EqualTheReferenceInSmallChunks) {
  for (const int ranks : {2, 3}) {
    const LaunchOutcome outcome =
        launchWith("EqualsReference", ranks,
                   with(compressing(), {{"HALFWIRE_CHUNK_BYTES", "1KiB"}, {"HALFWIRE_HOST_DELAY_US", "50"}}),
                   {"e4m3/128/fp32"});
    EXPECT_TRUE(outcome.ok()) << ranks << " ranks\n" << outcome.describe();
  }
}

// --- equal however the work is cut and timed
// ------------------------------------------------------------------------

// Runs all cases and reports one hash. Arguments: "alone", "grouped", "streams" or "inplace".
RANK_PROGRAM(HashOfResults) {
  const std::string how = rank.args().at(0);
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream, other;
  const auto all = cases(rank.ranks());
  std::vector<std::unique_ptr<Buffer>> in, out;
  for (size_t i = 0; i < all.size(); ++i) {
    const Case& c = all[i];
    in.push_back(std::make_unique<Buffer>(c.type, inputCount(c, rank.ranks())));
    out.push_back(std::make_unique<Buffer>(c.type, outputCount(c, rank.ranks())));
    memcpy(in.back()->data(), inputOf(c, i, rank.rank(), rank.ranks()).data(), in.back()->bytes());
  }
  const bool grouped = how == "grouped";
  for (size_t i = 0; i < all.size(); ++i) {
    if (grouped && i % 7 == 0) CHECK_NCCL(ncclGroupStart());
    const bool in_place = how == "inplace" && all[i].kind == Case::kAllReduce;
    if (in_place) memcpy(out[i]->data(), in[i]->data(), in[i]->bytes());
    CHECK_NCCL(call(all[i], in_place ? *out[i] : *in[i], *out[i], comm,
                    how == "streams" && i % 2 == 1 ? other : stream));
    if (grouped && (i % 7 == 6 || i + 1 == all.size())) CHECK_NCCL(ncclGroupEnd());
  }
  stream.synchronize();
  other.synchronize();
  uint64_t hash = 1;
  for (size_t i = 0; i < all.size(); ++i) {
    hash = soak::mix(hash, out[i]->hash());
    // Law 1: AllReduce and AllGather give everyone the same bits.
    if (all[i].kind == Case::kReduceScatter) continue;
    const auto hashes = rank.allGather(hex(out[i]->hash()));
    for (const std::string& each : hashes) {
      if (each != hashes[0]) RANK_FAIL("case " + std::to_string(i) + ": ranks hold different bits");
    }
  }
  rank.report("hash", hex(hash));
  CHECK_NCCL(ncclCommDestroy(comm));
}

// The hashes of all ranks, or a test failure.
std::string hashes(int ranks, const Environment& env, const std::string& how, bool preload = true) {
  const LaunchOutcome outcome = launchWith("HashOfResults", ranks, env, {how}, preload);
  EXPECT_TRUE(outcome.ok()) << how << "\n" << outcome.describe();
  std::string all;
  for (const RankOutcome& rank : outcome.ranks) {
    const auto found = rank.reports.find("hash");
    all += found == rank.reports.end() ? "none " : found->second.value + " ";
  }
  return all;
}

TEST_F(Bits, DoNotDependOnChunksGroupsStreamsOrTime) {
  for (const int ranks : {2, 3}) {
    const std::string expected = hashes(ranks, compressing(), "alone");
    for (const char* chunk : {"1KiB", "3000", "64KiB", "1MiB"}) {
      EXPECT_EQ(hashes(ranks, with(compressing(), {{"HALFWIRE_CHUNK_BYTES", chunk}}), "alone"), expected)
          << chunk;
    }
    EXPECT_EQ(hashes(ranks, with(compressing(), {{"HALFWIRE_CHUNK_BYTES", "4KiB"}}), "grouped"), expected);
    EXPECT_EQ(hashes(ranks, compressing(), "grouped"), expected);
    EXPECT_EQ(hashes(ranks, compressing(), "inplace"), expected);
    EXPECT_EQ(hashes(ranks, with(compressing(), {{"HALFWIRE_HOST_DELAY_US", "2000"}}), "streams"), expected);
    EXPECT_EQ(
        hashes(ranks,
               with(compressing(), {{"HALFWIRE_HOST_DELAY_US", "2000"}, {"HALFWIRE_CHUNK_BYTES", "8KiB"}}),
               "streams"),
        expected);
    // And the comparison can fail: another format gives other bits.
    EXPECT_NE(hashes(ranks, with(compressing(), {{"HALFWIRE_FORMAT", "e5m2"}}), "alone"), expected);
  }
}

// --- off is off
// -----------------------------------------------------------------------------------------------------

TEST_F(Bits, OffIsTheSameAsWithoutTheLibrary) {
  const std::string bare = hashes(3, {}, "alone", false);
  EXPECT_EQ(hashes(3, {{"HALFWIRE_MODE", "off"}}, "alone"), bare);
  EXPECT_EQ(hashes(3, {}, "grouped"), bare);
  EXPECT_EQ(hashes(3, passing(), "alone"), bare);
  EXPECT_EQ(hashes(3, with(compressing(), {{"HALFWIRE_MIN_BYTES", "1GiB"}}), "grouped"), bare);
  EXPECT_NE(hashes(3, compressing(), "alone"), bare);
}

// --- two streams on one communicator
// --------------------------------------------------------------------------------

// Calls alternate between two streams that are never synchronised in between; every call's input is made on
// its stream by the call before it, so an order that is not kept gives wrong numbers.
RANK_PROGRAM(TwoStreams) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream streams[2];
  const int w = rank.ranks();
  const size_t count = 40000;
  Buffer a0(ncclBfloat16, count), a1(ncclBfloat16, count), b0(ncclBfloat16, count), b1(ncclBfloat16, count);
  a0.fill(1);
  b0.fill(2);
  for (int round = 0; round < 6; ++round) {
    // Averages of equal numbers are the number; each pass through the wire must give it back.
    CHECK_NCCL(allReduce(a0, a1, comm, streams[0], ncclAvg));
    CHECK_NCCL(allReduce(b0, b1, comm, streams[1], ncclSum));
    CHECK_CUDA(cudaMemsetAsync(a0.data(), 0xff, a0.bytes(), streams[0]));
    CHECK_CUDA(cudaMemcpyAsync(a0.data(), a1.data(), a0.bytes(), cudaMemcpyDeviceToDevice, streams[0]));
    CHECK_CUDA(cudaMemsetAsync(a1.data(), 0xff, a1.bytes(), streams[0]));
    CHECK_CUDA(cudaMemsetAsync(b0.data(), 0xff, b0.bytes(), streams[1]));
    CHECK_CUDA(cudaMemcpyAsync(b0.data(), b1.data(), b0.bytes(), cudaMemcpyDeviceToDevice, streams[1]));
    CHECK_CUDA(cudaMemsetAsync(b1.data(), 0xff, b1.bytes(), streams[1]));
  }
  for (const Stream& s : streams) s.synchronize();
  a0.expect(1, "averages");
  b0.expect(2 * std::pow(w, 6), "sums");
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_F(Bits, TwoStreamsOnOneCommunicator) {
  for (const int ranks : {2, 4}) {
    for (const char* delay : {"0", "300", "2000"}) {
      const LaunchOutcome outcome = launchWith(
          "TwoStreams", ranks,
          with(compressing(), {{"HALFWIRE_HOST_DELAY_US", delay}, {"HALFWIRE_CHUNK_BYTES", "16KiB"}}));
      EXPECT_TRUE(outcome.ok()) << ranks << " ranks, delay " << delay << "\n" << outcome.describe();
    }
  }
}

// --- bytes
// ----------------------------------------------------------------------------------------------------------

// Reports what one call of each kind hands to the links.
RANK_PROGRAM(EgressOfCalls) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  const uint64_t count = 1 << 18, w = static_cast<uint64_t>(rank.ranks());
  for (const Case::Kind kind : {Case::kAllReduce, Case::kReduceScatter, Case::kAllGather}) {
    const Case c{kind, ncclBfloat16, ncclSum, kind == Case::kAllReduce ? count : count / w, Profile::kNormal};
    Buffer in(c.type, inputCount(c, rank.ranks())), out(c.type, outputCount(c, rank.ranks()));
    CHECK_NCCL(call(c, in, out, comm, stream));
    stream.synchronize();
    rank.barrier();
    const uint64_t before = halfwire_host_egress_bytes();
    CHECK_NCCL(call(c, in, out, comm, stream));
    stream.synchronize();
    rank.report("egress" + std::to_string(kind), std::to_string(halfwire_host_egress_bytes() - before));
    rank.barrier();
  }
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_F(Bits, HalfTheBytesOfAnExactRing) {
  for (const int ranks : {2, 4}) {
    const LaunchOutcome wire = launchWith("EgressOfCalls", ranks, compressing());
    const LaunchOutcome off = launchWith("EgressOfCalls", ranks, {{"HALFWIRE_MODE", "off"}});
    ASSERT_TRUE(wire.ok()) << wire.describe();
    ASSERT_TRUE(off.ok()) << off.describe();
    for (int rank = 0; rank < ranks; ++rank) {
      for (const Case::Kind kind : {Case::kAllReduce, Case::kReduceScatter, Case::kAllGather}) {
        const double ring = (kind == Case::kAllReduce ? 2.0 : 1.0) * (ranks - 1) / ranks * (1 << 18) * 2;
        const std::string key = "egress" + std::to_string(kind);
        const double sent = std::stod(wire.ranks[rank].reports.at(key).value);
        const double exact = std::stod(off.ranks[rank].reports.at(key).value);
        EXPECT_LE(sent, 0.5170 * ring) << "kind " << kind << ", rank " << rank << " of " << ranks;
        EXPECT_GE(sent, 0.5 * ring) << "kind " << kind << ", rank " << rank << " of " << ranks;
        EXPECT_GE(exact, 0.99 * ring) << "kind " << kind << ", rank " << rank << " of " << ranks;
      }
    }
  }
}

// --- law 3
// ----------------------------------------------------------------------------------------------------------

// fp16 sums that overflow stay visible, bf16's largest number stays finite, and a bad number on one rank is
// bad on all.
RANK_PROGRAM(BadNumbers) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  Buffer half(ncclFloat16, 300), big(ncclBfloat16, 300);
  half.fill(0.5);
  soak::store(ncclFloat16, half.data(), 7, 60000);
  soak::store(ncclFloat16, half.data(), 8, rank.rank() == 0 ? 60000 : 0);
  soak::store(ncclFloat16, half.data(), 9, rank.rank() == 1 ? NAN : 1);
  soak::store(ncclFloat16, half.data(), 10, rank.rank() == 0 ? -INFINITY : 1);
  const double largest = 255 * 0x1p120;
  big.fill(1);
  soak::store(ncclBfloat16, big.data(), 5, rank.rank() == 0 ? largest : 0);
  Buffer mean(ncclBfloat16, 300);
  mean.fill(largest);
  CHECK_NCCL(allReduce(half, half, comm, stream));
  CHECK_NCCL(allReduce(big, big, comm, stream));
  CHECK_NCCL(allReduce(mean, mean, comm, stream, ncclAvg));
  stream.synchronize();
  for (size_t i = 0; i < half.count(); ++i) {
    const bool bad = i == 7 || i == 9 || i == 10;
    if (std::isfinite(half.get(i)) == bad)
      RANK_FAIL("fp16 element " + std::to_string(i) + " is " + std::to_string(half.get(i)));
  }
  for (size_t i = 0; i < big.count(); ++i) {
    if (!std::isfinite(big.get(i))) RANK_FAIL("bf16 element " + std::to_string(i) + " is not finite");
    if (!std::isfinite(mean.get(i))) RANK_FAIL("the average of largest numbers is not finite");
  }
  if (big.get(5) < 0.9 * largest) RANK_FAIL("the largest number became " + std::to_string(big.get(5)));
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_F(Bits, BadNumbersStayVisible) {
  for (const int ranks : {2, 3}) {
    for (const char* format : {"e4m3/128/fp32", "e4m3/128/e8m0", "e5m2/32/e8m0", "int8/64/fp32"}) {
      const LaunchOutcome outcome =
          launchWith("BadNumbers", ranks, with(compressing(), formatEnvironment(format)));
      EXPECT_TRUE(outcome.ok()) << format << ", " << ranks << " ranks\n" << outcome.describe();
    }
  }
}

}  // namespace
}  // namespace halfwire::testing
