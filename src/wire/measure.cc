#include "wire/measure.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numbers>
#include <random>
#include <span>
#include <vector>

#include "wire/convert.h"

namespace halfwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMaxElements = uint64_t{1} << 36;
constexpr uint64_t kPatternElements = uint64_t{1} << 20;  // drawn once and repeated in larger buffers
constexpr uint64_t kSnrChunk = uint64_t{1} << 16;         // a multiple of every block
constexpr double kTimedShare = 0.8;                       // of the progress, the rest is for the SNR

std::string name(CodecOp op) {
  return op == CodecOp::kQuantize ? "quantize" : op == CodecOp::kDequantize ? "dequantize" : "reduce";
}
std::string name(ElementFormat f) { return elementFormatName(f); }
std::string name(ScaleFormat f) { return f == ScaleFormat::kFp32 ? "fp32" : "e8m0"; }
std::string name(DataType t) {
  return t == DataType::kBf16 ? "bf16" : t == DataType::kFp16 ? "fp16" : "fp32";
}

// N(0,1) by Box and Muller from a fixed seed: the same numbers with every standard library.
class Gauss {
 public:
  explicit Gauss(uint64_t seed) : random_(seed) {}

  double next() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2.0 * std::log((static_cast<double>(random_() >> 11) + 1.0) * 0x1p-53));
    const double angle = 2.0 * std::numbers::pi * static_cast<double>(random_() >> 11) * 0x1p-53;
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

 private:
  std::mt19937_64 random_;
  double spare_ = 0;
  bool has_spare_ = false;
};

void putElement(DataType type, float value, uint8_t* out, uint64_t i) {
  if (type == DataType::kFp32) {
    std::memcpy(out + 4 * i, &value, 4);
    return;
  }
  const uint16_t bits = type == DataType::kBf16 ? floatToBf16(value) : floatToFp16(value);
  std::memcpy(out + 2 * i, &bits, 2);
}

struct AlignedDelete {
  void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t{64}); }
};
using Buffer = std::unique_ptr<uint8_t, AlignedDelete>;

// Null if there is no memory. Every page is written, so that no run pays for the first touch.
Buffer makeBuffer(uint64_t bytes) {
  auto* p =
      static_cast<uint8_t*>(::operator new(std::max<uint64_t>(bytes, 1), std::align_val_t{64}, std::nothrow));
  if (p != nullptr) std::memset(p, 0, bytes);
  return Buffer(p);
}

void fill(DataType type, uint64_t elements, uint8_t* out) {
  const uint64_t drawn = std::min(elements, kPatternElements);
  fillNormal(type, 1, drawn, out);
  const uint64_t period = drawn * dataTypeBytes(type);
  const uint64_t bytes = elements * dataTypeBytes(type);
  for (uint64_t at = period; at < bytes; at += period)
    std::memcpy(out + at, out, std::min(period, bytes - at));
}

// The jobs of a case, on either path.
struct Codec {
  const CodecCase& c;

  // `rank`: of whom the packet is; ranks round independently.
  void quantize(uint64_t elements, const uint8_t* in, uint8_t* packet, uint32_t rank = 0) const {
    QuantizeJob job;
    job.format = c.format;
    job.type = c.type;
    job.in = in;
    job.in_total = job.segment_elements = elements;
    job.out = packet;
    job.rounding = c.rounding;
    job.rounding.key += rank;
    c.path == CodecPath::kSimd ? host::quantize(job) : reference::quantize(job);
  }
  void dequantize(uint64_t elements, const uint8_t* packet, uint8_t* out) const {
    DequantizeJob job;
    job.format = c.format;
    job.type = c.type;
    job.in = packet;
    job.out_total = job.segment_elements = elements;
    job.out = out;
    c.path == CodecPath::kSimd ? host::dequantize(job) : reference::dequantize(job);
  }
  void reduce(uint64_t elements, const uint8_t* packets, uint8_t* out) const {
    ReduceJob job;
    job.format = c.format;
    job.type = c.type;
    job.packets = c.packets;
    job.in = packets;
    job.in_pitch = packetBytes(c.format, elements);
    job.elements = elements;
    job.out = out;
    job.rounding = c.rounding;
    c.path == CodecPath::kSimd ? host::reduce(job) : reference::reduce(job);
  }
};

double snrDb(const CodecCase& c, const std::function<void(double)>& progress) {
  const Codec codec{c};
  const bool sum = c.op == CodecOp::kReduce;
  const uint32_t inputs = sum ? c.packets : 1;
  const uint64_t packet_bytes = packetBytes(c.format, kSnrChunk);
  std::vector<uint8_t> in(kSnrChunk * dataTypeBytes(c.type)), out(in.size());
  std::vector<uint8_t> packets(packet_bytes * inputs), total(packet_bytes);
  std::vector<double> exact(kSnrChunk);
  const uint64_t chunks = (std::max<uint64_t>(c.snr_elements, 1) + kSnrChunk - 1) / kSnrChunk;
  Gauss gauss(2);
  double signal = 0, noise = 0;
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    std::fill(exact.begin(), exact.end(), 0.0);
    for (uint32_t k = 0; k < inputs; ++k) {
      for (uint64_t i = 0; i < kSnrChunk; ++i) {
        putElement(c.type, static_cast<float>(gauss.next()), in.data(), i);
        exact[i] += elementAt(c.type, in.data(), i);
      }
      codec.quantize(kSnrChunk, in.data(), packets.data() + k * packet_bytes, k + 1);
    }
    if (sum) codec.reduce(kSnrChunk, packets.data(), total.data());
    codec.dequantize(kSnrChunk, sum ? total.data() : packets.data(), out.data());
    for (uint64_t i = 0; i < kSnrChunk; ++i) {
      const double error = elementAt(c.type, out.data(), i) - exact[i];
      signal += exact[i] * exact[i];
      noise += error * error;
    }
    if (progress)
      progress(kTimedShare +
               (1 - kTimedShare) * static_cast<double>(chunk + 1) / static_cast<double>(chunks));
  }
  return 10.0 * std::log10(signal / noise);
}

double secondsOf(uint64_t repeats, const std::function<void()>& work) {
  const auto start = Clock::now();
  for (uint64_t i = 0; i < repeats; ++i) work();
  return std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(repeats);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

void fillNormal(DataType type, uint64_t seed, uint64_t elements, uint8_t* out) {
  Gauss gauss(seed);
  for (uint64_t i = 0; i < elements; ++i) putElement(type, static_cast<float>(gauss.next()), out, i);
}

double elementAt(DataType type, const uint8_t* in, uint64_t i) {
  if (type == DataType::kFp32) {
    float value;
    std::memcpy(&value, in + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, in + 2 * i, 2);
  return type == DataType::kBf16 ? bf16ToFloat(bits) : fp16ToFloat(bits);
}

uint64_t codecWorkingSet(const CodecCase& c) {
  const uint64_t packet = packetBytes(c.format, c.elements);
  if (c.op == CodecOp::kReduce) return packet * (uint64_t{c.packets} + 1);
  return packet + c.elements * dataTypeBytes(c.type);
}

uint64_t codecElementsFor(const CodecCase& c, uint64_t bytes) {
  CodecCase probe = c;
  uint64_t low = 0,
           high = std::min(bytes, kMaxElements) / c.format.block + 1;  // blocks: `low` fits, `high` does not
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    probe.elements = middle * c.format.block;
    (codecWorkingSet(probe) <= bytes ? low : high) = middle;
  }
  return low * c.format.block;
}

CodecRow describeCodec(const CodecCase& c) {
  CodecRow row;
  row.op = name(c.op);
  row.input = name(c.type);
  row.format = name(c.format.element);
  row.block = c.format.block;
  row.scale = name(c.format.scale);
  row.rounding = c.rounding.stochastic ? "stochastic" : "nearest";
  row.elements = c.elements;
  row.working_set_bytes = codecWorkingSet(c);
  row.wire_ratio =
      static_cast<double>(packetBytes(c.format, c.elements)) / (2.0 * static_cast<double>(c.elements));
  return row;
}

Result<CodecRow> measureCodec(const CodecCase& c, const std::function<void(double)>& progress) {
  if (c.elements == 0 || c.elements > kMaxElements) {
    return Status(StatusCode::kInvalidArgument,
                  "The number of elements to measure with must be between 1 and 2^36; choose another one.");
  }
  if (c.op == CodecOp::kReduce && (c.packets == 0 || c.packets > 4096)) {
    return Status(StatusCode::kInvalidArgument,
                  "A reduction needs between 1 and 4096 packets; choose another number.");
  }
  const uint64_t element_bytes = c.elements * dataTypeBytes(c.type);
  const uint64_t packet_bytes = packetBytes(c.format, c.elements);
  const uint32_t packet_count = c.op == CodecOp::kReduce ? c.packets : 1;
  const uint64_t working_set = codecWorkingSet(c);
  const uint64_t result_bytes = c.op == CodecOp::kDequantize ? element_bytes : packet_bytes;
  const auto memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  const double needed = static_cast<double>(element_bytes + result_bytes + working_set) +
                        static_cast<double>(packet_bytes) * static_cast<double>(packet_count);
  if (needed > memory) {
    return Status(StatusCode::kOutOfMemory,
                  "The buffers of this case are larger than this machine's memory; use fewer elements.");
  }
  const Buffer elements = makeBuffer(element_bytes);
  const Buffer packets = makeBuffer(packet_bytes * packet_count);
  const Buffer result = makeBuffer(result_bytes);
  const Buffer copy_from = makeBuffer(working_set / 2);
  const Buffer copy_to = makeBuffer(working_set / 2);
  if (!elements || !packets || !result || !copy_from || !copy_to) {
    return Status(StatusCode::kOutOfMemory,
                  "There is no memory for the buffers of this case; use fewer elements.");
  }

  const Codec codec{c};
  fill(c.type, c.elements, elements.get());
  for (uint32_t k = 0; k < packet_count; ++k) {
    codec.quantize(c.elements, elements.get(), packets.get() + k * packet_bytes);
  }
  const auto run = [&] {
    switch (c.op) {
      case CodecOp::kQuantize:
        return codec.quantize(c.elements, elements.get(), result.get());
      case CodecOp::kDequantize:
        return codec.dequantize(c.elements, packets.get(), result.get());
      case CodecOp::kReduce:
        return codec.reduce(c.elements, packets.get(), result.get());
    }
  };
  const auto copy = [&] {
    std::memcpy(copy_to.get(), copy_from.get(), working_set / 2);
    __asm__ volatile("" ::"r"(copy_to.get()) : "memory");
  };

  // Short runs are repeated until one sample takes about a millisecond.
  const auto repeatsFor = [](double seconds) {
    return static_cast<uint64_t>(std::clamp(1e-3 / std::max(seconds, 1e-9), 1.0, 1e6));
  };
  secondsOf(1, copy);
  const uint64_t run_repeats = repeatsFor(secondsOf(1, run));
  const uint64_t copy_repeats = repeatsFor(secondsOf(1, copy));
  std::vector<double> runs, copies;
  const auto start = Clock::now();
  for (double elapsed = 0; elapsed < c.seconds || runs.size() < 3;
       elapsed = std::chrono::duration<double>(Clock::now() - start).count()) {
    copies.push_back(secondsOf(copy_repeats, copy));
    runs.push_back(secondsOf(run_repeats, run));
    if (progress) progress(kTimedShare * std::min(1.0, elapsed / c.seconds));
  }

  CodecRow row = describeCodec(c);
  row.device = "host";
  row.path = c.path == CodecPath::kSimd && !roundsStochastically(c) ? host::simdTarget() : "scalar";
  row.bytes_per_s = static_cast<double>(working_set) / median(runs);
  row.copy_bytes_per_s = static_cast<double>(working_set / 2 * 2) / median(copies);
  row.snr_db = snrDb(c, progress);
  return row;
}

}  // namespace halfwire
