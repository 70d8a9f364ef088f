// The reference and the host's code still give the packets of testdata/golden.json.
#include "wire/golden.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "wire/test_support.h"

namespace halfwire::test {
namespace {

nlohmann::json readGolden() {
  const char* const source = std::getenv("HALFWIRE_SOURCE_DIR");
  std::ifstream file(std::string(source != nullptr ? source : HALFWIRE_SOURCE) +
                     "/src/wire/testdata/golden.json");
  return nlohmann::json::parse(file, nullptr, false);
}

Packet unhex(const std::string& text) {
  Packet bytes(text.size() / 2);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return bytes;
}

TEST(Golden, ReferenceStillAgrees) {
  const nlohmann::json golden = readGolden();
  ASSERT_FALSE(golden.is_discarded()) << "testdata/golden.json is missing or damaged";
  const nlohmann::json made = makeGolden();
  ASSERT_EQ(golden["cases"].size(), made["cases"].size());
  ASSERT_EQ(golden["inputs"], made["inputs"]);
  for (size_t i = 0; i < made["cases"].size(); ++i) EXPECT_EQ(golden["cases"][i], made["cases"][i]);
}

TEST(Golden, HostAgrees) {
  const nlohmann::json golden = readGolden();
  ASSERT_FALSE(golden.is_discarded()) << "testdata/golden.json is missing or damaged";
  ASSERT_EQ(golden["cases"].size(), 96u);
  for (const nlohmann::json& c : golden["cases"]) {
    WireFormat format;
    format.block = c["block"];
    for (ElementFormat f : kElementFormats) {
      if (c["format"] == name(f)) format.element = f;
    }
    for (ScaleFormat f : {ScaleFormat::kFp32, ScaleFormat::kE8M0}) {
      if (c["scale"] == name(f)) format.scale = f;
    }
    DataType type{};
    for (DataType t : kTypes) {
      if (c["type"] == name(t)) type = t;
    }
    const uint64_t n = c["elements"];
    const std::string what = name(format) + " " + name(type);

    Packet packets;
    for (size_t k = 0; k < 3; ++k) {
      const Packet bytes = unhex(golden["inputs"][name(type)][k]);
      Elements in(type, n);
      std::memcpy(in.data(), bytes.data(), n * dataTypeBytes(type));
      Packet packet;
      host::quantize(quantizeJob(format, in, packet));
      EXPECT_EQ(packet, unhex(c["packets"][k])) << what << " rank " << k;
      packets.insert(packets.end(), packet.begin(), packet.end());
      if (k != 0) continue;
      host::quantize(quantizeJob(format, in, packet, {nullptr, -0.75f, true}));
      EXPECT_EQ(packet, unhex(c["scaled"])) << what;
      QuantizeJob stochastic = quantizeJob(format, in, packet);
      stochastic.rounding = {true, 0x0123456789abcdef, uint64_t{1} << 33};
      host::quantize(stochastic);
      EXPECT_EQ(packet, unhex(c["stochastic"])) << what;
    }
    const auto bytesOf = [&](const Elements& e) {
      return Packet(e.data(), e.data() + n * dataTypeBytes(type));
    };
    Elements out(type, n);
    host::dequantize(dequantizeJob(format, packets, out));
    EXPECT_EQ(bytesOf(out), unhex(c["decoded"])) << what;
    Packet sum(packetBytes(format, n));
    host::reduce(reduceJob(format, type, n, packets, 3, 1.0f, true, sum.data()));
    EXPECT_EQ(sum, unhex(c["sum"])) << what;
    host::reduce(reduceJob(format, type, n, packets, 3, 1.0f / 3, true, sum.data()));
    EXPECT_EQ(sum, unhex(c["average"])) << what;
    host::reduce(reduceJob(format, type, n, packets, 3, 1.0f / 3, false, out.data()));
    EXPECT_EQ(bytesOf(out), unhex(c["average_elements"])) << what;
  }
}

}  // namespace
}  // namespace halfwire::test
