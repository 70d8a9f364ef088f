#include <gtest/gtest.h>

#include <vector>

#include "wire/codec.h"

namespace halfwire {
namespace {

TEST(Reference, SmallIntegersSurvive) {
  std::vector<float> in(200), out(200);
  for (int i = 0; i < 200; ++i) in[i] = static_cast<float>(i % 8 - 4);
  in[5] = 448;
  in[150] = 448;
  for (ElementFormat element : {ElementFormat::kE4M3, ElementFormat::kE5M2}) {
    const WireFormat format{element, ScaleFormat::kE8M0, 128};
    std::vector<uint8_t> packet(packetBytes(format, 200));
    reference::quantize({format, DataType::kFp32, 1, in.data(), 0, 200, 200, packet.data()});
    reference::dequantize({format, DataType::kFp32, 1, packet.data(), 0, 200, out.data(), 0, 200});
    EXPECT_EQ(in, out);
  }
}

}  // namespace
}  // namespace halfwire
