// The rules that codec.h states for the fields of jobs.
#include "device/check_job.h"

#include <string>

namespace halfwire {
namespace {

// Far above any memory, and far enough below 2^64 that sums and multiples of two of them by four do not wrap.
constexpr uint64_t kMaxExtent = uint64_t{1} << 56;

Status invalid(const char* operation, const std::string& what) {
  return Status(StatusCode::kInvalidArgument, std::string(operation) + ": " + what);
}

Status checkFormat(const char* operation, const WireFormat& format, DataType type) {
  if (format.block != 32 && format.block != 64 && format.block != 128 && format.block != 256)
    return invalid(operation, "the block is " + std::to_string(format.block) +
                                  " elements; it must be 32, 64, 128 or 256");
  if (static_cast<uint32_t>(format.element) >= kElementFormatCount || format.scale > ScaleFormat::kE8M0 ||
      type > DataType::kFp32)
    return invalid(operation, "unknown element format, scale format or data type");
  return {};
}

bool aligned(const void* pointer, uint64_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// The side of a segmented job that holds elements and the one that holds packets.
struct Sides {
  const void* elements;
  uint64_t element_pitch;
  uint64_t total;
  const void* packets;
  uint64_t packet_pitch;
};

Status checkSegments(const char* operation, const WireFormat& format, DataType type, uint32_t segments,
                     uint64_t segment_elements, const Sides& sides) {
  if (Status status = checkFormat(operation, format, type); !status.ok()) return status;
  if (segments == 0 || segment_elements == 0 || sides.total == 0) return {};
  if (sides.total > kMaxExtent || segment_elements > kMaxExtent || sides.element_pitch > kMaxExtent ||
      sides.packet_pitch > kMaxExtent / segments)
    return invalid(operation, "sizes beyond 2^56 elements or bytes");
  if (sides.elements == nullptr || sides.packets == nullptr) return invalid(operation, "a buffer is null");
  if (!aligned(sides.elements, dataTypeBytes(type)))
    return invalid(operation, "the element buffer is not aligned to its element type");
  if (!aligned(sides.packets, kPacketAlignment))
    return invalid(operation, "the packets are not aligned to 16 bytes");
  const bool several = segments > 1 && sides.element_pitch < sides.total;
  if (several && sides.packet_pitch % kPacketAlignment != 0)
    return invalid(operation, "the pitch of the packets is not a multiple of 16 bytes");
  const uint64_t longest = segment_elements < sides.total ? segment_elements : sides.total;
  if (several && sides.packet_pitch < packetBytes(format, longest))
    return invalid(operation, "the pitch of the packets is shorter than a packet");
  return {};
}

}  // namespace

Status checkJob(const QuantizeJob& job) {
  const Sides sides{job.in, job.in_pitch, job.in_total, job.out, job.out_pitch};
  if (Status status =
          checkSegments("quantize", job.format, job.type, job.segments, job.segment_elements, sides);
      !status.ok())
    return status;
  if (job.factor.present && !aligned(job.factor.device, dataTypeBytes(job.type)))
    return invalid("quantize", "the factor is not aligned to the data type");
  return {};
}

Status checkJob(const DequantizeJob& job) {
  const Sides sides{job.out, job.out_pitch, job.out_total, job.in, job.in_pitch};
  if (job.segments > 1 && job.out_total != 0 && job.out_pitch < job.segment_elements &&
      job.out_pitch < job.out_total)
    return invalid("dequantize", "segments of the output overlap");
  return checkSegments("dequantize", job.format, job.type, job.segments, job.segment_elements, sides);
}

Status checkJob(const ReduceJob& job) {
  constexpr const char* kName = "reduce";
  if (Status status = checkFormat(kName, job.format, job.type); !status.ok()) return status;
  if (job.packets == 0) return invalid(kName, "there is no packet to sum");
  if (job.elements == 0) return {};
  if (job.elements > kMaxExtent || job.in_pitch > kMaxExtent / job.packets)
    return invalid(kName, "sizes beyond 2^56 elements or bytes");
  const bool has_own = job.own_index >= 0 && static_cast<uint32_t>(job.own_index) < job.packets;
  if (job.out == nullptr || (has_own && job.own == nullptr) ||
      (job.in == nullptr && !(has_own && job.packets == 1)))
    return invalid(kName, "a buffer is null");
  if (!aligned(job.in, kPacketAlignment) || (has_own && !aligned(job.own, kPacketAlignment)))
    return invalid(kName, "a packet is not aligned to 16 bytes");
  if (job.packets > 1 && job.in_pitch % kPacketAlignment != 0)
    return invalid(kName, "the pitch of the packets is not a multiple of 16 bytes");
  if (!aligned(job.out, job.to_packet ? kPacketAlignment : dataTypeBytes(job.type)))
    return invalid(kName, "the output is not aligned");
  return {};
}

Status checkJob(const PerturbJob& job) {
  if (job.elements == 0) return {};
  if (job.elements > kMaxExtent) return invalid("perturb", "sizes beyond 2^56 elements or bytes");
  if (job.data == nullptr) return invalid("perturb", "a buffer is null");
  if (!aligned(job.data, dataTypeBytes(job.type)))
    return invalid("perturb", "the buffer is not aligned to its element type");
  return {};
}

Status checkJob(const CompareJob& job) {
  if (job.elements == 0) return {};
  if (job.elements > kMaxExtent) return invalid("compare", "sizes beyond 2^56 elements or bytes");
  if (job.exact == nullptr || job.other == nullptr || job.sums == nullptr)
    return invalid("compare", "a buffer is null");
  if (!aligned(job.exact, dataTypeBytes(job.type)) || !aligned(job.other, dataTypeBytes(job.type)))
    return invalid("compare", "a buffer is not aligned to its element type");
  if (!aligned(job.sums, alignof(ErrorSums))) return invalid("compare", "the sums are not aligned");
  return {};
}

}  // namespace halfwire
