#include "wire/cuda_check/codec_rows.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace halfwire::check {
namespace {

constexpr uint64_t kPatternElements = uint64_t{1} << 20;  // drawn once and repeated in larger buffers
constexpr uint64_t kSnrChunk = uint64_t{1} << 20;         // a multiple of every block

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// The jobs of a case.
struct Codec {
  Device& device;
  const CodecCase& c;
  CUstream stream;

  // `rank`: of whom the packet is; ranks round independently.
  Status quantize(uint64_t elements, const void* in, void* packet, uint32_t rank = 0) const {
    QuantizeJob job;
    job.format = c.format;
    job.type = c.type;
    job.in = in;
    job.in_pitch = job.in_total = job.segment_elements = elements;
    job.out = packet;
    job.out_pitch = packetBytes(c.format, elements);
    job.rounding = c.rounding;
    job.rounding.key += rank;
    return device.quantize(job, stream);
  }
  Status dequantize(uint64_t elements, const void* packet, void* out) const {
    DequantizeJob job;
    job.format = c.format;
    job.type = c.type;
    job.in = packet;
    job.in_pitch = packetBytes(c.format, elements);
    job.out_pitch = job.out_total = job.segment_elements = elements;
    job.out = out;
    return device.dequantize(job, stream);
  }
  Status reduce(uint64_t elements, const void* packets, void* out) const {
    ReduceJob job;
    job.format = c.format;
    job.type = c.type;
    job.packets = c.packets;
    job.in = packets;
    job.in_pitch = packetBytes(c.format, elements);
    job.elements = elements;
    job.out = out;
    job.rounding = c.rounding;
    return device.reduce(job, stream);
  }
};

Status snr(const Gpu& gpu, const Codec& codec, const Stream& stream, double* db) {
  const CodecCase& c = codec.c;
  const bool sum = c.op == CodecOp::kReduce;
  const uint32_t inputs = sum ? c.packets : 1;
  const uint64_t packet = packetBytes(c.format, kSnrChunk);
  const Buffer in(gpu, kSnrChunk * dataTypeBytes(c.type)), out(gpu, in.size());
  const Buffer packets(gpu, packet * inputs), total(gpu, packet);
  std::vector<uint8_t> host(in.size());
  std::vector<double> exact(kSnrChunk);
  double signal = 0, noise = 0;
  for (uint64_t done = 0; done < std::max<uint64_t>(c.snr_elements, 1); done += kSnrChunk) {
    std::fill(exact.begin(), exact.end(), 0.0);
    for (uint32_t k = 0; k < inputs; ++k) {
      fillNormal(c.type, 2 + done + k, kSnrChunk, host.data());
      for (uint64_t i = 0; i < kSnrChunk; ++i) exact[i] += elementAt(c.type, host.data(), i);
      in.upload(host.data(), host.size());
      if (Status s = codec.quantize(kSnrChunk, in.at(), packets.at(k * packet), k + 1); !s.ok()) return s;
      stream.synchronize();
    }
    if (sum) {
      if (Status s = codec.reduce(kSnrChunk, packets.at(), total.at()); !s.ok()) return s;
    }
    if (Status s = codec.dequantize(kSnrChunk, sum ? total.at() : packets.at(), out.at()); !s.ok()) return s;
    stream.synchronize();
    out.download(host.data(), host.size());
    for (uint64_t i = 0; i < kSnrChunk; ++i) {
      const double error = elementAt(c.type, host.data(), i) - exact[i];
      signal += exact[i] * exact[i];
      noise += error * error;
    }
  }
  *db = 10.0 * std::log10(signal / noise);
  return {};
}

}  // namespace

Result<CodecRow> measureCudaCodec(const Gpu& gpu, Device& device, const CodecCase& c, int samples,
                                  const std::function<void(double)>& progress) {
  if (c.elements == 0)
    return Status(StatusCode::kInvalidArgument, "There must be an element to measure with; choose more.");
  const uint32_t packet_count = c.op == CodecOp::kReduce ? c.packets : 1;
  const uint64_t element_bytes = c.elements * dataTypeBytes(c.type);
  const uint64_t packet_bytes = packetBytes(c.format, c.elements);
  const uint64_t working_set = codecWorkingSet(c);
  const uint64_t result_bytes = c.op == CodecOp::kDequantize ? element_bytes : packet_bytes;
  const double needed = static_cast<double>(element_bytes + result_bytes + working_set) +
                        static_cast<double>(packet_bytes) * packet_count;
  if (packet_count == 0 || needed > 0.9 * static_cast<double>(gpu.memory)) {
    return Status(StatusCode::kOutOfMemory,
                  "The buffers of this case are larger than the GPU's memory; use fewer elements.");
  }
  const Stream stream(gpu);
  const Buffer elements(gpu, element_bytes), packets(gpu, packet_bytes * packet_count),
      result(gpu, result_bytes), copy_from(gpu, working_set / 2 + 1), copy_to(gpu, working_set / 2 + 1);
  const uint64_t drawn = std::min(c.elements, kPatternElements);
  std::vector<uint8_t> pattern(drawn * dataTypeBytes(c.type));
  fillNormal(c.type, 1, drawn, pattern.data());
  for (uint64_t at = 0; at < element_bytes; at += pattern.size())
    elements.upload(pattern.data(), std::min<uint64_t>(pattern.size(), element_bytes - at), at);
  gpu.must("cuMemsetD8Async", gpu.cuMemsetD8Async(copy_from.address(), 1, copy_from.size(), stream.get()));

  const Codec codec{device, c, stream.get()};
  for (uint32_t k = 0; k < packet_count; ++k) {
    if (Status s = codec.quantize(c.elements, elements.at(), packets.at(k * packet_bytes)); !s.ok()) return s;
  }
  const auto run = [&] {
    switch (c.op) {
      case CodecOp::kQuantize:
        return codec.quantize(c.elements, elements.at(), result.at());
      case CodecOp::kDequantize:
        return codec.dequantize(c.elements, packets.at(), result.at());
      case CodecOp::kReduce:
        return codec.reduce(c.elements, packets.at(), result.at());
    }
    return Status();
  };
  const auto copy = [&] {
    gpu.must("cuMemcpyDtoDAsync",
             gpu.cuMemcpyDtoDAsync(copy_to.address(), copy_from.address(), working_set / 2, stream.get()));
  };

  // Short launches are repeated, so that the events' own time does not count.
  const auto repeat = static_cast<int>(std::clamp<uint64_t>((uint64_t{256} << 20) / working_set, 1, 200));
  for (int i = 0; i < 3; ++i) {
    if (Status s = run(); !s.ok()) return s;
    copy();
  }
  const Timers timers(gpu, 3);
  std::vector<double> runs, copies;
  for (int sample = 0; sample < samples; ++sample) {
    timers.record(0, stream.get());
    for (int i = 0; i < repeat; ++i) {
      if (Status s = run(); !s.ok()) return s;
    }
    timers.record(1, stream.get());
    for (int i = 0; i < repeat; ++i) copy();
    timers.record(2, stream.get());
    stream.synchronize();
    runs.push_back(timers.seconds(0, 1) / repeat);
    copies.push_back(timers.seconds(1, 2) / repeat);
    if (progress) progress(0.8 * (sample + 1) / samples);
  }

  CodecRow row = describeCodec(c);
  row.device = gpu.name;
  row.path = roundsStochastically(c) ? "stochastic" : device.codecName();
  row.bytes_per_s = static_cast<double>(working_set) / median(runs);
  row.copy_bytes_per_s = static_cast<double>(working_set / 2 * 2) / median(copies);
  if (Status s = snr(gpu, codec, stream, &row.snr_db); !s.ok()) return s;
  if (progress) progress(1);
  return row;
}

}  // namespace halfwire::check
