// halfwire-cuda-check: are the GPU's bits the reference's, and how fast are the kernels? Standalone: needs
// the CUDA driver, nothing else of the machine.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "wire/cuda_check/check.h"
#include "wire/cuda_check/measure.h"

extern "C" const unsigned char halfwire_check_kernels[];
extern "C" const unsigned char halfwire_check_variants[];

namespace halfwire::check {
namespace {

constexpr const char* kUsage =
    "usage: halfwire-cuda-check [--check] [--measure] [--small] [--no-large] [--no-formats] [--no-variants]\n"
    "                           [--samples N] [--threads N] [--out DIR]\n"
    "Without --check or --measure: both. --small: few, small jobs on one thread, for compute-sanitizer.\n"
    "--out writes measure.json, measure.txt and check.txt into DIR. Exit code: 0 all equal, 1 a mismatch,\n"
    "2 wrong arguments, 3 a CUDA error, 77 no GPU.\n";

struct Options {
  bool check = false;
  bool measure = false;
  CheckOptions checking;
  MeasureOptions measuring;
  std::string out;
};

bool parse(int argc, char** argv, Options* options) {
  options->checking.threads = std::max(1u, std::thread::hardware_concurrency());
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (arg == "--check") {
      options->check = true;
    } else if (arg == "--measure") {
      options->measure = true;
    } else if (arg == "--small") {
      options->checking.small = true;
      options->checking.threads = 1;
    } else if (arg == "--no-large") {
      options->checking.large = false;
    } else if (arg == "--no-formats") {
      options->measuring.formats = false;
    } else if (arg == "--no-variants") {
      options->measuring.variants = false;
    } else if (arg == "--samples" && value != nullptr) {
      options->measuring.samples = std::max(3, std::atoi(value));
      ++i;
    } else if (arg == "--threads" && value != nullptr) {
      options->checking.threads = static_cast<unsigned>(std::max(1, std::atoi(value)));
      ++i;
    } else if (arg == "--out" && value != nullptr) {
      options->out = value;
      ++i;
    } else {
      return false;
    }
  }
  if (!options->check && !options->measure) options->check = options->measure = true;
  if (options->checking.small) options->measure = false;
  return true;
}

// A device for each path that this GPU and build have.
std::vector<Path> makePaths() {
  std::vector<Path> paths;
  for (const char* path : {"hardware", "software"}) {
    setenv("HALFWIRE_CODEC_PATH", path, 1);
    Result<std::unique_ptr<Device>> device = makeCudaDevice(0);
    if (device.ok()) {
      paths.push_back({path, std::move(device).value()});
    } else {
      std::printf("%s path: %s\n", path, device.status().message().c_str());
    }
  }
  unsetenv("HALFWIRE_CODEC_PATH");
  return paths;
}

void writeLines(const std::string& path, const std::vector<std::string>& lines) {
  std::ofstream file(path);
  for (const std::string& line : lines) file << line << "\n";
}

double secondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int run(const Options& options) {
  Gpu gpu;
  std::string why;
  if (!openGpu(&gpu, &why)) {
    std::printf("no GPU: %s\n", why.c_str());
    return 77;
  }
  std::printf("%s, compute capability %d.%d, %d multiprocessors, driver %d\n", gpu.name.c_str(),
              gpu.capability / 10, gpu.capability % 10, gpu.multiprocessors, gpu.driver_version);
  auto start = std::chrono::steady_clock::now();
  const std::vector<Path> paths = makePaths();
  if (paths.empty()) return 3;
  const Module kernels(gpu, halfwire_check_kernels);
  const Module variants(gpu, halfwire_check_variants);
  std::printf("kernels loaded and launched once, %zu paths: %.2f s\n", paths.size(), secondsSince(start));

  int code = 0;
  if (options.check) {
    start = std::chrono::steady_clock::now();
    const CheckResult result = checkAll(gpu, kernels, paths, options.checking);
    for (const std::string& line : result.lines) std::printf("MISMATCH %s\n", line.c_str());
    char text[200];
    std::snprintf(text, sizeof(text),
                  "check: %llu jobs of %llu elements, %llu values of whole ranges; %llu failures; %.1f s",
                  static_cast<unsigned long long>(result.jobs),
                  static_cast<unsigned long long>(result.elements),
                  static_cast<unsigned long long>(result.exhaustive),
                  static_cast<unsigned long long>(result.failures), secondsSince(start));
    std::printf("%s\n", text);
    if (!options.out.empty()) {
      std::vector<std::string> lines = result.lines;
      lines.emplace_back(text);
      writeLines(options.out + "/check.txt", lines);
    }
    if (result.failures != 0) code = 1;
    std::fflush(stdout);
  }
  if (options.measure) {
    start = std::chrono::steady_clock::now();
    const Measurement measurement = measureAll(gpu, kernels, variants, paths, options.measuring);
    for (const std::string& line : measurement.summary) std::printf("%s\n", line.c_str());
    std::printf("measured in %.1f s\n", secondsSince(start));
    if (!options.out.empty()) {
      writeLines(options.out + "/measure.txt", measurement.full);
      std::ofstream(options.out + "/measure.json") << measurement.json.dump(1) << "\n";
    }
  }
  return code;
}

}  // namespace
}  // namespace halfwire::check

int main(int argc, char** argv) {
  halfwire::check::Options options;
  if (!halfwire::check::parse(argc, argv, &options)) {
    std::fputs(halfwire::check::kUsage, stderr);
    return 2;
  }
  const int code = halfwire::check::run(options);
  std::fflush(stdout);
  return code;
}
