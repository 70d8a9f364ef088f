// Medians over CUDA events, each sample of a kernel next to a sample of cuMemcpyDtoDAsync that moves the same
// bytes.
#include "wire/cuda_check/measure.h"

#include <algorithm>
#include <cstdio>
#include <functional>

#include "wire/cuda_check/variants.h"
#include "wire/cuda_codec.h"

namespace halfwire::check {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kLargest = 1024 * kMiB;  // bytes of elements of the largest row

const char* name(ElementFormat f) {
  return elementFormatName(f);
}
const char* name(ScaleFormat f) { return f == ScaleFormat::kFp32 ? "fp32" : "e8m0"; }
const char* name(DataType t) {
  return t == DataType::kBf16 ? "bf16" : t == DataType::kFp16 ? "fp16" : "fp32";
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 != 0 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

struct Rate {
  double seconds = 0;       // of one launch, median
  double copy_seconds = 0;  // of the copy that moves the same bytes, median
  double ratio = 0;         // copy time over kernel time of the same sample, median
  double ratio_low = 0;     // lowest and highest sample
  double ratio_high = 0;
};

class Bench {
 public:
  Bench(const Gpu& gpu, const Module& kernels, const Module& variants, const std::vector<Path>& paths,
        const MeasureOptions& options)
      : gpu_(gpu),
        kernels_(kernels),
        variants_(variants),
        paths_(paths),
        options_(options),
        stream_(gpu),
        timers_(gpu, 3 * static_cast<size_t>(options.samples) + 4),
        elements_(gpu, kLargest),
        packets_(gpu, kLargest + kLargest / 4),
        out_(gpu, kLargest + kLargest / 4),
        fp32_(gpu, kLargest),
        copy_from_(gpu, kLargest),
        copy_to_(gpu, kLargest) {
    fill(4, kLargest / 4);
    gpu_.must("cuMemsetD8Async", gpu_.cuMemsetD8Async(copy_from_.address(), 1, kLargest, stream_.get()));
    stream_.synchronize();
  }

  Measurement run() {
    Measurement& m = measurement_;
    m.json = {{"gpu", gpu_.name},
              {"driver", gpu_.driver_version},
              {"multiprocessors", gpu_.multiprocessors},
              {"samples", options_.samples}};
    line("copy of the same bytes by cuMemcpyDtoDAsync, alternating, medians of " +
             std::to_string(options_.samples) + "; rates count bytes read and written",
         true);
    roofline();
    if (options_.formats) formats();
    graph();
    unfused();
    if (options_.variants) compareVariants();
    return std::move(measurement_);
  }

 private:
  using Launch = std::function<void()>;

  void line(const std::string& text, bool summary) {
    measurement_.full.push_back(text);
    if (summary) measurement_.summary.push_back(text);
  }

  void ok(const Status& status) const {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::_Exit(3);
  }

  void fill(uint32_t bytes, uint64_t count) {
    launch(gpu_, kernels_.function("fill_elements"), 8192, 256, stream_.get(), elements_.address(), count,
           bytes, uint64_t{7});
  }

  // Samples of `repeat` launches each, alternating with copies that read and write `bytes` in all per launch.
  Rate time(uint64_t bytes, const Launch& once) {
    const auto samples = static_cast<size_t>(options_.samples);
    const int repeat = bytes < 700 * kMiB ? 4 : 1;
    const uint64_t half = std::min(bytes / 2, kLargest);
    const double scale = static_cast<double>(bytes) / (2 * static_cast<double>(half));
    for (int i = 0; i < 3; ++i) once();
    gpu_.must("copy", gpu_.cuMemcpyDtoDAsync(copy_to_.address(), copy_from_.address(), half, stream_.get()));
    for (size_t s = 0; s < samples; ++s) {
      timers_.record(3 * s, stream_.get());
      for (int i = 0; i < repeat; ++i) once();
      timers_.record(3 * s + 1, stream_.get());
      for (int i = 0; i < repeat; ++i)
        gpu_.must("copy",
                  gpu_.cuMemcpyDtoDAsync(copy_to_.address(), copy_from_.address(), half, stream_.get()));
      timers_.record(3 * s + 2, stream_.get());
    }
    stream_.synchronize();
    std::vector<double> kernel;
    std::vector<double> copy;
    std::vector<double> ratio;
    for (size_t s = 0; s < samples; ++s) {
      kernel.push_back(timers_.seconds(3 * s, 3 * s + 1) / repeat);
      copy.push_back(timers_.seconds(3 * s + 1, 3 * s + 2) / repeat * scale);
      ratio.push_back(copy.back() / kernel.back());
    }
    return {median(kernel), median(copy), median(ratio), *std::min_element(ratio.begin(), ratio.end()),
            *std::max_element(ratio.begin(), ratio.end())};
  }

  struct Row {
    const char* operation;
    std::string path;
    WireFormat format;
    DataType type;
    uint64_t message;  // bytes
    uint64_t elements;
    uint32_t packets;
    uint64_t bytes;  // read and written
  };

  void report(const Row& row, const Rate& rate, bool summary) {
    measurement_.json["rows"].push_back(
        {{"op", row.operation},
         {"path", row.path},
         {"input", name(row.type)},
         {"format", name(row.format.element)},
         {"block", row.format.block},
         {"scale", name(row.format.scale)},
         {"message_bytes", row.message},
         {"elements", row.elements},
         {"packets", row.packets},
         {"bytes", row.bytes},
         {"seconds", rate.seconds},
         {"bytes_per_s", static_cast<double>(row.bytes) / rate.seconds},
         {"copy_bytes_per_s", static_cast<double>(row.bytes) / rate.copy_seconds},
         {"ratio", rate.ratio},
         {"ratio_low", rate.ratio_low},
         {"ratio_high", rate.ratio_high}});
    char text[200];
    std::snprintf(
        text, sizeof(text),
        "%-10s %-8s %-4s %-4s %3u %-4s %5llu MiB %8.1f us %5.0f GB/s copy %5.0f ratio %.3f (%.3f-%.3f)",
        row.operation, row.path.c_str(), name(row.type), name(row.format.element), row.format.block,
        name(row.format.scale), static_cast<unsigned long long>(row.message / kMiB), 1e6 * rate.seconds,
        1e-9 * static_cast<double>(row.bytes) / rate.seconds,
        1e-9 * static_cast<double>(row.bytes) / rate.copy_seconds, rate.ratio, rate.ratio_low,
        rate.ratio_high);
    line(text, summary);
  }

  QuantizeJob quantizeJob(const WireFormat& format, DataType type, uint64_t elements) const {
    QuantizeJob job;
    job.format = format;
    job.type = type;
    job.in = elements_.at();
    job.in_pitch = job.in_total = job.segment_elements = elements;
    job.out = packets_.at();
    job.out_pitch = packetBytes(format, elements);
    return job;
  }

  void quantize(const Path& path, const WireFormat& format, DataType type, uint64_t message, bool summary) {
    const uint64_t n = message / dataTypeBytes(type);
    const QuantizeJob job = quantizeJob(format, type, n);
    const uint64_t bytes = message + packetBytes(format, n);
    report({"quantize", path.name, format, type, message, n, 1, bytes},
           time(bytes, [&] { ok(path.device->quantize(job, stream_.get())); }), summary);
  }

  // Expects a packet of the same format, type and size in packets_, as quantize() leaves it.
  void dequantize(const Path& path, const WireFormat& format, DataType type, uint64_t message, bool summary) {
    const uint64_t n = message / dataTypeBytes(type);
    DequantizeJob job;
    job.format = format;
    job.type = type;
    job.in = packets_.at();
    job.in_pitch = packetBytes(format, n);
    job.segment_elements = job.out_pitch = job.out_total = n;
    job.out = out_.at();
    const uint64_t bytes = message + packetBytes(format, n);
    report({"dequantize", path.name, format, type, message, n, 1, bytes},
           time(bytes, [&] { ok(path.device->dequantize(job, stream_.get())); }), summary);
  }

  // `packets` packets whose codes make up `message` bytes; packets_ holds them all.
  ReduceJob reduceJob(const WireFormat& format, DataType type, uint64_t message, uint32_t packets,
                      bool to_packet) {
    const uint64_t n = message / packets;
    ReduceJob job;
    job.format = format;
    job.type = type;
    job.packets = packets;
    job.elements = n;
    job.in = packets_.at();
    job.in_pitch = packetBytes(format, n);
    job.out = out_.at();
    job.to_packet = to_packet;
    return job;
  }

  // Fills packets_ with `packets` packets of bf16 values.
  void makePackets(const WireFormat& format, uint64_t message, uint32_t packets) {
    makePackets(format, message, packets, packets_);
  }

  void makePackets(const WireFormat& format, uint64_t message, uint32_t packets, const Buffer& into) {
    const uint64_t n = message / packets;
    for (uint32_t k = 0; k < packets; ++k) {
      launch(gpu_, kernels_.function("fill_elements"), 8192, 256, stream_.get(), elements_.address(), n,
             uint32_t{2}, uint64_t{k});
      QuantizeJob job = quantizeJob(format, DataType::kBf16, n);
      job.out = into.at(k * packetBytes(format, n));
      ok(paths_[0].device->quantize(job, stream_.get()));
    }
  }

  void reduce(const Path& path, const WireFormat& format, DataType type, uint64_t message, uint32_t packets,
              bool to_packet, bool summary) {
    const ReduceJob job = reduceJob(format, type, message, packets, to_packet);
    const uint64_t bytes =
        packets * job.in_pitch + (to_packet ? job.in_pitch : job.elements * dataTypeBytes(type));
    report(
        {to_packet ? "reduce" : "reduce-out", path.name, format, type, message, job.elements, packets, bytes},
        time(bytes, [&] { ok(path.device->reduce(job, stream_.get())); }), summary);
  }

  static constexpr WireFormat kDefault{ElementFormat::kE4M3, ScaleFormat::kFp32, 128};

  void roofline() {
    for (const uint64_t message : {256 * kMiB, 1024 * kMiB}) {
      for (const DataType type : {DataType::kBf16, DataType::kFp32}) {
        fill(static_cast<uint32_t>(dataTypeBytes(type)), message / dataTypeBytes(type));
        for (const Path& path : paths_) {
          quantize(path, kDefault, type, message, true);
          dequantize(path, kDefault, type, message, true);
        }
      }
      makePackets(kDefault, message, 8);
      for (const Path& path : paths_) {
        reduce(path, kDefault, DataType::kBf16, message, 8, true, true);
        reduce(path, kDefault, DataType::kBf16, message, 8, false, false);
      }
      makePackets(kDefault, message, 2);
      for (const Path& path : paths_) {
        reduce(path, kDefault, DataType::kBf16, message, 2, true, false);
        reduce(path, kDefault, DataType::kBf16, message, 2, false, message == 256 * kMiB);
        if (message == 256 * kMiB) reduce(path, kDefault, DataType::kFp32, message, 2, false, false);
      }
    }
  }

  // Everything at 256 MiB; the lowest ratios of each operation and path go into the summary.
  void formats() {
    const size_t before = measurement_.json["rows"].size();
    constexpr uint64_t kMessage = 256 * kMiB;
    for (const DataType type : {DataType::kBf16, DataType::kFp16, DataType::kFp32}) {
      // fp16 reads the bit patterns of bf16 values, which are finite fp16 values as well.
      fill(type == DataType::kFp32 ? 4 : 2, kMessage / dataTypeBytes(type));
      for (const ElementFormat element : kElementFormats) {
        for (const ScaleFormat scale : {ScaleFormat::kFp32, ScaleFormat::kE8M0}) {
          for (const uint16_t block : {32, 64, 128, 256}) {
            for (const Path& path : paths_) {
              quantize(path, {element, scale, block}, type, kMessage, false);
              dequantize(path, {element, scale, block}, type, kMessage, false);
            }
          }
        }
      }
    }
    for (const ElementFormat element : kElementFormats) {
      for (const ScaleFormat scale : {ScaleFormat::kFp32, ScaleFormat::kE8M0}) {
        for (const uint16_t block : {32, 64, 128, 256}) {
          makePackets({element, scale, block}, kMessage, 8);
          for (const Path& path : paths_)
            reduce(path, {element, scale, block}, DataType::kBf16, kMessage, 8, true, false);
        }
      }
    }
    for (const char* operation : {"quantize", "dequantize", "reduce"}) {
      for (const Path& path : paths_) {
        std::vector<std::pair<double, std::string>> found;
        for (size_t i = before; i < measurement_.json["rows"].size(); ++i) {
          const auto& row = measurement_.json["rows"][i];
          if (row["op"] != operation || row["path"] != path.name) continue;
          found.emplace_back(row["ratio"].get<double>(), row["input"].get<std::string>() + " " +
                                                             row["format"].get<std::string>() + "/" +
                                                             std::to_string(row["block"].get<int>()) + "/" +
                                                             row["scale"].get<std::string>());
        }
        std::sort(found.begin(), found.end());
        char text[200];
        std::snprintf(
            text, sizeof(text),
            "all formats %-10s %-8s: %zu rows, ratio %.3f (%s), %.3f (%s), median %.3f, best %.3f (%s)",
            operation, path.name.c_str(), found.size(), found[0].first, found[0].second.c_str(),
            found[1].first, found[1].second.c_str(), found[found.size() / 2].first, found.back().first,
            found.back().second.c_str());
        line(text, true);
      }
    }
  }

  // Microseconds of one of `launches` launches in a replayed graph, median over replays.
  double graphMicroseconds(int launches, const Launch& once) {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    gpu_.must("cuStreamBeginCapture", gpu_.cuStreamBeginCapture(stream_.get(), cuda::kCaptureModeRelaxed));
    for (int i = 0; i < launches; ++i) once();
    gpu_.must("cuStreamEndCapture", gpu_.cuStreamEndCapture(stream_.get(), &graph));
    gpu_.must("cuGraphInstantiate", gpu_.cuGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; ++i) gpu_.must("cuGraphLaunch", gpu_.cuGraphLaunch(exec, stream_.get()));
    constexpr size_t kReplays = 20;
    for (size_t i = 0; i < kReplays; ++i) {
      timers_.record(2 * i, stream_.get());
      gpu_.must("cuGraphLaunch", gpu_.cuGraphLaunch(exec, stream_.get()));
      timers_.record(2 * i + 1, stream_.get());
    }
    stream_.synchronize();
    std::vector<double> each;
    for (size_t i = 0; i < kReplays; ++i) each.push_back(1e6 * timers_.seconds(2 * i, 2 * i + 1) / launches);
    (void)gpu_.cuGraphExecDestroy(exec);
    (void)gpu_.cuGraphDestroy(graph);
    return median(each);
  }

  void graph() {
    constexpr int kLaunches = 1000;
    const auto add = [&](const std::string& what, double us) {
      measurement_.json["graph"].push_back({{"what", what}, {"us_per_launch", us}, {"launches", kLaunches}});
      char text[160];
      std::snprintf(text, sizeof(text), "graph of %d launches: %-36s %6.2f us each", kLaunches, what.c_str(),
                    us);
      line(text, true);
    };
    const QuantizeParams nothing{};
    for (const unsigned blocks : {1u, 128u}) {
      add("empty kernel, " + std::to_string(blocks) + " blocks of 256", graphMicroseconds(kLaunches, [&] {
            launch(gpu_, kernels_.function("empty"), blocks, 256, stream_.get(), nothing);
          }));
    }
    for (const DataType type : {DataType::kBf16, DataType::kFp32}) {
      const uint64_t n = kMiB / dataTypeBytes(type);
      fill(static_cast<uint32_t>(dataTypeBytes(type)), n);
      const QuantizeJob job = quantizeJob(kDefault, type, n);
      DequantizeJob back;
      back.format = kDefault;
      back.type = type;
      back.in = packets_.at();
      back.in_pitch = job.out_pitch;
      back.segment_elements = back.out_pitch = back.out_total = n;
      back.out = out_.at();
      for (const Path& path : paths_) {
        add(std::string("quantize 1 MiB ") + name(type) + " " + path.name,
            graphMicroseconds(kLaunches, [&] { ok(path.device->quantize(job, stream_.get())); }));
        add(std::string("dequantize 1 MiB ") + name(type) + " " + path.name,
            graphMicroseconds(kLaunches, [&] { ok(path.device->dequantize(back, stream_.get())); }));
      }
    }
    makePackets(kDefault, kMiB, 8);
    for (const Path& path : paths_) {
      const ReduceJob job = reduceJob(kDefault, DataType::kBf16, kMiB, 8, true);
      add("reduce W=8 1 MiB of codes " + path.name,
          graphMicroseconds(kLaunches, [&] { ok(path.device->reduce(job, stream_.get())); }));
    }
  }

  // The fused reduction against a dequantize and an add for each packet and one quantize, fp32 in between.
  void unfused() {
    constexpr uint32_t kPackets = 8;
    for (const uint64_t message : {64 * kMiB, 256 * kMiB}) {
      makePackets(kDefault, message, kPackets);
      ReduceJob fused = reduceJob(kDefault, DataType::kFp32, message, kPackets, true);
      const uint64_t n = fused.elements;
      const uint64_t packet = fused.in_pitch;
      const Buffer unfused_packet(gpu_, packet);
      for (const Path& path : paths_) {
        Device& device = *path.device;
        const auto steps = [&] {
          for (uint32_t k = 0; k < kPackets; ++k) {
            DequantizeJob job;
            job.format = kDefault;
            job.type = DataType::kFp32;
            job.in = packets_.at(k * packet);
            job.in_pitch = packet;
            job.segment_elements = job.out_pitch = job.out_total = n;
            job.out = k == 0 ? fp32_.at() : copy_to_.at();
            ok(device.dequantize(job, stream_.get()));
            if (k == 0) continue;
            launch(gpu_, kernels_.function("add_fp32"), (n / 4 + 255) / 256, 256, stream_.get(),
                   fp32_.address(), copy_to_.address(), n / 4);
          }
          QuantizeJob job = quantizeJob(kDefault, DataType::kFp32, n);
          job.in = fp32_.at();
          job.out = unfused_packet.at();
          ok(device.quantize(job, stream_.get()));
        };
        const auto once = [&] { ok(device.reduce(fused, stream_.get())); };
        once();
        steps();
        stream_.synchronize();
        std::vector<uint8_t> a(std::min<uint64_t>(packet, 4 * kMiB));
        std::vector<uint8_t> b(a.size());
        out_.download(a.data(), a.size());
        unfused_packet.download(b.data(), b.size());
        std::vector<double> fused_s;
        std::vector<double> unfused_s;
        std::vector<double> ratio;
        const auto samples = static_cast<size_t>(options_.samples);
        for (size_t s = 0; s < samples; ++s) {
          timers_.record(3 * s, stream_.get());
          once();
          timers_.record(3 * s + 1, stream_.get());
          steps();
          timers_.record(3 * s + 2, stream_.get());
        }
        stream_.synchronize();
        for (size_t s = 0; s < samples; ++s) {
          fused_s.push_back(timers_.seconds(3 * s, 3 * s + 1));
          unfused_s.push_back(timers_.seconds(3 * s + 1, 3 * s + 2));
          ratio.push_back(unfused_s.back() / fused_s.back());
        }
        const double fused_bytes = static_cast<double>((kPackets + 1) * packet);
        const double unfused_bytes =
            static_cast<double>(kPackets * (packet + 4 * n) + (kPackets - 1) * 12 * n + 4 * n + packet);
        measurement_.json["fused"].push_back(
            {{"path", path.name},
             {"message_bytes", message},
             {"packets", kPackets},
             {"fused_seconds", median(fused_s)},
             {"unfused_seconds", median(unfused_s)},
             {"time_ratio", median(ratio)},
             {"time_ratio_low", *std::min_element(ratio.begin(), ratio.end())},
             {"time_ratio_high", *std::max_element(ratio.begin(), ratio.end())},
             {"byte_ratio", unfused_bytes / fused_bytes},
             {"same_bits", a == b}});
        char text[200];
        std::snprintf(text, sizeof(text),
                      "fused W=8 %llu MiB %-8s: %.1f us against %.1f us in 16 kernels: %.2fx time, %.2fx "
                      "bytes, %s bits",
                      static_cast<unsigned long long>(message / kMiB), path.name.c_str(),
                      1e6 * median(fused_s), 1e6 * median(unfused_s), median(ratio),
                      unfused_bytes / fused_bytes, a == b ? "same" : "DIFFERENT");
        line(text, true);
      }
    }
  }

  // A kernel of variants.cu on the arguments of a job.
  template <class Job>
  void variant(const Job& job, const std::string& kernel, uint32_t threads, uint32_t tile, uint64_t n,
               uint64_t bytes, const Job& tiny, uint64_t tiny_n,
               std::vector<std::pair<double, std::string>>* found) {
    if (!variants_.has(kernel)) return;
    CudaLaunch shape;
    CudaLaunch tiny_shape;
    if (!cudaLaunch(job, CodecPath::kHardware, 0, &shape) ||
        !cudaLaunch(tiny, CodecPath::kHardware, 0, &tiny_shape))
      return;
    const CUfunction function = variants_.function(kernel);
    const auto run = [&](CudaLaunch& launch_shape, uint64_t elements) {
      void* params[] = {launch_shape.argument()};
      gpu_.must(kernel.c_str(),
                gpu_.driver.cuLaunchKernel(function, static_cast<unsigned>((elements + tile - 1) / tile), 1,
                                           1, threads, 1, 1, 0, stream_.get(), params, nullptr));
    };
    const Rate rate = time(bytes, [&] { run(shape, n); });
    const double us = graphMicroseconds(200, [&] { run(tiny_shape, tiny_n); });
    measurement_.json["variants"].push_back({{"kernel", kernel},
                                             {"ratio", rate.ratio},
                                             {"ratio_low", rate.ratio_low},
                                             {"ratio_high", rate.ratio_high},
                                             {"seconds", rate.seconds},
                                             {"us_1MiB", us}});
    char text[160];
    std::snprintf(text, sizeof(text), "%-44s ratio %.3f (%.3f-%.3f) 1 MiB %.2f us", kernel.c_str(),
                  rate.ratio, rate.ratio_low, rate.ratio_high, us);
    line(text, false);
    found->emplace_back(rate.ratio, text);
  }

  void best(std::vector<std::pair<double, std::string>>& found, size_t how_many) {
    std::sort(found.rbegin(), found.rend());
    for (size_t i = 0; i < std::min(how_many, found.size()); ++i) line("best " + found[i].second, true);
    if (found.size() > how_many) line("last " + found.back().second, true);
    found.clear();
  }

  void compareVariants() {
    constexpr uint64_t kMessage = 256 * kMiB;
    std::vector<std::pair<double, std::string>> found;
    for (const DataType type : {DataType::kBf16, DataType::kFp32}) {
      const uint64_t n = kMessage / dataTypeBytes(type);
      const uint64_t tiny = kMiB / dataTypeBytes(type);
      const uint64_t bytes = kMessage + packetBytes(kDefault, n);
      fill(static_cast<uint32_t>(dataTypeBytes(type)), n);
      for (const Path& path : paths_) {
        const std::string prefix = std::string("quantize_") + name(type) + "_" + path.name;
#define X(threads, repeat, hint, resident)                                                                \
  variant(quantizeJob(kDefault, type, n), prefix + "_" #threads "_" #repeat "_" #hint "_" #resident,      \
          threads, threads * kThreadElements * repeat, n, bytes, quantizeJob(kDefault, type, tiny), tiny, \
          &found);
        HALFWIRE_QUANTIZE_VARIANTS(X)
#undef X
        best(found, 3);
      }
      ok(paths_[0].device->quantize(quantizeJob(kDefault, type, n), stream_.get()));
      DequantizeJob job;
      job.format = kDefault;
      job.type = type;
      job.in = packets_.at();
      job.in_pitch = packetBytes(kDefault, n);
      job.segment_elements = job.out_pitch = job.out_total = n;
      job.out = out_.at();
      DequantizeJob small = job;
      small.segment_elements = small.out_pitch = small.out_total = tiny;
      QuantizeJob small_packet = quantizeJob(kDefault, type, tiny);
      small_packet.out = fp32_.at();
      ok(paths_[0].device->quantize(small_packet, stream_.get()));
      small.in = fp32_.at();
      for (const Path& path : paths_) {
        const std::string prefix = std::string("dequantize_") + name(type) + "_" + path.name;
#define X(threads, repeat, hint, resident)                                         \
  variant(job, prefix + "_" #threads "_" #repeat "_" #hint "_" #resident, threads, \
          threads * kThreadElements * repeat, n, bytes, small, tiny, &found);
        HALFWIRE_DEQUANTIZE_VARIANTS(X)
#undef X
        best(found, 2);
      }
    }
    for (const uint32_t packets : {8u, 2u}) {
      makePackets(kDefault, kMessage, packets);
      const ReduceJob job = reduceJob(kDefault, DataType::kBf16, kMessage, packets, true);
      makePackets(kDefault, kMiB, packets, fp32_);
      ReduceJob small = reduceJob(kDefault, DataType::kBf16, kMiB, packets, true);
      small.in = fp32_.at();
      line("reduce of " + std::to_string(packets) + " packets:", true);
      for (const Path& path : paths_) {
        const std::string prefix = "reduce_packet_" + path.name;
#define X(threads, depth, hint, resident)                                                                    \
  variant(job, prefix + "_" #threads "_" #depth "_" #hint "_" #resident, threads, threads * kThreadElements, \
          job.elements, (packets + 1) * job.in_pitch, small, small.elements, &found);
        HALFWIRE_REDUCE_VARIANTS(X)
#undef X
        best(found, 3);
      }
    }
  }

  const Gpu& gpu_;
  const Module& kernels_;
  const Module& variants_;
  const std::vector<Path>& paths_;
  const MeasureOptions& options_;
  Stream stream_;
  Timers timers_;
  Buffer elements_;
  Buffer packets_;
  Buffer out_;
  Buffer fp32_;
  Buffer copy_from_;
  Buffer copy_to_;
  Measurement measurement_;
};

}  // namespace

Measurement measureAll(const Gpu& gpu, const Module& kernels, const Module& variants,
                       const std::vector<Path>& paths, const MeasureOptions& options) {
  return Bench(gpu, kernels, variants, paths, options).run();
}

}  // namespace halfwire::check
