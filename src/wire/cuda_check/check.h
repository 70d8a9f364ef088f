// Bit-for-bit comparison of the GPU with the scalar reference.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "wire/cuda_check/gpu.h"

namespace halfwire::check {

// A codec path as a device that runs it.
struct Path {
  std::string name;
  std::unique_ptr<Device> device;
};

struct CheckResult {
  uint64_t jobs = 0;               // jobs run on the GPU and compared
  uint64_t elements = 0;           // elements of those
  uint64_t failures = 0;           // jobs with a wrong byte
  uint64_t exhaustive = 0;         // values compared by whole-range tests of the arithmetic
  std::vector<std::string> lines;  // the first failures, in words
};

struct CheckOptions {
  bool small = false;  // few and small jobs, for a memory checker
  bool large = true;   // the job of more than 2^31 elements (needs about 24 GB of device memory)
  unsigned threads = 1;
};

CheckResult checkAll(const Gpu& gpu, const Module& kernels, const std::vector<Path>& paths,
                     const CheckOptions& options);

}  // namespace halfwire::check
