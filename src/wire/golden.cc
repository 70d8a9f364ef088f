#include "wire/golden.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "wire/codec.h"
#include "wire/constants.h"
#include "wire/convert.h"

namespace halfwire {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr uint64_t kInputElements = 256 + 18;  // a case uses its first block + 18
constexpr uint32_t kRanks = 3;

const char* name(ElementFormat f) { return elementFormatName(f); }
const char* name(ScaleFormat f) { return f == ScaleFormat::kFp32 ? "fp32" : "e8m0"; }
const char* name(DataType t) {
  return t == DataType::kBf16 ? "bf16" : t == DataType::kFp16 ? "fp16" : "fp32";
}

std::string hex(std::span<const uint8_t> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

void append(DataType type, float value, Bytes& out) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (type != DataType::kFp32) bits = type == DataType::kBf16 ? floatToBf16(value) : floatToFp16(value);
  const size_t at = out.size();
  out.resize(at + dataTypeBytes(type));
  std::memcpy(out.data() + at, &bits, dataTypeBytes(type));
}

// Input 0 mixes magnitudes and has zeros of both signs, subnormals and values half way between codes. Input 1
// has NaN, infinities and the largest values. Input 2 is N(0,1)-like with a tiny tail, so that short blocks
// flush.
Bytes makeInput(DataType type, uint32_t which) {
  std::mt19937 random(100 + which);
  Bytes out;
  for (uint64_t i = 0; i < kInputElements; ++i) {
    const float uniform = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
    const auto exponent = static_cast<int>(random() % 24) - 16;
    float value = uniform;
    if (which == 0) {
      value = uniform * std::bit_cast<float>(static_cast<uint32_t>(127 + exponent) << 23);
      if (i % 11 == 3) value = i % 2 == 0 ? 0.0f : -0.0f;
      if (i % 17 == 5) value = std::bit_cast<float>(static_cast<uint32_t>(i | (i % 2) << 31));
      if (i % 32 == 7) value = 448.0f;
      if (i % 32 == 8) value = -(static_cast<float>(i % 16) + 8.5f) * 8.0f;
    } else if (which == 1) {
      value = uniform * 1000.0f;
      if (i % 64 == 9) value = std::bit_cast<float>(kCanonicalNan32 - static_cast<uint32_t>(i));
      if (i % 64 == 20) value = std::bit_cast<float>(i % 128 == 20 ? 0x7f800000u : 0xff800000u);
      if (i >= 128 && i % 8 == 1) value = i % 16 == 1 ? typeMax(type) : -typeMax(type);
    } else {
      value = uniform * 3.0f;
      if (i >= 192) value = uniform * 0x1p-120f;
      if (i >= 224) value = uniform * 0x1p-131f;
    }
    append(type, value, out);
  }
  return out;
}

struct Case {
  WireFormat format;
  DataType type;
  uint64_t elements;
};

constexpr Rounding kRounding{true, 0x0123456789abcdef, uint64_t{1} << 33};

Bytes quantize(const Case& c, const Bytes& in, Factor factor = {}, Rounding rounding = {}) {
  Bytes packet(packetBytes(c.format, c.elements));
  reference::quantize(
      {c.format, c.type, 1, in.data(), 0, c.elements, c.elements, packet.data(), 0, factor, rounding});
  return packet;
}

Bytes dequantize(const Case& c, const Bytes& packet) {
  Bytes out(c.elements * dataTypeBytes(c.type));
  reference::dequantize({c.format, c.type, 1, packet.data(), 0, c.elements, out.data(), 0, c.elements});
  return out;
}

Bytes reduce(const Case& c, const Bytes& packets, float average, bool to_packet) {
  ReduceJob job;
  job.format = c.format;
  job.type = c.type;
  job.to_packet = to_packet;
  job.packets = kRanks;
  job.in = packets.data();
  job.in_pitch = packets.size() / kRanks;
  job.average = average;
  job.elements = c.elements;
  Bytes out(to_packet ? packetBytes(c.format, c.elements) : c.elements * dataTypeBytes(c.type));
  job.out = out.data();
  reference::reduce(job);
  return out;
}

}  // namespace

nlohmann::json makeGolden() {
  nlohmann::json document;
  document["layout"] =
      "All bytes are hexadecimal, little endian, as they lie in memory. inputs[type] are the elements of "
      "three ranks. A case "
      "uses the first `elements` of each: packets are the three ranks' packets, scaled is rank 0's packet "
      "under the factor "
      "-0.75, stochastic is it rounded stochastically under the key 0x0123456789abcdef, the first element "
      "being "
      "number 2^33, decoded is rank 0's packet dequantized. sum and average (1/3) are the packets that the "
      "three "
      "packets reduce to, "
      "average_elements is the average in elements.";
  for (DataType type : {DataType::kBf16, DataType::kFp16, DataType::kFp32}) {
    std::vector<Bytes> inputs;
    for (uint32_t k = 0; k < kRanks; ++k) {
      inputs.push_back(makeInput(type, k));
      document["inputs"][name(type)].push_back(hex(inputs.back()));
    }
    for (ElementFormat element : kElementFormats) {
      for (ScaleFormat scale : {ScaleFormat::kFp32, ScaleFormat::kE8M0}) {
        for (uint16_t block : {32, 64, 128, 256}) {
          const Case c{{element, scale, block}, type, block + uint64_t{18}};
          nlohmann::json entry{{"type", name(type)},
                               {"format", name(element)},
                               {"scale", name(scale)},
                               {"block", block},
                               {"elements", c.elements}};
          Bytes packets;
          for (const Bytes& input : inputs) {
            const Bytes packet = quantize(c, input);
            entry["packets"].push_back(hex(packet));
            packets.insert(packets.end(), packet.begin(), packet.end());
          }
          entry["scaled"] = hex(quantize(c, inputs[0], {nullptr, -0.75f, true}));
          entry["stochastic"] = hex(quantize(c, inputs[0], {}, kRounding));
          entry["decoded"] = hex(dequantize(c, quantize(c, inputs[0])));
          entry["sum"] = hex(reduce(c, packets, 1.0f, true));
          entry["average"] = hex(reduce(c, packets, 1.0f / 3, true));
          entry["average_elements"] = hex(reduce(c, packets, 1.0f / 3, false));
          document["cases"].push_back(std::move(entry));
        }
      }
    }
  }
  return document;
}

}  // namespace halfwire
