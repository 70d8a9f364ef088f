// Rates of the kernels beside a device-to-device copy of the same run.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "wire/cuda_check/check.h"
#include "wire/cuda_check/gpu.h"

namespace halfwire::check {

struct MeasureOptions {
  bool formats = true;   // every format, block, scale and type; otherwise the default format only
  bool variants = true;  // compare shapes of kernels
  int samples = 21;
};

// Rows as JSON, and the lines that a person reads first. `full` gets a line for every row.
struct Measurement {
  nlohmann::json json;
  std::vector<std::string> summary;
  std::vector<std::string> full;
};

Measurement measureAll(const Gpu& gpu, const Module& kernels, const Module& variants,
                       const std::vector<Path>& paths, const MeasureOptions& options);

}  // namespace halfwire::check
