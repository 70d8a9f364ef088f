// Sets an exact and a compressed training run side by side. Usage:
// train_lm_compare EXACT_FOLDER WIRE_FOLDER RESULT.json LINK; exit code 1 if the replicas of a run differ.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "result.h"

namespace train_lm {
namespace {

constexpr size_t kLastSteps = 20;

struct Run {
  double loss = 0;        // mean of the last steps over all ranks
  double step_ms = 0;     // median over the steps, mean over the ranks
  double wire_bytes = 0;  // sent by a rank in all steps, mean over the ranks
  double ring_bytes = 0;
  size_t steps = 0, ranks = 0;
  uint64_t parameters = 0;
  std::string params_hash;
  bool identical = true;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
}

Run summarize(const std::vector<RankResult>& results) {
  Run run;
  run.ranks = results.size();
  run.steps = results[0].loss.size();
  run.parameters = results[0].parameters;
  run.params_hash = results[0].params_hash;
  const double ranks = static_cast<double>(run.ranks);
  for (const RankResult& r : results) {
    const size_t last = std::min(kLastSteps, r.loss.size());
    for (size_t i = r.loss.size() - last; i < r.loss.size(); ++i)
      run.loss += r.loss[i] / static_cast<double>(last) / ranks;
    run.step_ms += median(r.step_ms) / ranks;
    run.wire_bytes += static_cast<double>(r.egress_bytes) / ranks;
    run.ring_bytes += static_cast<double>(r.ring_bytes) / ranks;
    run.identical = run.identical && r.params_hash == run.params_hash;
  }
  return run;
}

nlohmann::ordered_json json(const Run& run) {
  return {{"loss", run.loss},
          {"step_ms", run.step_ms},
          {"wire_bytes", run.wire_bytes},
          {"params_hash", run.params_hash}};
}

std::string machine() {
  std::ifstream in("/proc/cpuinfo");
  std::string model = "unknown processor";
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (!line.starts_with("model name") || colon == std::string::npos) continue;
    model = line.substr(colon + 2);
    break;
  }
  return fmt::format("{}, {} CPUs", model, std::max(1u, std::thread::hardware_concurrency()));
}

int compare(const std::string& exact_folder, const std::string& wire_folder, const std::string& out,
            const std::string& link) {
  std::string error;
  const auto exact_results = readResults(exact_folder, &error);
  const auto wire_results = error.empty() ? readResults(wire_folder, &error) : exact_results;
  if (!error.empty() || exact_results.empty() || wire_results.empty()) {
    fmt::print(stderr, "train_lm_compare: {}\n", error);
    return 2;
  }
  const Run exact = summarize(exact_results), wire = summarize(wire_results);
  const bool identical = exact.identical && wire.identical;
  const double difference = (wire.loss - exact.loss) / exact.loss;
  const double ratio = wire.wire_bytes / wire.ring_bytes;
  const double mb = 1e6 * static_cast<double>(wire.steps);

  fmt::print("\n{} ranks, {:.2f} M parameters, bf16 gradients, {} steps, link {} a rank\n\n", exact.ranks,
             static_cast<double>(exact.parameters) / 1e6, exact.steps, link);
  fmt::print("{:<34}{:>14}{:>14}\n", "", "exact", "FP8 wire");
  fmt::print("{:<34}{:>11.0f} ms{:>11.0f} ms   {:.2f}x faster\n", "step", exact.step_ms, wire.step_ms,
             exact.step_ms / wire.step_ms);
  fmt::print("{:<34}{:>11.2f} MB{:>11.2f} MB   {:.3f} of an exact ring's {:.2f} MB\n",
             "sent by a rank in a step", exact.wire_bytes / mb, wire.wire_bytes / mb, ratio,
             wire.ring_bytes / mb);
  fmt::print("{:<34}{:>14.4f}{:>14.4f}   {:+.2f} %\n",
             fmt::format("loss, mean of the last {} steps", kLastSteps), exact.loss, wire.loss,
             100 * difference);
  fmt::print("{:<34}{:>14}{:>14}\n", "replicas bit-identical", exact.identical ? "yes" : "NO",
             wire.identical ? "yes" : "NO");

  const nlohmann::ordered_json whole = {{"exact", json(exact)},
                                        {"wire", json(wire)},
                                        {"identical", identical},
                                        {"speedup", exact.step_ms / wire.step_ms},
                                        {"loss_difference", difference},
                                        {"ring_bytes", wire.ring_bytes},
                                        {"bytes_ratio", ratio},
                                        {"ranks", exact.ranks},
                                        {"steps", exact.steps},
                                        {"parameters", exact.parameters},
                                        {"link", link},
                                        {"machine", machine()}};
  std::ofstream file(out);
  file << whole.dump(2) << '\n';
  file.close();
  if (!file) {
    fmt::print(stderr, "train_lm_compare: cannot write {}\n", out);
    return 2;
  }
  return identical ? 0 : 1;
}

}  // namespace
}  // namespace train_lm

int main(int argc, char** argv) {
  if (argc == 5) return train_lm::compare(argv[1], argv[2], argv[3], argv[4]);
  fmt::print(stderr, "usage: train_lm_compare EXACT_FOLDER WIRE_FOLDER RESULT.json LINK\n");
  return 2;
}
