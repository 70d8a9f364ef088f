// For tests: values as the wire leaves them after one rounding, by the scalar reference.
#pragma once

#include <vector>

#include "wire/codec.h"
#include "wire/reference.h"

namespace halfwire {

inline std::vector<float> rounded(const WireFormat& format, const std::vector<float>& values,
                                  const Rounding& rounding = {}) {
  std::vector<char> packet(packetBytes(format, values.size()) + 16);
  QuantizeJob q;
  q.format = format;
  q.type = DataType::kFp32;
  q.in = values.data();
  q.in_total = q.in_pitch = q.segment_elements = values.size();
  q.out = packet.data();
  q.rounding = rounding;
  reference::quantize(q);
  std::vector<float> out(values.size());
  DequantizeJob d;
  d.format = format;
  d.type = DataType::kFp32;
  d.in = packet.data();
  d.segment_elements = d.out_total = d.out_pitch = values.size();
  d.out = out.data();
  reference::dequantize(d);
  return out;
}

}  // namespace halfwire
