// Names and geometry of the CUDA kernels. The table of names here and the instantiations in kernels.cu belong
// together.
#include "wire/cuda_codec.h"

#include <algorithm>
#include <array>
#include <bit>

#include "wire/constants.h"
#include "wire/cuda_tuning.h"

namespace halfwire {
namespace {

constexpr uint32_t kMaxGridY = 65535;

enum class Operation : uint8_t { kQuantize, kDequantize, kReduce, kPerturb, kCompare };

struct Kernel {
  Operation operation;
  ElementFormat format;
  uint32_t target;  // DataType, or kPacketTarget; of a perturb kernel bf16 for both types of 16 bits
  uint32_t path;    // CodecPath, or kAnyPath
  uint32_t blocks;  // of a quantize kernel
};

constexpr uint32_t kPacketTarget = 3;
constexpr uint32_t kStochasticPath = static_cast<uint32_t>(CodecPath::kStochastic);
constexpr uint32_t kAnyPath = 3;

// Where both paths run the same code, there is one kernel: int8 and e3m4 are not formats of the hardware, and
// reading e5m2 is cutting fp16 numbers.
constexpr bool pathsDiffer(Operation operation, ElementFormat format, uint32_t target) {
  if (format == ElementFormat::kInt8 || format == ElementFormat::kE3M4) return false;
  if (format == ElementFormat::kE4M3 || operation == Operation::kQuantize) return true;
  return operation == Operation::kReduce && target == kPacketTarget;
}

struct Table {
  std::array<Kernel, kCudaKernels> kernel{};
  // kernel index + 1 by [operation][format][target][path][log2(blocks)]
  uint8_t index[3][kElementFormatCount][4][3][3] = {};
  uint32_t size = 0;
};

constexpr Table makeTable() {
  Table table;
  for (uint32_t o = 0; o < 3; ++o) {
    for (uint32_t f = 0; f < kElementFormatCount; ++f) {
      for (uint32_t t = 0; t < 4; ++t) {
        const auto operation = static_cast<Operation>(o);
        const auto format = static_cast<ElementFormat>(f);
        if (t == kPacketTarget && operation != Operation::kReduce) continue;
        const uint32_t variants = operation != Operation::kQuantize             ? 1
                                  : t == static_cast<uint32_t>(DataType::kFp32) ? 3
                                                                                : 2;
        const bool differ = pathsDiffer(operation, format, t);
        const bool rounds = operation == Operation::kQuantize || t == kPacketTarget;
        for (uint32_t p = 0; p < (rounds ? 3u : 2u); ++p) {
          if (p == 1 && !differ) continue;
          for (uint32_t b = 0; b < variants; ++b) {
            const bool any = !differ && p != kStochasticPath;
            table.kernel.at(table.size++) = {operation, format, t, any ? kAnyPath : p, 1u << b};
            table.index[o][f][t][p][b] = static_cast<uint8_t>(table.size);
            if (any) table.index[o][f][t][1][b] = static_cast<uint8_t>(table.size);
          }
        }
      }
    }
  }
  const auto add = [&table](Operation operation, DataType type) {
    table.kernel.at(table.size++) = {operation, ElementFormat::kE4M3, static_cast<uint32_t>(type), kAnyPath,
                                     1};
  };
  for (const DataType type : {DataType::kBf16, DataType::kFp32}) add(Operation::kPerturb, type);
  for (const DataType type : {DataType::kBf16, DataType::kFp16, DataType::kFp32})
    add(Operation::kCompare, type);
  return table;
}

constexpr Table kTable = makeTable();
constexpr uint32_t kPerturb16 = kCudaKernels - 5;
constexpr uint32_t kPerturb32 = kCudaKernels - 4;
constexpr uint32_t kCompareFirst = kCudaKernels - 3;  // and the DataType
static_assert(kTable.size == kCudaKernels);

uint32_t kernelIndex(Operation operation, ElementFormat format, uint32_t target, CodecPath path,
                     uint32_t blocks) {
  return kTable.index[static_cast<uint32_t>(operation)][static_cast<uint32_t>(format)][target]
                     [static_cast<uint32_t>(path)][std::countr_zero(blocks)] -
         1u;
}

std::array<std::string, kCudaKernels> makeNames() {
  constexpr const char* kOperations[] = {"quantize", "dequantize", "reduce"};
  constexpr const char* kTargets[] = {"bf16", "fp16", "fp32", "packet"};
  constexpr const char* kPaths[] = {"hardware", "software", "stochastic", "any"};
  std::array<std::string, kCudaKernels> names;
  for (uint32_t i = 0; i < kCudaKernels; ++i) {
    const Kernel& k = kTable.kernel[i];
    if (k.operation == Operation::kPerturb) {
      names[i] = i == kPerturb16 ? "halfwire_perturb_16" : "halfwire_perturb_32";
      continue;
    }
    if (k.operation == Operation::kCompare) {
      names[i].append("halfwire_compare_").append(kTargets[k.target]);
      continue;
    }
    std::string& name = names[i];
    name.append("halfwire_").append(kOperations[static_cast<uint32_t>(k.operation)]).append("_");
    name.append(elementFormatName(k.format)).append("_").append(kTargets[k.target]).append("_");
    name.append(kPaths[k.path]);
    if (k.operation == Operation::kQuantize) name.append("_").append(std::to_string(k.blocks));
  }
  return names;
}

uint32_t log2Of(uint32_t value) { return static_cast<uint32_t>(std::countr_zero(value)); }

// Segments [part * kMaxGridY, ...) as the grid's second dimension; false behind the last one.
bool segmentsOfPart(uint32_t segments, uint32_t part, uint32_t* first, uint32_t* count) {
  const uint64_t start = uint64_t{part} * kMaxGridY;
  if (start >= segments) return false;
  *first = static_cast<uint32_t>(start);
  *count = std::min<uint32_t>(segments - *first, kMaxGridY);
  return true;
}

uint32_t tiles(uint64_t elements, uint32_t tile) {
  return static_cast<uint32_t>((elements + tile - 1) / tile);
}

}  // namespace

const std::string& cudaKernelName(uint32_t index) {
  static const std::array<std::string, kCudaKernels> names = makeNames();
  return names.at(index);
}

std::optional<CodecPath> cudaKernelPath(uint32_t index) {
  const uint32_t path = kTable.kernel.at(index).path;
  if (path == kAnyPath) return std::nullopt;
  return static_cast<CodecPath>(path);
}

bool cudaLaunch(const QuantizeJob& job, CodecPath path, uint32_t part, CudaLaunch* out) {
  uint32_t first = 0;
  const uint64_t longest = std::min(job.segment_elements, job.in_total);
  if (longest == 0 || !segmentsOfPart(job.segments, part, &first, &out->grid_y)) return false;
  // Elements of one row of a superblock of 128: see Quantize in cuda_kernels.h.
  const uint32_t vector = static_cast<uint32_t>(16 / dataTypeBytes(job.type));
  const uint32_t rows = kThreadElements / vector;
  const uint32_t blocks = std::min(rows, std::max(1u, 128u / job.format.block));
  out->kernel = kernelIndex(Operation::kQuantize, job.format.element, static_cast<uint32_t>(job.type),
                            job.rounding.stochastic ? CodecPath::kStochastic : path, blocks);
  out->grid_x =
      tiles(longest, cuda::kQuantizeThreads * kThreadElements * cuda::quantizeRepeat(job.type, blocks));
  out->threads = cuda::kQuantizeThreads;
  QuantizeParams p{};
  p.in = job.in;
  p.in_pitch = job.in_pitch;
  p.in_total = job.in_total;
  p.segment_elements = job.segment_elements;
  p.out = static_cast<uint8_t*>(job.out);
  p.out_pitch = job.out_pitch;
  p.factor_device = job.factor.present ? job.factor.device : nullptr;
  p.rounding_key = job.rounding.key;
  p.rounding_first = job.rounding.first;
  p.factor = job.factor.present ? job.factor.value : 1.0f;
  p.first_segment = first;
  p.block_log2 = log2Of(job.format.block);
  p.amax_lanes = job.format.block == 256 ? 16 : std::min(8u, job.format.block / vector);
  p.scale = job.format.scale;
  out->params = p;
  return true;
}

bool cudaLaunch(const DequantizeJob& job, CodecPath path, uint32_t part, CudaLaunch* out) {
  uint32_t first = 0;
  const uint64_t longest = std::min(job.segment_elements, job.out_total);
  if (longest == 0 || !segmentsOfPart(job.segments, part, &first, &out->grid_y)) return false;
  out->kernel =
      kernelIndex(Operation::kDequantize, job.format.element, static_cast<uint32_t>(job.type), path, 1);
  out->grid_x = tiles(longest, cuda::kDequantizeThreads * kThreadElements * cuda::dequantizeRepeat(job.type));
  out->threads = cuda::kDequantizeThreads;
  DequantizeParams p{};
  p.in = static_cast<const uint8_t*>(job.in);
  p.in_pitch = job.in_pitch;
  p.segment_elements = job.segment_elements;
  p.out = job.out;
  p.out_pitch = job.out_pitch;
  p.out_total = job.out_total;
  p.first_segment = first;
  p.block_log2 = log2Of(job.format.block);
  p.scale = job.format.scale;
  out->params = p;
  return true;
}

bool cudaLaunch(const ReduceJob& job, CodecPath path, uint32_t part, CudaLaunch* out) {
  if (part != 0 || job.elements == 0 || job.packets == 0) return false;
  const uint32_t target = job.to_packet ? kPacketTarget : static_cast<uint32_t>(job.type);
  out->kernel = kernelIndex(Operation::kReduce, job.format.element, target,
                            job.to_packet && job.rounding.stochastic ? CodecPath::kStochastic : path, 1);
  out->grid_x = tiles(job.elements, cuda::kReduceThreads * kThreadElements);
  out->grid_y = 1;
  out->threads = cuda::kReduceThreads;
  ReduceParams p{};
  p.in = static_cast<const uint8_t*>(job.in);
  p.in_pitch = job.in_pitch;
  p.own = static_cast<const uint8_t*>(job.own);
  p.elements = job.elements;
  p.out = job.out;
  p.rounding_key = job.rounding.key;
  p.rounding_first = job.rounding.first;
  p.packets = job.packets;
  p.own_index = job.own_index;
  p.block_log2 = log2Of(job.format.block);
  p.average = job.average;
  p.bound = typeMax(job.type) * job.average;
  p.overflow_bits = overflowBits(job.type);
  p.scale = job.format.scale;
  out->params = p;
  return true;
}

bool cudaLaunch(const PerturbJob& job, CodecPath, uint32_t part, CudaLaunch* out) {
  if (part != 0 || job.elements == 0) return false;
  out->kernel = job.type == DataType::kFp32 ? kPerturb32 : kPerturb16;
  out->grid_x = tiles(job.elements, cuda::kPerturbThreads * cuda::kPerturbRepeat);
  out->grid_y = 1;
  out->threads = cuda::kPerturbThreads;
  out->params = PerturbParams{job.data, job.elements, job.seed, perturbStep(job.type)};
  return true;
}

bool cudaLaunch(const CompareJob& job, CodecPath, uint32_t part, CudaLaunch* out) {
  if (part != 0 || job.elements == 0) return false;
  out->kernel = kCompareFirst + static_cast<uint32_t>(job.type);
  out->grid_x = std::min(tiles(job.elements, kCompareBlock * cuda::kCompareThreads / 32), cuda::kCompareGrid);
  out->grid_y = 1;
  out->threads = cuda::kCompareThreads;
  out->params = CompareParams{job.exact, job.other, job.elements, job.sums};
  return true;
}

CudaLaunch cudaEmptyLaunch(uint32_t index) {
  CudaLaunch launch;
  launch.kernel = index;
  launch.grid_x = 1;
  switch (kTable.kernel.at(index).operation) {
    case Operation::kQuantize:
      launch.threads = cuda::kQuantizeThreads;
      launch.params = QuantizeParams{};
      break;
    case Operation::kDequantize:
      launch.threads = cuda::kDequantizeThreads;
      launch.params = DequantizeParams{};
      break;
    case Operation::kReduce:
      launch.threads = cuda::kReduceThreads;
      launch.params = ReduceParams{};
      break;
    case Operation::kPerturb:
      launch.threads = cuda::kPerturbThreads;
      launch.params = PerturbParams{};
      break;
    case Operation::kCompare:
      launch.threads = cuda::kCompareThreads;
      launch.params = CompareParams{};
      break;
  }
  return launch;
}

}  // namespace halfwire
