// One message of more than 2^31 elements, in little memory: its middle is zeros, and the output's middle is a
// small file mapped over and over.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "wire/test_support.h"

namespace halfwire::test {
namespace {

constexpr uint64_t kTile = uint64_t{2} << 20;

// `bytes` of addresses of which the first `repeated` (a multiple of kTile) share kTile bytes of memory.
class FoldedMemory {
 public:
  FoldedMemory(uint64_t bytes, uint64_t repeated) : bytes_(bytes) {
    void* const base =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return;
    data_ = static_cast<uint8_t*>(base);
    if (repeated == 0) return;
    const int file = memfd_create("fold", 0);
    ok_ = file >= 0 && ftruncate(file, static_cast<off_t>(kTile)) == 0;
    for (uint64_t at = 0; ok_ && at < repeated; at += kTile) {
      ok_ = mmap(data_ + at, kTile, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
    }
    if (file >= 0) close(file);
  }
  ~FoldedMemory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  FoldedMemory(const FoldedMemory&) = delete;
  FoldedMemory& operator=(const FoldedMemory&) = delete;

  bool ok() const { return data_ != nullptr && ok_; }
  uint8_t* data() const { return data_; }

 private:
  uint64_t bytes_;
  uint8_t* data_ = nullptr;
  bool ok_ = true;
};

TEST(LayoutFull, OneMessageBeyond2To31Elements) {
  const WireFormat format;
  const uint64_t zeros = uint64_t{1} << 31, tail = 4096 + 37, n = zeros + tail;
  const FoldedMemory in(2 * n, 0), packet(packetBytes(format, n), zeros), out(2 * n, 2 * zeros);
  if (!in.ok() || !packet.ok() || !out.ok()) GTEST_SKIP() << "no address space of 12 GiB";

  const Elements all = everyInput(DataType::kBf16)[2].elements;
  Elements end(DataType::kBf16, tail);
  for (uint64_t i = 0; i < tail; ++i) end.setBits(i, all.bits(i));
  std::memcpy(in.data() + 2 * zeros, end.data(), 2 * tail);
  host::quantize({format, DataType::kBf16, 1, in.data(), 0, n, n, packet.data(), 0, {}});

  const Packet expected = quantized(format, end);
  EXPECT_EQ(std::memcmp(packet.data() + zeros, expected.data(), tail), 0);
  const uint8_t* const scales = packet.data() + scaleOffset(format, n);
  EXPECT_EQ(std::memcmp(scales + 4 * (zeros / format.block), expected.data() + scaleOffset(format, tail),
                        4 * blockCount(format, tail)),
            0);
  for (uint64_t b = 0; b < zeros / format.block; b += 4099) {
    float scale;
    std::memcpy(&scale, scales + 4 * b, 4);
    ASSERT_EQ(scale, kMinScale) << b;
  }

  host::dequantize({format, DataType::kBf16, 1, packet.data(), 0, n, out.data(), 0, n});
  const Elements decoded = dequantized(format, expected, DataType::kBf16, tail);
  EXPECT_EQ(std::memcmp(out.data() + 2 * zeros, decoded.data(), 2 * tail), 0);

  std::memset(out.data() + 2 * zeros, 0, 2 * tail);
  ReduceJob job;
  job.format = format;
  job.to_packet = false;
  job.in = packet.data();
  job.elements = n;
  job.out = out.data();
  host::reduce(job);
  EXPECT_EQ(std::memcmp(out.data() + 2 * zeros, decoded.data(), 2 * tail), 0);
}

}  // namespace
}  // namespace halfwire::test
