// Where segments, packets and their parts lie, also beyond 2^32 bytes.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <random>

#include "wire/measure.h"
#include "wire/test_support.h"

namespace halfwire::test {
namespace {

// A large range of addresses whose pages exist only once they are touched.
class SparseMemory {
 public:
  explicit SparseMemory(uint64_t bytes)
      : bytes_(bytes),
        data_(static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
  ~SparseMemory() {
    if (ok()) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  bool ok() const { return data_ != MAP_FAILED; }
  uint8_t* data() const { return data_; }

 private:
  uint64_t bytes_;
  uint8_t* data_;
};

Elements numbers(DataType type, uint64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss;
  Elements out(type, count);
  for (uint64_t i = 0; i < count; ++i) out.set(i, gauss(random));
  return out;
}

Elements cut(const Elements& in, uint64_t start, uint64_t count) {
  Elements out(in.type(), count);
  std::memcpy(out.data(), in.data() + start * dataTypeBytes(in.type()), count * dataTypeBytes(in.type()));
  return out;
}

struct Path {
  const char* name;
  void (*quantize)(const QuantizeJob&);
  void (*dequantize)(const DequantizeJob&);
  void (*reduce)(const ReduceJob&);
};
constexpr Path kPaths[] = {{"reference", reference::quantize, reference::dequantize, reference::reduce},
                           {"host", host::quantize, host::dequantize, host::reduce}};

TEST(Layout, Sizes) {
  const WireFormat format;
  EXPECT_EQ(packetBytes(format, 0), 0u);
  EXPECT_EQ(packetBytes(format, 1), 32u);
  EXPECT_EQ(packetBytes(format, 128), 144u);
  EXPECT_EQ(packetBytes(format, 129), 160u);
  EXPECT_EQ(packetBytes({ElementFormat::kInt8, ScaleFormat::kE8M0, 32}, 32 * 17), 32 * 17 + 32u);
  EXPECT_EQ(packetBytes(format, uint64_t{1} << 40), (uint64_t{1} << 40) + (uint64_t{1} << 35));
  EXPECT_EQ(shardElements(format, 1000, 4), 256u);
  EXPECT_EQ(shardElements(format, 1, 4), 128u);
}

// Shards of a buffer: some whole, one short, the rest empty; and parts with gaps between them.
TEST(Layout, SegmentsWithPitches) {
  for (const Path& path : kPaths) {
    for (DataType type : kTypes) {
      for (const WireFormat& format : allFormats()) {
        const uint64_t total = 1000;
        const Elements in = numbers(type, total, 31);
        for (const auto& [pitch, length] :
             {std::pair<uint64_t, uint64_t>{256, 256}, {512, 512}, {300, 210}, {7, 33}}) {
          const uint32_t segments = 9;
          const uint64_t out_pitch = packetBytes(format, length) + 48;
          Packet out(segments * out_pitch, 0x5a);
          path.quantize({format, type, segments, in.data(), pitch, total, length, out.data(), out_pitch, {}});
          Elements back(type, total);
          for (uint64_t i = 0; i < total; ++i) back.setBits(i, 0x1234);
          Elements expected_back = back;
          for (uint32_t s = 0; s < segments; ++s) {
            const uint64_t start = s * pitch;
            const uint64_t n = start < total ? std::min(length, total - start) : 0;
            Packet expected(out_pitch, 0x5a);
            if (n > 0) {
              const Packet packet = quantized(format, cut(in, start, n));
              std::copy(packet.begin(), packet.end(), expected.begin());
              const Elements decoded = dequantized(format, packet, type, n);
              for (uint64_t i = 0; i < n; ++i) expected_back.setBits(start + i, decoded.bits(i));
            }
            EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                                   out.begin() + static_cast<ptrdiff_t>(s * out_pitch)))
                << path.name << " " << name(format) << " " << name(type) << " segment " << s;
          }
          path.dequantize({format, type, segments, out.data(), out_pitch, length, back.data(), pitch, total});
          EXPECT_TRUE(back == expected_back && back.intact())
              << path.name << " " << name(format) << " " << name(type);
        }
      }
    }
  }
}

TEST(Layout, NothingToDo) {
  for (const Path& path : kPaths) {
    path.quantize({{}, DataType::kBf16, 3, nullptr, 128, 0, 128, nullptr, 160, {}});
    path.quantize({{}, DataType::kBf16, 0, nullptr, 128, 128, 128, nullptr, 160, {}});
    path.quantize({{}, DataType::kBf16, 2, nullptr, 128, 256, 0, nullptr, 160, {}});
    path.dequantize({{}, DataType::kBf16, 3, nullptr, 160, 128, nullptr, 128, 0});
    ReduceJob job;
    path.reduce(job);
    uint8_t byte = 1;
    job.elements = 1;
    job.packets = 0;
    job.to_packet = false;
    job.out = &byte;
    path.reduce(job);
    EXPECT_EQ(byte, 1);
  }
}

TEST(Layout, OwnPacketStandsInItsPlace) {
  const WireFormat format;
  const uint64_t n = 1000, size = packetBytes(format, n);
  Packet packets;
  for (uint32_t k = 0; k < 4; ++k) {
    const Packet packet = quantized(format, numbers(DataType::kFp32, n, 40 + k));
    packets.insert(packets.end(), packet.begin(), packet.end());
  }
  for (const Path& path : kPaths) {
    Packet expected(size), got(size);
    path.reduce(reduceJob(format, DataType::kFp32, n, packets, 4, 1.0f, true, expected.data()));
    for (int32_t own = 0; own < 4; ++own) {
      const Packet moved(packets.begin() + static_cast<ptrdiff_t>(size * static_cast<uint64_t>(own)),
                         packets.begin() + static_cast<ptrdiff_t>(size * static_cast<uint64_t>(own + 1)));
      Packet others = packets;
      std::fill_n(others.begin() + static_cast<ptrdiff_t>(size * static_cast<uint64_t>(own)), size,
                  uint8_t{0x33});
      ReduceJob job = reduceJob(format, DataType::kFp32, n, others, 4, 1.0f, true, got.data());
      job.own = moved.data();
      job.own_index = own;
      path.reduce(job);
      EXPECT_EQ(got, expected) << path.name << " " << own;
    }
  }
}

// Offsets beyond 2^32 elements, with no more memory than the packets in it.
TEST(Layout, OffsetsBeyond32Bits) {
  const WireFormat format;
  const uint64_t pitch = (uint64_t{3} << 31) + 128, n = 1000;
  const uint64_t packet_pitch = (uint64_t{5} << 30) + 16;
  const SparseMemory elements(3 * pitch * 2), packets(3 * packet_pitch);
  if (!elements.ok() || !packets.ok()) GTEST_SKIP() << "no address space of 48 GiB";
  for (const Path& path : kPaths) {
    for (uint64_t s = 0; s < 3; ++s) {
      std::memcpy(elements.data() + s * pitch * 2,
                  numbers(DataType::kBf16, n, 50 + static_cast<uint32_t>(s)).data(), 2 * n);
    }
    path.quantize({format,
                   DataType::kBf16,
                   3,
                   elements.data(),
                   pitch,
                   2 * pitch + n,
                   n,
                   packets.data(),
                   packet_pitch,
                   {}});
    std::vector<Elements> in;
    for (uint64_t s = 0; s < 3; ++s) {
      in.push_back(numbers(DataType::kBf16, n, 50 + static_cast<uint32_t>(s)));
      const Packet expected = quantized(format, in.back());
      EXPECT_EQ(std::memcmp(expected.data(), packets.data() + s * packet_pitch, expected.size()), 0)
          << path.name << " " << s;
      std::memset(elements.data() + s * pitch * 2, 0, 2 * n);
    }
    path.dequantize(
        {format, DataType::kBf16, 3, packets.data(), packet_pitch, n, elements.data(), pitch, 2 * pitch + n});
    for (uint64_t s = 0; s < 3; ++s) {
      const Elements expected = dequantized(format, quantized(format, in[s]), DataType::kBf16, n);
      EXPECT_EQ(std::memcmp(expected.data(), elements.data() + s * pitch * 2, 2 * n), 0)
          << path.name << " " << s;
    }
    ReduceJob job;
    job.format = format;
    job.packets = 3;
    job.in = packets.data();
    job.in_pitch = packet_pitch;
    job.elements = n;
    Packet got(packetBytes(format, n)), expected(got.size()), together;
    job.out = got.data();
    path.reduce(job);
    for (uint64_t s = 0; s < 3; ++s) {
      const uint8_t* const packet = packets.data() + s * packet_pitch;
      together.insert(together.end(), packet, packet + got.size());
    }
    reference::reduce(reduceJob(format, DataType::kBf16, n, together, 3, 1.0f, true, expected.data()));
    EXPECT_EQ(got, expected) << path.name;
  }
}

}  // namespace
}  // namespace halfwire::test
