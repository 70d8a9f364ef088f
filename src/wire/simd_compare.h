// Comparisons of every SIMD target of this machine with the reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "wire/test_support.h"

namespace halfwire::test {

// The first byte that differs, for the message of a failure.
inline size_t firstDifference(const Packet& a, const Packet& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

inline void expectSamePackets(const WireFormat& format, const Elements& in, Factor factor,
                              const std::string& what) {
  const Packet expected = quantized(format, in, factor);
  for (const Implementation& implementation : simdImplementations()) {
    Packet got;
    implementation.run(quantizeJob(format, in, got, factor));
    ASSERT_TRUE(got == expected) << what << " " << name(format) << " " << name(in.type()) << " "
                                 << implementation.name() << " byte " << firstDifference(expected, got)
                                 << " of " << in.count();
  }
}

inline void expectSameElements(const WireFormat& format, const Packet& packet, DataType type, uint64_t count,
                               uint64_t offset, const std::string& what) {
  const Elements expected = dequantized(format, packet, type, count);
  for (const Implementation& implementation : simdImplementations()) {
    Elements got(type, count, offset);
    implementation.run(dequantizeJob(format, packet, got));
    ASSERT_TRUE(got.intact()) << what << " " << name(format) << " " << implementation.name();
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(got.bits(i), expected.bits(i))
          << what << " " << name(format) << " " << name(type) << " " << implementation.name() << " element "
          << i << " of " << count;
    }
  }
}

// Sums packets and compares both kinds of result. `own` names the packet that is moved elsewhere, -1 for
// none.
inline void expectSameSums(const WireFormat& format, DataType type, uint64_t count, const Packet& packets,
                           uint32_t ranks, float average, int32_t own, const std::string& what) {
  const uint64_t size = packetBytes(format, count);
  Packet in = packets, moved;
  if (own >= 0) {
    const auto start = in.begin() + static_cast<ptrdiff_t>(static_cast<uint64_t>(own) * size);
    moved.assign(start, start + static_cast<ptrdiff_t>(size));
    std::fill(start, start + static_cast<ptrdiff_t>(size), uint8_t{0x11});
  }
  const auto job = [&](bool to_packet, void* out) {
    ReduceJob j = reduceJob(format, type, count, in, ranks, average, to_packet, out);
    j.own_index = own;
    j.own = moved.data();
    return j;
  };
  Packet expected_packet(size, 0x5a);
  Elements expected(type, count);
  reference::reduce(job(true, expected_packet.data()));
  reference::reduce(job(false, expected.data()));
  for (const Implementation& implementation : simdImplementations()) {
    Packet got_packet(size, 0x5b);
    implementation.run(job(true, got_packet.data()));
    ASSERT_TRUE(got_packet == expected_packet)
        << what << " " << name(format) << " " << name(type) << " " << implementation.name() << " ranks "
        << ranks << " byte " << firstDifference(expected_packet, got_packet) << " of " << count;
    Elements got(type, count, 1);
    implementation.run(job(false, got.data()));
    ASSERT_TRUE(got.intact()) << what;
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(got.bits(i), expected.bits(i))
          << what << " " << name(format) << " " << name(type) << " " << implementation.name() << " ranks "
          << ranks << " element " << i;
    }
  }
}

// `ranks` packets of `count` elements cut out of inputs at random.
template <class Random>
Packet randomPackets(const WireFormat& format, DataType type, const std::vector<Input>& inputs,
                     uint64_t count, uint32_t ranks, Random& random) {
  Packet packets;
  for (uint32_t k = 0; k < ranks; ++k) {
    const Elements& all = inputs[random() % inputs.size()].elements;
    Elements part(type, count);
    const uint64_t start = random() % (all.count() - std::min(all.count(), count) + 1);
    for (uint64_t i = 0; i < count; ++i) part.setBits(i, all.bits((start + i) % all.count()));
    const Packet packet = quantized(format, part);
    packets.insert(packets.end(), packet.begin(), packet.end());
  }
  return packets;
}

// Any bytes at all: what a faulty peer could send. Scales are anything, or mostly in range.
template <class Random>
Packet hostilePackets(const WireFormat& format, uint64_t count, uint32_t ranks, bool any_scale,
                      Random& random) {
  const uint64_t size = packetBytes(format, count);
  Packet packets(size * ranks);
  for (uint8_t& byte : packets) byte = static_cast<uint8_t>(random());
  if (any_scale) return packets;
  for (uint32_t k = 0; k < ranks; ++k) {
    uint8_t* const packet = packets.data() + k * size;
    for (uint64_t i = 0; i < count; ++i) {
      if (random() % 8 != 0) packet[i] &= 0xbb;  // few blocks with a code that is not finite
    }
    for (uint64_t b = 0; b < blockCount(format, count); ++b) {
      uint8_t* const scale = packet + scaleOffset(format, count) + b * scaleBytes(format.scale);
      const uint32_t bits = (1 + random() % 240) << 23 | random() >> 9;
      if (format.scale == ScaleFormat::kFp32) std::memcpy(scale, &bits, 4);
    }
  }
  return packets;
}

}  // namespace halfwire::test
