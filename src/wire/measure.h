// How fast the codec is beside a plain copy, how much it saves and what it costs in accuracy: the rows of
// `halfwire bench codec`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "wire/codec.h"

namespace halfwire {

enum class CodecOp : uint8_t { kQuantize, kDequantize, kReduce };
enum class CodecPath : uint8_t { kSimd, kScalar };

struct CodecCase {
  WireFormat format;
  DataType type = DataType::kBf16;
  CodecOp op = CodecOp::kQuantize;
  CodecPath path = CodecPath::kSimd;
  Rounding rounding;
  uint64_t elements = 0;
  uint32_t packets = 8;             // that a reduction sums
  double seconds = 1.0;             // of timed work, copies included
  uint64_t snr_elements = 4 << 20;  // drawn for snr_db, rounded up to whole blocks
};

struct CodecRow {
  std::string device;  // "host", or the GPU's name
  std::string op;      // "quantize", "dequantize" or "reduce"
  std::string
      path;  // the instruction set ("AVX2"), or "scalar"; on a GPU "hardware", "software" or "stochastic"
  std::string input;   // "bf16", "fp16" or "fp32"
  std::string format;  // "e4m3", "e3m4", "e5m2" or "int8"
  uint32_t block = 0;
  std::string scale;     // "fp32" or "e8m0"
  std::string rounding;  // "nearest" or "stochastic"
  uint64_t elements = 0;
  uint64_t working_set_bytes = 0;  // read and written by one run
  double bytes_per_s = 0;          // working_set_bytes over the median time of a run
  double copy_bytes_per_s = 0;     // the same for a memcpy that reads and writes as many bytes in all
  double wire_ratio = 0;           // packet bytes over the bytes of as many elements of bf16
  double snr_db = 0;  // of N(0,1) data that went through; for a reduction, of the sum against the exact sum
};

// Bytes that one run of the case reads and writes: elements and packets (of a reduction, all of them), with
// padding.
uint64_t codecWorkingSet(const CodecCase& c);

// Whether the case rounds stochastically, for which there is one code on the host, the scalar one, and one on
// GPUs.
inline bool roundsStochastically(const CodecCase& c) {
  return c.rounding.stochastic && c.op != CodecOp::kDequantize;
}

// The largest number of whole blocks' elements whose working set is at most `bytes`; 0 if there is none.
uint64_t codecElementsFor(const CodecCase& c, uint64_t bytes);

// The fields of a row that follow from the case: op, input, format, block, scale, rounding, elements,
// working_set_bytes, wire_ratio.
CodecRow describeCodec(const CodecCase& c);

// N(0,1) by Box and Muller: the same numbers from a seed with every standard library.
void fillNormal(DataType type, uint64_t seed, uint64_t elements, uint8_t* out);
// Element `i`, exactly.
double elementAt(DataType type, const uint8_t* in, uint64_t i);

// Runs the case on the calling thread, alternating with copies, and fills in its row. The data are N(0,1)
// from a fixed seed. `progress`, if set, is called from time to time with the fraction that is done, last
// with 1. Fails without elements, packets or memory.
Result<CodecRow> measureCodec(const CodecCase& c, const std::function<void(double)>& progress = {});

}  // namespace halfwire
