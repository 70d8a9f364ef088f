// Jobs over all formats, blocks, scales and types, on data that is hard on each step, against
// halfwire::reference.
#include "wire/cuda_check/check.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "wire/constants.h"
#include "wire/convert.h"

namespace halfwire::check {
namespace {

constexpr uint8_t kPoison = 0xcd;
constexpr uint64_t kGuard = 256;  // poisoned bytes around every output
constexpr size_t kMaxLines = 40;
constexpr uint64_t kRegion = uint64_t{12} << 20;  // bytes of a worker's input and of its output

const char* name(ElementFormat f) { return elementFormatName(f); }
const char* name(ScaleFormat f) { return f == ScaleFormat::kFp32 ? "fp32" : "e8m0"; }
const char* name(DataType t) {
  return t == DataType::kBf16 ? "bf16" : t == DataType::kFp16 ? "fp16" : "fp32";
}

std::string describe(const WireFormat& f, DataType t) {
  return std::string(name(f.element)) + "/" + std::to_string(f.block) + "/" + name(f.scale) + " " + name(t);
}

// An element of `type` nearest to `value`, as its bits.
uint32_t elementBits(DataType type, float value) {
  switch (type) {
    case DataType::kBf16:
      return floatToBf16(value);
    case DataType::kFp16:
      return floatToFp16(value);
    case DataType::kFp32:
      return std::bit_cast<uint32_t>(value);
  }
  return 0;
}

void append(std::vector<uint8_t>& out, DataType type, uint32_t bits) {
  for (uint64_t i = 0; i < dataTypeBytes(type); ++i) out.push_back(static_cast<uint8_t>(bits >> (8 * i)));
}

// Elements that are hard on one step or another: every pattern of a 16-bit type (in order, so that neighbours
// share blocks, and shuffled, so that they do not), fp32's ends, ties and random bits, blocks of one kind,
// and ordinary values.
std::vector<uint8_t> hardElements(DataType type, bool small) {
  std::vector<uint8_t> out;
  std::mt19937 random(static_cast<uint32_t>(type) + 1);
  if (type == DataType::kFp32) {
    for (uint32_t exponent = 0; exponent < 256; ++exponent) {
      for (const uint32_t mantissa : {0u, 1u, 0x080000u, 0x0fffffu, 0x100000u, 0x100001u, 0x180000u,
                                      0x300000u, 0x500000u, 0x600000u, 0x700001u, 0x7fffffu}) {
        append(out, type, (exponent << 23) | mantissa);
        append(out, type, 0x80000000u | (exponent << 23) | mantissa);
      }
    }
    for (int i = 0; i < (small ? 2000 : 1 << 17); ++i) append(out, type, static_cast<uint32_t>(random()));
  } else {
    std::vector<uint32_t> patterns(1 << 16);
    for (uint32_t i = 0; i < patterns.size(); ++i) patterns[i] = i;
    const uint32_t step = small ? 37 : 1;
    for (uint32_t i = 0; i < patterns.size(); i += step) append(out, type, patterns[i]);
    std::shuffle(patterns.begin(), patterns.end(), random);
    for (uint32_t i = 0; i < patterns.size(); i += step) append(out, type, patterns[i]);
  }
  const float infinity = std::bit_cast<float>(0x7f800000u);
  const float nan = std::bit_cast<float>(0x7fc12345u);
  const float largest = typeMax(type);
  const float tiny = type == DataType::kFp16 ? 0x1p-24f : type == DataType::kBf16 ? 0x1p-133f : 0x1p-149f;
  for (const float value :
       {0.0f, -0.0f, infinity, -infinity, nan, largest, -largest, tiny, -tiny, 0x1p-126f, 448.0f, 1.0f}) {
    for (int i = 0; i < 256; ++i) append(out, type, elementBits(type, value));
    for (int i = 0; i < 256; ++i)
      append(out, type, elementBits(type, i % 7 == 3 ? value : 0.37f * static_cast<float>(i % 11)));
  }
  // One magnitude a block, over all magnitudes, with many ties of every format.
  const int lowest = type == DataType::kFp16 ? -24 : type == DataType::kBf16 ? -133 : -149;
  const int highest = type == DataType::kFp16 ? 15 : 127;
  for (int e = lowest; e <= highest; e += small ? 29 : 1) {
    for (int i = 0; i < 256; ++i) {
      const float fraction = static_cast<float>(static_cast<int>(random() % 1025) - 512) / 512.0f;
      append(out, type, elementBits(type, std::ldexp(fraction, e)));
    }
  }
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (int i = 0; i < (small ? 3000 : 40000); ++i)
    append(out, type, elementBits(type, 0.01f * normal(random)));
  return out;
}

// A packet of any codes under scales that an encoder can have written, tiny and huge ones among them.
std::vector<uint8_t> randomPacket(const WireFormat& format, uint64_t elements, std::mt19937& random) {
  std::vector<uint8_t> packet(packetBytes(format, elements));
  for (uint64_t i = 0; i < elements; ++i) packet[i] = static_cast<uint8_t>(random());
  uint8_t* scales = packet.data() + scaleOffset(format, elements);
  for (uint64_t b = 0; b < blockCount(format, elements); ++b) {
    const uint32_t kind = random() % 8;
    const uint32_t exponent = kind == 0 ? 1 : kind == 1 ? 240 + random() % 8 : 100 + random() % 40;
    if (format.scale == ScaleFormat::kE8M0) {
      scales[b] = static_cast<uint8_t>(exponent);
    } else {
      const uint32_t bits = (exponent << 23) | (kind == 0 ? 0 : random() % (1u << 23));
      std::memcpy(scales + 4 * b, &bits, 4);
    }
  }
  return packet;
}

// One worker: its stream and its regions of device memory.
class Worker {
 public:
  Worker(const Gpu& gpu, const std::vector<Path>& paths, const CheckOptions& options, CheckResult& total,
         std::mutex& mutex)
      : gpu_(gpu),
        paths_(paths),
        options_(options),
        total_(total),
        mutex_(mutex),
        stream_(gpu),
        in_(gpu, kRegion),
        out_(gpu, kRegion),
        factor_(gpu, 256) {}

  ~Worker() {
    const std::scoped_lock lock(mutex_);
    total_.jobs += jobs_;
    total_.elements += elements_;
    total_.failures += failures_;
  }

  void run(const WireFormat& format, DataType type) {
    random_.seed(static_cast<uint32_t>(format.block) * 64 + static_cast<uint32_t>(format.element) * 8 +
                 static_cast<uint32_t>(format.scale) * 4 + static_cast<uint32_t>(type));
    what_ = describe(format, type);
    const std::vector<uint8_t> hard = hardElements(type, options_.small);
    const uint64_t elements = hard.size() / dataTypeBytes(type);
    quantizeJobs(format, type, hard, elements);
    dequantizeJobs(format, type);
    reduceJobs(format, type, hard, elements);
  }

 private:
  std::vector<uint64_t> counts(uint64_t block) const {
    if (options_.small) return {1, 17, block, block + 1, 4097};
    return {1,         2,    3,   7,   15,  16,  17,   31,   33,   block - 1,        block,
            block + 1, 127,  128, 129, 255, 257, 4095, 4096, 4097, 4096 + block / 2, 8191,
            12289 + 7, 40000};
  }

  static QuantizeJob plainQuantize(const WireFormat& format, DataType type, uint64_t elements) {
    QuantizeJob job;
    job.format = format;
    job.type = type;
    job.in_pitch = job.segment_elements = job.in_total = elements;
    job.out_pitch = packetBytes(format, elements);
    return job;
  }

  void quantizeJobs(const WireFormat& format, DataType type, const std::vector<uint8_t>& hard,
                    uint64_t elements) {
    quantize("all", plainQuantize(format, type, elements), hard, 0, {});
    // Ragged counts on shifting windows, at every misalignment that the type allows.
    uint32_t shift = 0;
    for (const uint64_t n : counts(format.block)) {
      const uint64_t start = random_() % (elements - n + 1);
      shift = (shift + 1) % 8;
      quantize("ragged", plainQuantize(format, type, n), slice(hard, type, start, n),
               shift * dataTypeBytes(type), {});
    }
    quantize("misaligned", plainQuantize(format, type, elements), hard, dataTypeBytes(type), {});
    const std::vector<float> factors = options_.small ? std::vector<float>{-3.0f}
                                                      : std::vector<float>{0.5f,
                                                                           -3.0f,
                                                                           0.0f,
                                                                           -0.0f,
                                                                           1e-3f,
                                                                           3e4f,
                                                                           1e-30f,
                                                                           1e30f,
                                                                           std::bit_cast<float>(0x7f800000u),
                                                                           std::bit_cast<float>(0x7fc00001u)};
    for (const float factor : factors) {
      const uint64_t n = std::min<uint64_t>(elements, 20000);
      const std::vector<uint8_t> data = slice(hard, type, random_() % (elements - n + 1), n);
      QuantizeJob job = plainQuantize(format, type, n);
      job.factor.present = true;
      job.factor.value = factor;
      quantize("factor", job, data, 0, {});
      std::vector<uint8_t> bits;
      append(bits, type, elementBits(type, factor));
      quantize("device factor", job, data, 0, bits);
    }
    // Segments with odd pitches, of which the last is short and some are empty; gaps must stay untouched.
    for (const uint64_t segment :
         options_.small ? std::vector<uint64_t>{100} : std::vector<uint64_t>{1, 100, 4096, 5000}) {
      QuantizeJob job = plainQuantize(format, type, segment);
      job.segments = 7;
      job.in_pitch = segment + (segment % 2 == 0 ? 3 : 0);
      job.in_total = 5 * job.in_pitch + segment / 3;
      job.out_pitch = packetBytes(format, segment) + 48;
      quantize("segments", job, slice(hard, type, random_() % (elements - job.in_total + 1), job.in_total), 0,
               {});
    }
  }

  void dequantizeJobs(const WireFormat& format, DataType type) {
    const auto plain = [&](uint64_t n) {
      DequantizeJob job;
      job.format = format;
      job.type = type;
      job.segment_elements = job.out_pitch = job.out_total = n;
      job.in_pitch = packetBytes(format, n);
      return job;
    };
    const uint64_t many = options_.small ? 5000 : 150000;
    dequantize("all", plain(many), randomPacket(format, many, random_), 0);
    dequantize("misaligned", plain(many), randomPacket(format, many, random_), dataTypeBytes(type));
    uint32_t shift = 0;
    for (const uint64_t n : counts(format.block)) {
      shift = (shift + 1) % 8;
      dequantize("ragged", plain(n), randomPacket(format, n, random_), shift * dataTypeBytes(type));
    }
    for (const uint64_t segment :
         options_.small ? std::vector<uint64_t>{100} : std::vector<uint64_t>{1, 100, 4096, 5000}) {
      DequantizeJob job = plain(segment);
      job.segments = 7;
      job.out_pitch = segment + 5;
      job.out_total = 5 * job.out_pitch + segment / 3;
      job.in_pitch = packetBytes(format, segment) + 32;
      std::vector<uint8_t> packets;
      for (uint64_t s = 0; s < 7; ++s) {
        const uint64_t n = std::min(segment, job.out_total - std::min(job.out_total, s * job.out_pitch));
        std::vector<uint8_t> packet = randomPacket(format, n, random_);
        packet.resize(job.in_pitch, kPoison);
        packets.insert(packets.end(), packet.begin(), packet.end());
      }
      dequantize("segments", job, packets, 0);
    }
  }

  void reduceJobs(const WireFormat& format, DataType type, const std::vector<uint8_t>& hard,
                  uint64_t elements) {
    for (uint32_t packets = 1; packets <= 9; packets += options_.small ? 4 : 1) {
      for (const bool average : {false, true}) {
        for (const bool to_packet : {true, false}) {
          for (int source = 0; source < 2; ++source) {
            const std::vector<uint64_t> sizes = {8192 + uint64_t{8} * format.block, 1 + random_() % 9000};
            const uint64_t n = sizes[random_() % 2];
            ReduceJob job;
            job.format = format;
            job.type = type;
            job.to_packet = to_packet;
            job.packets = packets;
            job.elements = n;
            job.average = average ? 1.0f / static_cast<float>(packets) : 1.0f;
            job.in_pitch = packetBytes(format, n) + 16 * (random_() % 3);
            job.own_index = static_cast<int32_t>(random_() % (packets + 1)) - 1;
            std::vector<uint8_t> data;
            for (uint32_t k = 0; k < packets; ++k) {
              std::vector<uint8_t> packet =
                  source == 0
                      ? randomPacket(format, n, random_)
                      : quantized(format, type, slice(hard, type, random_() % (elements - n + 1), n), n);
              // Bytes of the padding are the sender's, not ours to trust.
              for (uint64_t i = n; i < scaleOffset(format, n); ++i) packet[i] = 0x55;
              packet.resize(job.in_pitch, kPoison);
              data.insert(data.end(), packet.begin(), packet.end());
            }
            const uint64_t misalign = to_packet ? 0 : (random_() % 3) * dataTypeBytes(type);
            reduce(job, data, misalign);
            if (!to_packet) continue;
            job.rounding = anyRounding();
            reduce(job, data, misalign);
          }
        }
      }
    }
  }

  static std::vector<uint8_t> slice(const std::vector<uint8_t>& data, DataType type, uint64_t start,
                                    uint64_t n) {
    const auto bytes = static_cast<std::ptrdiff_t>(dataTypeBytes(type));
    return {data.begin() + static_cast<std::ptrdiff_t>(start) * bytes,
            data.begin() + static_cast<std::ptrdiff_t>(start + n) * bytes};
  }

  static std::vector<uint8_t> quantized(const WireFormat& format, DataType type,
                                        const std::vector<uint8_t>& data, uint64_t n) {
    std::vector<uint8_t> packet(packetBytes(format, n));
    QuantizeJob job = plainQuantize(format, type, n);
    job.in = data.data();
    job.out = packet.data();
    reference::quantize(job);
    return packet;
  }

  void quantize(const char* kind, QuantizeJob job, const std::vector<uint8_t>& data, uint64_t misalign,
                const std::vector<uint8_t>& factor) {
    rounded("quantize", kind, job, data, misalign, factor);
    job.rounding = anyRounding();
    rounded("quantize", "stochastic", job, data, misalign, factor);
  }

  // Numbers that begin anywhere, beyond 32 bits too.
  Rounding anyRounding() {
    const uint64_t key = uint64_t{random_()} << 32 | random_();
    return {true, key, (uint64_t{random_()} << 20) + random_() % 1000};
  }

  void rounded(const char* operation, const char* kind, QuantizeJob job, const std::vector<uint8_t>& data,
               uint64_t misalign, const std::vector<uint8_t>& factor) {
    const uint64_t bytes = job.segments * job.out_pitch;
    expected_.assign(bytes + 2 * kGuard, kPoison);
    job.in = data.data();
    job.out = expected_.data() + kGuard;
    if (!factor.empty()) job.factor.device = factor.data();
    reference::quantize(job);
    in_.upload(data.data(), data.size(), misalign);
    if (!factor.empty()) factor_.upload(factor.data(), factor.size());
    job.in = in_.at(misalign);
    job.out = out_.at(kGuard);
    if (!factor.empty()) job.factor.device = factor_.at();
    compare(operation, kind, job.in_total,
            [&](Device& device) { return device.quantize(job, stream_.get()); });
  }

  void dequantize(const char* kind, DequantizeJob job, const std::vector<uint8_t>& packets,
                  uint64_t misalign) {
    expected_.assign(job.out_total * dataTypeBytes(job.type) + 2 * kGuard + misalign, kPoison);
    job.in = packets.data();
    job.out = expected_.data() + kGuard + misalign;
    reference::dequantize(job);
    in_.upload(packets.data(), packets.size());
    job.in = in_.at();
    job.out = out_.at(kGuard + misalign);
    compare("dequantize", kind, job.out_total,
            [&](Device& device) { return device.dequantize(job, stream_.get()); });
  }

  void reduce(ReduceJob job, const std::vector<uint8_t>& packets, uint64_t misalign) {
    const uint64_t bytes =
        job.to_packet ? packetBytes(job.format, job.elements) : job.elements * dataTypeBytes(job.type);
    expected_.assign(bytes + 2 * kGuard + misalign, kPoison);
    // The own packet lies apart; where it would lie in the row is poison.
    std::vector<uint8_t> own;
    std::vector<uint8_t> row = packets;
    if (job.own_index >= 0) {
      const auto at =
          row.begin() + static_cast<std::ptrdiff_t>(static_cast<uint64_t>(job.own_index) * job.in_pitch);
      const auto end = at + static_cast<std::ptrdiff_t>(job.in_pitch);
      own.assign(at, end);
      std::fill(at, end, kPoison);
    }
    job.in = row.data();
    job.own = own.data();
    job.out = expected_.data() + kGuard + misalign;
    reference::reduce(job);
    in_.upload(row.data(), row.size());
    const uint64_t own_at = roundUp(row.size(), 256);
    in_.upload(own.data(), own.size(), own_at);
    job.in = in_.at();
    job.own = in_.at(own_at);
    job.out = out_.at(kGuard + misalign);
    char kind[96];
    std::snprintf(kind, sizeof(kind), "%s W=%u own=%d average=%g",
                  job.to_packet ? "to packet" : "to elements", job.packets, job.own_index,
                  static_cast<double>(job.average));
    compare("reduce", kind, job.elements * job.packets,
            [&](Device& device) { return device.reduce(job, stream_.get()); });
  }

  // Runs the job on every path into poisoned memory and compares all of it, guards included.
  template <class Launch>
  void compare(const char* operation, const std::string& kind, uint64_t elements, const Launch& launch) {
    got_.resize(expected_.size());
    for (const Path& path : paths_) {
      gpu_.must("cuMemsetD8Async",
                gpu_.cuMemsetD8Async(out_.address(), kPoison, expected_.size(), stream_.get()));
      const Status status = launch(*path.device);
      stream_.synchronize();
      out_.download(got_.data(), got_.size());
      ++jobs_;
      elements_ += elements;
      if (status.ok() && std::memcmp(got_.data(), expected_.data(), got_.size()) == 0) continue;
      ++failures_;
      std::string line =
          path.name + " " + operation + " " + what_ + " " + kind + " n=" + std::to_string(elements) + ": ";
      if (!status.ok()) {
        line += status.message();
      } else {
        uint64_t wrong = 0;
        uint64_t first = got_.size();
        for (uint64_t i = 0; i < got_.size(); ++i) {
          if (got_[i] == expected_[i]) continue;
          ++wrong;
          first = std::min(first, i);
        }
        char text[128];
        std::snprintf(text, sizeof(text), "%llu of %llu bytes wrong, first at %lld: %02x, expected %02x",
                      static_cast<unsigned long long>(wrong), static_cast<unsigned long long>(got_.size()),
                      static_cast<long long>(first) - static_cast<long long>(kGuard), got_[first],
                      expected_[first]);
        line += text;
      }
      const std::scoped_lock lock(mutex_);
      if (total_.lines.size() < kMaxLines) total_.lines.push_back(line);
    }
  }

  const Gpu& gpu_;
  const std::vector<Path>& paths_;
  const CheckOptions& options_;
  CheckResult& total_;
  std::mutex& mutex_;
  Stream stream_;
  Buffer in_;
  Buffer out_;
  Buffer factor_;
  std::mt19937 random_;
  std::string what_;
  std::vector<uint8_t> expected_;
  std::vector<uint8_t> got_;
  uint64_t jobs_ = 0;
  uint64_t elements_ = 0;
  uint64_t failures_ = 0;
};

// Runs a kernel that compares a whole range on the GPU.
void checkRange(const Gpu& gpu, const Module& kernels, const char* kernel, uint64_t values,
                CheckResult* result) {
  if (!kernels.has(kernel)) return;
  const Stream stream(gpu);
  const Buffer counters(gpu, 16);
  const unsigned long long start[2] = {0, ~0ull};
  counters.upload(start, sizeof(start));
  launch(gpu, kernels.function(kernel), 4096, 256, stream.get(), counters.address(), counters.address(8));
  stream.synchronize();
  unsigned long long end[2];
  counters.download(end, sizeof(end));
  result->exhaustive += values;
  if (end[0] == 0) return;
  ++result->failures;
  char text[160];
  std::snprintf(text, sizeof(text), "%s: %llu values wrong, first has bits %08llx", kernel, end[0], end[1]);
  result->lines.emplace_back(text);
}

// More than 2^31 elements in one job: the paths against each other over everything, the first against the
// reference in windows at the start, around 2^31 and at the ragged end.
class LargeCheck {
 public:
  LargeCheck(const Gpu& gpu, const Module& kernels, const std::vector<Path>& paths, CheckResult* result)
      : gpu_(gpu), kernels_(kernels), paths_(paths), result_(result), stream_(gpu) {}

  void run() {
    const Buffer elements(gpu_, 2 * kElements);
    const Buffer decoded(gpu_, 2 * kElements);
    const Buffer first(gpu_, packetBytes(kFormat, kElements));
    const Buffer second(gpu_, packetBytes(kFormat, kElements));
    const Buffer sum(gpu_, packetBytes(kFormat, kElements));
    launch(gpu_, kernels_.function("fill_elements"), 8192, 256, stream_.get(), elements.address(), kElements,
           uint32_t{2}, uint64_t{99});

    QuantizeJob quantize;
    quantize.format = kFormat;
    quantize.in = elements.at();
    quantize.in_pitch = quantize.in_total = quantize.segment_elements = kElements;
    quantize.out_pitch = packetBytes(kFormat, kElements);
    quantize.out = first.at();
    ok(paths_[0].device->quantize(quantize, stream_.get()));
    for (size_t i = 1; i < paths_.size(); ++i) {
      quantize.out = second.at();
      ok(paths_[i].device->quantize(quantize, stream_.get()));
      same("quantize", first, second, packetBytes(kFormat, kElements));
    }

    DequantizeJob dequantize;
    dequantize.format = kFormat;
    dequantize.in = first.at();
    dequantize.in_pitch = packetBytes(kFormat, kElements);
    dequantize.segment_elements = dequantize.out_pitch = dequantize.out_total = kElements;
    dequantize.out = decoded.at();
    ok(paths_[0].device->dequantize(dequantize, stream_.get()));

    ReduceJob reduce;
    reduce.format = kFormat;
    reduce.packets = 3;
    reduce.in = first.at();
    reduce.in_pitch = 0;
    reduce.own = second.at();
    reduce.own_index = paths_.size() > 1 ? 1 : -1;
    reduce.elements = kElements;
    reduce.out = sum.at();
    ok(paths_[0].device->reduce(reduce, stream_.get()));
    stream_.synchronize();

    constexpr uint64_t kWindow = uint64_t{1} << 18;
    for (const uint64_t start :
         {uint64_t{0}, (uint64_t{1} << 31) - kWindow / 2, roundUp(kElements - kWindow, 4096)}) {
      window(elements, first, decoded, sum, start, std::min(kWindow, kElements - start));
    }
    if (paths_.size() > 1) {
      reduce.out = second.at();
      reduce.own = first.at();
      ok(paths_[1].device->reduce(reduce, stream_.get()));
      same("reduce", sum, second, packetBytes(kFormat, kElements));
    }
  }

 private:
  static constexpr WireFormat kFormat{ElementFormat::kE4M3, ScaleFormat::kFp32, 128};
  static constexpr uint64_t kElements = (uint64_t{1} << 31) + 3 * 4096 + 77;

  void ok(const Status& status) {
    ++result_->jobs;
    result_->elements += kElements;
    if (!status.ok()) fail(status.message());
  }

  void fail(const std::string& what) {
    ++result_->failures;
    result_->lines.push_back("job of 2^31 + 12365 elements: " + what);
  }

  void same(const char* what, const Buffer& a, const Buffer& b, uint64_t bytes) {
    const Buffer counters(gpu_, 16);
    const unsigned long long start[2] = {0, ~0ull};
    counters.upload(start, sizeof(start));
    launch(gpu_, kernels_.function("compare_bytes"), 8192, 256, stream_.get(), a.address(), b.address(),
           bytes, counters.address(), counters.address(8));
    stream_.synchronize();
    unsigned long long end[2];
    counters.download(end, sizeof(end));
    if (end[0] != 0)
      fail(std::string(what) + " differs between paths in " + std::to_string(end[0]) + " bytes, first at " +
           std::to_string(end[1]));
  }

  // Elements [start, start + n) of every step against the reference, which sees them as a packet of their
  // own.
  void window(const Buffer& elements, const Buffer& packet, const Buffer& decoded, const Buffer& sum,
              uint64_t start, uint64_t n) {
    std::vector<uint8_t> in(2 * n);
    elements.download(in.data(), in.size(), 2 * start);
    std::vector<uint8_t> expected(packetBytes(kFormat, n));
    QuantizeJob quantize;
    quantize.format = kFormat;
    quantize.in = in.data();
    quantize.in_pitch = quantize.in_total = quantize.segment_elements = n;
    quantize.out = expected.data();
    quantize.out_pitch = expected.size();
    reference::quantize(quantize);
    if (packetWindow(packet, start, n) != expected)
      fail("quantize is wrong in the window at " + std::to_string(start));

    std::vector<uint8_t> expected_elements(2 * n);
    DequantizeJob dequantize;
    dequantize.format = kFormat;
    dequantize.in = expected.data();
    dequantize.segment_elements = dequantize.out_pitch = dequantize.out_total = n;
    dequantize.out = expected_elements.data();
    reference::dequantize(dequantize);
    std::vector<uint8_t> got(2 * n);
    decoded.download(got.data(), got.size(), 2 * start);
    if (got != expected_elements) fail("dequantize is wrong in the window at " + std::to_string(start));

    std::vector<uint8_t> expected_sum(packetBytes(kFormat, n));
    ReduceJob reduce;
    reduce.format = kFormat;
    reduce.packets = 3;
    reduce.in = expected.data();
    reduce.elements = n;
    reduce.out = expected_sum.data();
    reference::reduce(reduce);
    if (packetWindow(sum, start, n) != expected_sum)
      fail("reduce is wrong in the window at " + std::to_string(start));
  }

  std::vector<uint8_t> packetWindow(const Buffer& packet, uint64_t start, uint64_t n) {
    std::vector<uint8_t> out(packetBytes(kFormat, n));
    packet.download(out.data(), n, start);
    packet.download(out.data() + scaleOffset(kFormat, n), 4 * blockCount(kFormat, n),
                    scaleOffset(kFormat, kElements) + 4 * (start / kFormat.block));
    return out;
  }

  const Gpu& gpu_;
  const Module& kernels_;
  const std::vector<Path>& paths_;
  CheckResult* result_;
  Stream stream_;
};

}  // namespace

CheckResult checkAll(const Gpu& gpu, const Module& kernels, const std::vector<Path>& paths,
                     const CheckOptions& options) {
  CheckResult result;
  struct Combination {
    WireFormat format;
    DataType type;
  };
  std::vector<Combination> work;
  for (const ElementFormat element : kElementFormats) {
    for (const ScaleFormat scale : {ScaleFormat::kFp32, ScaleFormat::kE8M0}) {
      for (const uint16_t block : {32, 64, 128, 256}) {
        for (const DataType type : {DataType::kBf16, DataType::kFp16, DataType::kFp32})
          work.push_back({{element, scale, block}, type});
      }
    }
  }
  std::atomic<size_t> next{0};
  std::mutex mutex;
  const auto body = [&] {
    gpu.must("cuCtxSetCurrent", gpu.cuCtxSetCurrent(gpu.context));
    Worker worker(gpu, paths, options, result, mutex);
    for (size_t i = next++; i < work.size(); i = next++) worker.run(work[i].format, work[i].type);
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, options.threads); ++t) threads.emplace_back(body);
  for (std::thread& thread : threads) thread.join();

  if (!options.small) {
    checkRange(gpu, kernels, "compare_reciprocal", 0x7e000001u, &result);
    for (const char* kernel :
         {"compare_quotient_e4m3", "compare_quotient_e5m2", "compare_quotient_int8", "compare_quotient_e3m4"})
      checkRange(gpu, kernels, kernel, 0x7f800000u, &result);
    checkRange(gpu, kernels, "compare_encode_e4m3", 2 * (uint64_t{std::bit_cast<uint32_t>(448.0f)} + 9),
               &result);
    checkRange(gpu, kernels, "compare_encode_e5m2", 2 * (uint64_t{std::bit_cast<uint32_t>(57344.0f)} + 9),
               &result);
  }
  if (options.large && !options.small) LargeCheck(gpu, kernels, paths, &result).run();
  return result;
}

}  // namespace halfwire::check
