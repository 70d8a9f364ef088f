#include "doctor/doctor.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "device/device.h"
#include "doctor/elf.h"

namespace halfwire {
namespace {

namespace fs = std::filesystem;

// Asks a Python interpreter where PyTorch's CUDA library and NCCL's wheel are, without importing either.
constexpr const char* kAskPython =
    "import importlib.util as u, os\n"
    "s = u.find_spec('torch')\n"
    "print(os.path.join(os.path.dirname(s.origin), 'lib', 'libtorch_cuda.so') if s else '')\n"
    "try:\n"
    "    n = u.find_spec('nvidia.nccl')\n"
    "    print(os.path.join(list(n.submodule_search_locations)[0], 'lib', 'libnccl.so.2') if n else '')\n"
    "except Exception:\n"
    "    print('')\n";

std::string findProgram(const std::string& name) {
  if (name.find('/') != std::string::npos) return access(name.c_str(), X_OK) == 0 ? name : std::string();
  const char* path = std::getenv("PATH");
  std::string rest = path != nullptr ? path : "";
  while (!rest.empty()) {
    const size_t colon = rest.find(':');
    const std::string candidate = rest.substr(0, colon) + "/" + name;
    if (access(candidate.c_str(), X_OK) == 0 && !fs::is_directory(candidate)) return candidate;
    rest = colon == std::string::npos ? std::string() : rest.substr(colon + 1);
  }
  return {};
}

// The lines that `program -c script` prints; empty if it fails.
std::vector<std::string> linesOf(const std::string& program, const char* script) {
  int ends[2];
  if (pipe(ends) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    execl(program.c_str(), program.c_str(), "-c", script, nullptr);
    _exit(127);
  }
  close(ends[1]);
  std::string text;
  char chunk[512];
  for (ssize_t n = 0; (n = read(ends[0], chunk, sizeof chunk)) > 0 && text.size() < 65536;)
    text.append(chunk, static_cast<size_t>(n));
  close(ends[0]);
  std::vector<std::string> lines;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text = end == std::string::npos ? std::string() : text.substr(end + 1);
  }
  return lines;
}

// "2.28.9" of a libnccl, by asking it; empty if it does not load.
std::string ncclVersion(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) return {};
  auto* version = reinterpret_cast<int (*)(int*)>(dlsym(handle, "ncclGetVersion"));
  int code = 0;
  if (version == nullptr || version(&code) != 0) return {};
  if (code < 10000) return fmt::format("{}.{}.{}", code / 1000, code / 100 % 10, code % 100);
  return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100);
}

bool needsNccl(const ElfFacts& facts) {
  for (const std::string& name : facts.needed) {
    if (name.starts_with("libnccl.so")) return true;
  }
  return false;
}

// How one file reaches NCCL.
Finding reach(const std::string& path, const ElfFacts& facts) {
  const std::string file = fs::path(path).filename();
  if (needsNccl(facts) || (facts.uses_nccl && !facts.defines_nccl)) {
    return {Health::kGood, "NCCL",
            fmt::format("{} uses NCCL as a shared library: its calls are intercepted", file)};
  }
  if (facts.defines_nccl) {
    return {Health::kNote, "NCCL",
            fmt::format("{} has NCCL linked in and exports it: calls from other libraries are intercepted, "
                        "its own may not be; "
                        "prefer a build that uses libnccl.so.2",
                        file)};
  }
  if (facts.carries_nccl) {
    return {Health::kProblem, "NCCL",
            fmt::format("{} has NCCL linked in and hidden: no preloaded library can reach it; use a build "
                        "with a shared NCCL "
                        "(the PyTorch wheels of pypi.org have one)",
                        file)};
  }
  return {Health::kNote, "NCCL",
          fmt::format("{} does not refer to NCCL itself; a library that it loads may: the table after a run "
                      "says what was seen",
                      file)};
}

}  // namespace

std::vector<Finding> examineGpus() {
  std::vector<Finding> findings;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  if (driver == nullptr) {
    findings.push_back(
        {Health::kNote, "driver",
         "no CUDA driver (libcuda.so.1) on this machine: only the host engine and the analyses run here"});
    return findings;
  }
  auto* init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  auto* version = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDriverGetVersion"));
  auto* count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  auto* name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  auto* attribute = reinterpret_cast<int (*)(int*, int, int)>(dlsym(driver, "cuDeviceGetAttribute"));
  if (init == nullptr || version == nullptr || count == nullptr || name == nullptr || attribute == nullptr) {
    findings.push_back({Health::kProblem, "driver", "the CUDA driver lacks basic functions: reinstall it"});
    return findings;
  }
  if (const int error = init(0); error != 0) {
    findings.push_back(
        {Health::kProblem, "driver",
         fmt::format("the CUDA driver does not start (error {}): check that nvidia-smi works", error)});
    return findings;
  }
  int code = 0;
  int gpus = 0;
  (void)version(&code);
  (void)count(&gpus);
  findings.push_back({gpus > 0 ? Health::kGood : Health::kProblem, "driver",
                      fmt::format("CUDA {}.{}, {} GPU{} visible{}", code / 1000, code % 1000 / 10, gpus,
                                  gpus == 1 ? "" : "s", gpus > 0 ? "" : ": check CUDA_VISIBLE_DEVICES")});
  for (int gpu = 0; gpu < gpus; ++gpu) {
    char model[128] = "unknown";
    int major = 0;
    int minor = 0;
    (void)name(model, sizeof model, gpu);
    (void)attribute(&major, 75, gpu);  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
    (void)attribute(&minor, 76, gpu);
    const std::string subject = fmt::format("GPU {}", gpu);
    const auto device = makeCudaDevice(gpu);
    if (!device.ok()) {
      findings.push_back({Health::kProblem, subject,
                          fmt::format("{} (sm_{}{}): {}", model, major, minor, device.status().message())});
      continue;
    }
    const bool hardware = std::strcmp(device.value()->codecName(), "hardware") == 0;
    findings.push_back({Health::kGood, subject,
                        fmt::format("{} (sm_{}{}): kernels load and run, FP8 conversion in {}", model, major,
                                    minor, hardware ? "hardware" : "software (same bits)")});
  }
  return findings;
}

std::vector<Finding> examineEnvironment(const char* (*lookup)(const char*)) {
  std::vector<Finding> findings;
  const auto is = [&](const char* variable, const char* value) {
    const char* v = lookup(variable);
    return v != nullptr && std::strcmp(v, value) == 0;
  };
  if (is("CUDA_DEVICE_MAX_CONNECTIONS", "1")) {
    findings.push_back({Health::kProblem, "CUDA_DEVICE_MAX_CONNECTIONS",
                        "is 1 (Megatron sets it): nothing is compressed, since a chain of kernels at the "
                        "head of the only queue "
                        "would hold up the program's own; unset it if your parallelism allows"});
  }
  if (is("NCCL_COMM_BLOCKING", "0")) {
    findings.push_back({Health::kProblem, "NCCL_COMM_BLOCKING",
                        "is 0: non-blocking communicators are not compressed; unset it"});
  }
  if (lookup("NCCL_COMM_ID") != nullptr) {
    findings.push_back({Health::kProblem, "NCCL_COMM_ID",
                        "is set: every rank makes an id of its own, so ranks cannot meet and nothing is "
                        "compressed; unset it"});
  }
  if (lookup("WORLD_SIZE") == nullptr) {
    findings.push_back({Health::kNote, "WORLD_SIZE",
                        "is not set here; torchrun and halfwire run -n set it for the ranks, other launchers "
                        "may need --comms all "
                        "or size:N"});
  }
  return findings;
}

std::vector<Finding> examineProgram(const std::vector<std::string>& command) {
  std::vector<Finding> findings;
  if (command.empty()) return findings;
  const std::string program = findProgram(command.front());
  if (program.empty()) {
    findings.push_back(
        {Health::kProblem, "program", fmt::format("{} is not found or cannot be run", command.front())});
    return findings;
  }
  const std::string file = fs::path(program).filename();
  const bool launcher = file == "torchrun" || file == "deepspeed" || file == "accelerate";
  if (!file.starts_with("python") && !launcher) {
    const auto facts = readElf(program);
    if (facts.ok()) {
      findings.push_back(reach(program, facts.value()));
    } else {
      findings.push_back(
          {Health::kNote, "program",
           fmt::format("{}: give the Python interpreter or the program itself to learn how it reaches NCCL",
                       facts.status().message())});
    }
    return findings;
  }
  // A launcher script runs the interpreter that stands beside it.
  std::string python = program;
  if (launcher) {
    const std::string beside = (fs::path(program).parent_path() / "python3").string();
    python = access(beside.c_str(), X_OK) == 0 ? beside : findProgram("python3");
  }
  const std::vector<std::string> lines = linesOf(python, kAskPython);
  if (lines.empty() || lines[0].empty()) {
    findings.push_back({Health::kNote, "PyTorch",
                        fmt::format("{} does not find PyTorch; JAX and vLLM open NCCL by an explicit handle, "
                                    "which is followed too (docs/architecture.md)",
                                    python)});
    return findings;
  }
  const auto torch = readElf(lines[0]);
  if (!torch.ok()) {
    findings.push_back({Health::kNote, "PyTorch",
                        fmt::format("{}: this PyTorch is built without CUDA", torch.status().message())});
    return findings;
  }
  findings.push_back(reach(lines[0], torch.value()));
  if (lines.size() > 1 && !lines[1].empty()) {
    const std::string version = ncclVersion(lines[1]);
    findings.push_back(
        version.empty() ? Finding{Health::kNote, "NCCL",
                                  fmt::format("{} does not load here, its version is unknown", lines[1])}
                        : Finding{Health::kGood, "NCCL", fmt::format("version {} ({})", version, lines[1])});
  }
  return findings;
}

}  // namespace halfwire
