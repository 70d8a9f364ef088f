// What Halfwire would meet on this machine and in a given program: one finding a line, each with its cure.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace halfwire {

enum class Health { kGood, kNote, kProblem };

struct Finding {
  Health health = Health::kGood;
  std::string subject;  // "GPU 0", "driver", "NCCL"
  std::string words;    // what is, and what to do about it
};

// The GPUs, the driver, whether the embedded kernels run there (loads the driver and makes a context on each
// GPU).
std::vector<Finding> examineGpus();

// Variables of the environment that change what Halfwire does. `lookup` is like getenv.
std::vector<Finding> examineEnvironment(const char* (*lookup)(const char*));

// How `command` reaches NCCL: an ELF program by its own file, Python by the PyTorch it would import. Runs the
// Python interpreter (not the program) to ask where PyTorch is.
std::vector<Finding> examineProgram(const std::vector<std::string>& command);

}  // namespace halfwire
