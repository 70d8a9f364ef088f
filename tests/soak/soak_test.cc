// The soak's own parts: the reference codec stays within the oracle's bounds, wrong results do not, and
// generated programs are legal and repeatable.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "abi/nccl_types.h"
#include "policy/policy.h"
#include "soak/oracle.h"
#include "soak/program.h"
#include "soak/random.h"
#include "soak/values.h"
#include "wire/codec.h"

namespace halfwire::soak {
namespace {

constexpr ncclDataType_t kWireTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};

std::vector<WireFormat> formats() {
  std::vector<WireFormat> all;
  for (const ElementFormat element : kElementFormats) {
    for (const ScaleFormat scale : {ScaleFormat::kFp32, ScaleFormat::kE8M0}) {
      for (const int block : {32, 128, 256}) all.push_back({element, scale, static_cast<uint16_t>(block)});
    }
  }
  return all;
}

// A sum over ranks as the wire does it, by the reference codec.
struct WireSum {
  WireFormat format;
  ncclDataType_t type;
  int ranks;
  uint64_t count;
  bool average;
  bool two_shot;
  std::vector<std::vector<char>> inputs;
  std::vector<double> scalars;
  std::vector<char> output;

  void run() {
    DataType t;
    ASSERT_TRUE(wireDataType(type, &t));
    const uint64_t pitch = packetBytes(format, count);
    std::vector<char> packets(pitch * static_cast<uint64_t>(ranks) + 16), sum(pitch + 16);
    for (int k = 0; k < ranks; ++k) {
      QuantizeJob q;
      q.format = format;
      q.type = t;
      q.in = inputs[k].data();
      q.in_pitch = q.in_total = q.segment_elements = count;
      q.out = packets.data() + static_cast<uint64_t>(k) * pitch;
      q.out_pitch = pitch;
      if (!scalars.empty()) q.factor = {nullptr, static_cast<float>(scalars[k]), true};
      reference::quantize(q);
    }
    ReduceJob r;
    r.format = format;
    r.type = t;
    r.packets = static_cast<uint32_t>(ranks);
    r.in = packets.data();
    r.in_pitch = pitch;
    r.average = average ? 1.0f / static_cast<float>(ranks) : 1.0f;
    r.elements = count;
    r.to_packet = two_shot;
    output.assign(count * ncclTypeBytes(type) + 16, 0);
    r.out = two_shot ? sum.data() : output.data();
    reference::reduce(r);
    if (!two_shot) return;
    DequantizeJob d;
    d.format = format;
    d.type = t;
    d.in = sum.data();
    d.in_pitch = pitch;
    d.segment_elements = d.out_pitch = d.out_total = count;
    d.out = output.data();
    reference::dequantize(d);
  }

  Reduction reduction() const {
    Reduction r;
    r.type = type;
    for (const auto& input : inputs) r.inputs.push_back(input.data());
    r.count = count;
    r.op = average ? Reduction::kAvg : Reduction::kSum;
    r.scalars = scalars;
    r.travel = two_shot ? Travel::kTwoShot : Travel::kOneShot;
    r.format = format;
    return r;
  }
};

WireSum makeSum(const WireFormat& format, ncclDataType_t type, Profile profile, uint64_t key) {
  Random random(key);
  WireSum s{format,
            type,
            static_cast<int>(random.between(2, 5)),
            static_cast<uint64_t>(random.between(1, 1500)),
            random.chance(50),
            random.chance(50),
            {},
            {},
            {}};
  for (int k = 0; k < s.ranks; ++k) {
    s.inputs.emplace_back(s.count * ncclTypeBytes(type) + 8);
    generate(profile, type, mix(key, static_cast<uint64_t>(k)), s.count, s.inputs.back().data());
    if (key % 3 != 0) continue;
    char scalar[8];
    store(type, scalar, 0, random.pick<double>({1, -0.37, 5, 0, 1000}));
    s.scalars.push_back(load(type, scalar, 0));
  }
  if (key % 3 == 0) s.average = false;
  return s;
}

TEST(Oracle, ReferenceCodecIsWithinItsBounds) {
  double worst = 0;
  uint64_t key = 1;
  for (const WireFormat& format : formats()) {
    for (const ncclDataType_t type : kWireTypes) {
      for (const Profile profile : {Profile::kNormal, Profile::kMixed, Profile::kWild, Profile::kSpecials}) {
        for (int i = 0; i < 6; ++i) {
          WireSum s = makeSum(format, type, profile, ++key);
          s.run();
          const Verdict verdict = checkReduction(s.reduction(), s.output.data());
          EXPECT_EQ(verdict.error, "") << profileName(profile) << " " << dataTypeName(type) << " block "
                                       << format.block << " ranks " << s.ranks;
          worst = std::max(worst, verdict.worst);
        }
      }
    }
  }
  // A bound that nothing comes near would prove little.
  EXPECT_GT(worst, 0.6);
  EXPECT_LE(worst, 1.0);
}

TEST(Oracle, RefusesWrongResults) {
  uint64_t key = 5000;
  for (const WireFormat& format : formats()) {
    for (const ncclDataType_t type : kWireTypes) {
      WireSum s = makeSum(format, type, Profile::kNormal, ++key);
      s.scalars.clear();
      s.run();
      ASSERT_EQ(checkReduction(s.reduction(), s.output.data()).error, "");
      const std::vector<char> good = s.output;
      const uint64_t at = key % s.count;
      const auto refused = [&](double value) {
        s.output = good;
        store(type, s.output.data(), at, value);
        return !checkReduction(s.reduction(), s.output.data()).error.empty();
      };
      double scale = 0;  // of the sum's block
      for (uint64_t i = at / format.block * format.block;
           i < std::min(s.count, (at / format.block + 1) * format.block); ++i) {
        scale = std::max(scale, std::fabs(load(type, good.data(), i)));
      }
      const double value = load(type, good.data(), at);
      EXPECT_TRUE(refused(NAN));
      EXPECT_TRUE(refused(INFINITY));
      EXPECT_TRUE(refused(value + scale + 1));
      // Everything half as large again, as if one of two equal ranks had been left out.
      s.output = good;
      for (uint64_t i = 0; i < s.count; ++i)
        store(type, s.output.data(), i, load(type, good.data(), i) * 1.5);
      EXPECT_NE(checkReduction(s.reduction(), s.output.data()).error, "");
    }
  }
}

TEST(Oracle, BadNumbersHaveToStayVisible) {
  WireSum s = makeSum({}, ncclFloat16, Profile::kNormal, 10);
  s.average = false;
  s.scalars.clear();
  for (int k = 0; k < s.ranks; ++k) store(ncclFloat16, s.inputs[k].data(), 0, 60000);
  s.run();
  EXPECT_EQ(checkReduction(s.reduction(), s.output.data()).error, "");
  EXPECT_FALSE(std::isfinite(load(ncclFloat16, s.output.data(), 0)));
  store(ncclFloat16, s.output.data(), 0, 65504);
  EXPECT_NE(checkReduction(s.reduction(), s.output.data()).error, "") << "a clamped overflow";
  store(ncclFloat16, s.output.data(), 0, INFINITY);
  store(ncclFloat16, s.inputs[1].data(), 0, NAN);
  EXPECT_EQ(checkReduction(s.reduction(), s.output.data()).error, "");
  store(ncclFloat16, s.output.data(), 0, 0);
  EXPECT_NE(checkReduction(s.reduction(), s.output.data()).error, "") << "a NaN that became 0";
}

TEST(Oracle, ExactCallsHaveNoRoom) {
  for (const ncclDataType_t type : {ncclBfloat16, ncclFloat16, ncclFloat32, ncclFloat64}) {
    Reduction r;
    r.type = type;
    r.count = 1000;
    std::vector<std::vector<char>> inputs;
    for (int k = 0; k < 3; ++k) {
      inputs.emplace_back(r.count * ncclTypeBytes(type));
      generate(Profile::kNormal, type, static_cast<uint64_t>(k), r.count, inputs.back().data());
    }
    for (const auto& input : inputs) r.inputs.push_back(input.data());
    std::vector<char> out(r.count * ncclTypeBytes(type));
    for (uint64_t i = 0; i < r.count; ++i) {
      long double sum = 0;
      for (const auto& input : inputs) sum += load(type, input.data(), i);
      store(type, out.data(), i, static_cast<double>(sum));
    }
    EXPECT_EQ(checkReduction(r, out.data()).error, "") << dataTypeName(type);
    // A result of the wire's precision is not exact.
    for (uint64_t i = 0; i < r.count; ++i)
      store(type, out.data(), i, load(type, out.data(), i) * (1 + 0x1p-4));
    EXPECT_NE(checkReduction(r, out.data()).error, "") << dataTypeName(type);
  }
}

TEST(Values, ConversionsAreExact) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    EXPECT_TRUE(std::isnan(fromBf16(half)) || toBf16(fromBf16(half)) == half) << half;
    EXPECT_TRUE(std::isnan(fromFp16(half)) || toFp16(fromFp16(half)) == half) << half;
  }
  EXPECT_EQ(fromFp16(toFp16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(fromFp16(toFp16(65520.0f))));
  EXPECT_EQ(toFp16(1.0f + 0x1p-11f), toFp16(1.0f)) << "ties go to even";
  EXPECT_EQ(toBf16(1.0f + 3 * 0x1p-8f), toBf16(1.0f + 0x1p-6f));
}

TEST(Programs, AreRepeatable) {
  for (uint64_t seed = 1; seed < 40; ++seed) {
    EXPECT_EQ(describeProgram(generateProgram(seed, {})), describeProgram(generateProgram(seed, {})));
  }
  EXPECT_NE(describeProgram(generateProgram(1, {})), describeProgram(generateProgram(2, {})));
}

// What NCCL asks of a program: see program.h. Checked from the ranks' own sequences, without the generator's
// help.
TEST(Programs, AreLegal) {
  std::set<OpKind> kinds;
  int grouped = 0, ungrouped = 0, empty = 0, largest = 0, non_blocking = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    const Program program = generateProgram(seed, {});
    for (const Step& step : program.steps) {
      std::map<int, std::vector<std::vector<int>>> collectives;  // communicator -> each member's order
      std::map<std::vector<int>, std::vector<std::vector<int>>>
          messages;                       // (communicator, from, to) -> each end's order
      std::map<int, std::set<bool>> how;  // communicator -> grouped and not
      std::vector<std::vector<int>> first_calls;
      for (int rank = 0; rank < program.ranks; ++rank) {
        const RankStep& mine = step.ranks[rank];
        std::map<int, std::vector<int>> own;
        std::map<std::vector<int>, std::vector<int>> sent, received;
        std::vector<int> comms;
        for (size_t i = 0; i < mine.order.size(); ++i) {
          const Op& op = program.ops[mine.order[i]];
          kinds.insert(op.kind);
          empty += op.count == 0 ? 1 : 0;
          largest += op.count * (op.kind == OpKind::kAllReduce ? 1 : 4) >= (1u << 19) ? 1 : 0;
          ASSERT_GE(program.rankIn(op.comm, rank), 0)
              << "seed " << seed << ": a call on another's communicator";
          const bool alone = op.kind == OpKind::kSendRecv;
          const bool message = ordersAsMessage(program, op, {});
          if (!message) own[op.comm].push_back(op.id);
          const int me = program.rankIn(op.comm, rank);
          const int members = static_cast<int>(program.comms[op.comm].members.size());
          for (int p = 0; p < members; ++p) {
            if (sendsBetween(op, me, p) && (!alone || mine.sends[i]) && op.count + (alone ? 1 : 0) > 0)
              sent[{op.comm, me, p}].push_back(op.id);
            if (sendsBetween(op, p, me) && (!alone || !mine.sends[i]) && op.count + (alone ? 1 : 0) > 0)
              received[{op.comm, p, me}].push_back(op.id);
          }
          EXPECT_TRUE(!alone || op.root != op.peer || mine.grouped)
              << "seed " << seed << ": a message to oneself alone";
          if (op.count == 0 && !alone) continue;
          if (std::find(comms.begin(), comms.end(), op.comm) == comms.end()) comms.push_back(op.comm);
          if (!message) how[op.comm].insert(mine.grouped);
        }
        (mine.grouped ? grouped : ungrouped) += mine.order.empty() ? 0 : 1;
        std::set<bool> kinds_of_comm;
        for (const int id : mine.order) kinds_of_comm.insert(program.comms[program.ops[id].comm].blocking);
        EXPECT_LE(kinds_of_comm.size(), 1u) << "seed " << seed << ": blocking and not in one group";
        non_blocking += kinds_of_comm.count(false) != 0 ? 1 : 0;
        first_calls.push_back(comms);
        for (auto& [comm, order] : own) collectives[comm].push_back(order);
        for (auto& [pair, order] : sent) messages[pair].push_back(order);
        for (auto& [pair, order] : received) messages[pair].push_back(order);
      }
      for (const auto& [comm, orders] : collectives) {
        ASSERT_EQ(orders.size(), program.comms[comm].members.size())
            << "seed " << seed << ": a member does not call";
        std::set<int> real;
        for (const int id : orders[0]) {
          if (program.ops[id].count > 0) real.insert(id);
        }
        for (const auto& order : orders) EXPECT_EQ(order, orders[0]) << "seed " << seed;
        EXPECT_TRUE(real.size() < 2 || how[comm].size() == 1u)
            << "seed " << seed << ": some members group and some do not";
      }
      for (const auto& [pair, orders] : messages) {
        ASSERT_EQ(orders.size(), 2u) << "seed " << seed << ": a message with one end";
        EXPECT_EQ(orders[0], orders[1]) << "seed " << seed;
      }
      // The communicators' orders of all ranks agree with one order.
      std::map<std::pair<int, int>, bool> before;
      for (const auto& comms : first_calls) {
        for (size_t i = 0; i < comms.size(); ++i) {
          for (size_t k = i + 1; k < comms.size(); ++k) {
            before[{comms[i], comms[k]}] = true;
            EXPECT_EQ(before.count({comms[k], comms[i]}), 0u) << "seed " << seed << ": communicators cross";
          }
        }
      }
    }
  }
  EXPECT_EQ(kinds.size(), 9u);
  EXPECT_GT(grouped, 1000);
  EXPECT_GT(ungrouped, 1000);
  EXPECT_GT(empty, 100);
  EXPECT_GT(non_blocking, 500);
  EXPECT_GT(largest, 20);
}

}  // namespace
}  // namespace halfwire::soak
