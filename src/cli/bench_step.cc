// `halfwire bench step`: a training step in miniature, overlapped or merged, under the meter.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/units.h"
#include "cli/command.h"
#include "cli/temporary_folder.h"
#include "launch/launch.h"
#include "meter/meter_report.h"
#include "policy/policy.h"

namespace halfwire::cli {
namespace {

using nlohmann::ordered_json;

struct StepOptions {
  std::string preset = "ddp", schedule = "both", ranks = "4", link = "1Gbit", steps = "60", mode = "meter";
  std::string every = "2";
  std::string log;
  bool json = false;
};

int refuse(const std::string& sentence) {
  fmt::print(stderr, "halfwire bench step: {}\n", sentence);
  return 2;
}

// Stages of a pass: compute in us, bytes gathered before, bytes reduced behind.
ordered_json pass(int stages, int64_t compute_us, uint64_t gather, uint64_t reduce) {
  ordered_json out = ordered_json::array();
  for (int i = 0; i < stages; ++i) out.push_back({compute_us, gather, reduce});
  return out;
}

// Sizes suit a link of 1 Gbit/s: communication is shorter than the pass it can hide behind.
Result<ordered_json> preset(const std::string& name) {
  constexpr uint64_t kKiB = 1024;
  if (name == "ddp") {
    return ordered_json{{"forward", pass(4, 3000, 0, 0)},
                        {"backward", pass(8, 6000, 0, 256 * kKiB)},
                        {"optimizer_us", 3000},
                        {"scatter", false}};
  }
  if (name == "zero2") {
    return ordered_json{{"forward", pass(8, 4000, 256 * kKiB, 0)},
                        {"backward", pass(8, 6000, 0, 256 * kKiB)},
                        {"optimizer_us", 3000},
                        {"scatter", true}};
  }
  if (name == "fsdp") {
    return ordered_json{{"forward", pass(8, 4000, 256 * kKiB, 0)},
                        {"backward", pass(8, 8000, 256 * kKiB, 256 * kKiB)},
                        {"optimizer_us", 3000},
                        {"scatter", true}};
  }
  if (name == "many-small") {
    return ordered_json{{"forward", pass(4, 3000, 0, 0)},
                        {"backward", pass(32, 3000, 0, 96 * kKiB)},
                        {"optimizer_us", 3000},
                        {"scatter", false}};
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("--preset '{}' is not valid: use ddp, zero2, fsdp or many-small", name));
}

// One schedule's figures: the meter's and, by the kernels' own times, the truth.
struct Outcome {
  meter::RunSummary metered;
  double step_ms = 0;     // median of all ranks' steps after warm-up
  double exposed_ms = 0;  // true, median as well
};

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

Result<Outcome> runSchedule(const StepOptions& o, ordered_json config, bool merged, int64_t ranks,
                            int64_t steps, const std::string& folder, const std::string& logs) {
  constexpr int kWarmup = 10;
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path worker = self.parent_path() / "halfwire-bench-step";
  if (access(worker.c_str(), X_OK) != 0)
    return Status(StatusCode::kUnavailable, fmt::format("cannot run {}: build it", worker.string()));
  const std::string name = merged ? "merged" : "overlapped";
  config["merged"] = merged;
  config["steps"] = steps;
  const std::string config_path = fmt::format("{}/{}.json", folder, name);
  const std::string prefix = fmt::format("{}/result-{}", folder, name);
  const std::string log = fmt::format("{}/{}", logs, name);
  std::ofstream(config_path) << config.dump();

  // The command starts itself as a user would; its table goes to a file that is shown if it fails.
  std::vector<std::string> environment = currentEnvironment();
  std::erase_if(environment, [](const std::string& entry) { return entry.starts_with("HALFWIRE_"); });
  LaunchOptions job;
  job.command = {"/bin/sh",
                 "-c",
                 "exec \"$@\" 2>\"$0\"",
                 prefix + ".err",
                 self.string(),
                 "run",
                 "--mode",
                 o.mode,
                 "--meter",
                 "on",
                 "--meter-every",
                 o.every,
                 "--min-bytes",
                 "0",
                 "--log",
                 log,
                 "-n",
                 std::to_string(ranks)};
  if (!o.link.empty() && o.link != "none") job.command.insert(job.command.end(), {"--link", o.link});
  job.command.insert(job.command.end(), {"--", worker.string(), config_path, prefix});
  job.environments.push_back(environment);
  const auto ended = launch(job);
  if (!ended.ok()) return ended.status();
  if (ended.value().exit_code != 0) {
    std::ifstream in(prefix + ".err");
    const std::string words{std::istreambuf_iterator<char>(in), {}};
    return Status(StatusCode::kUnavailable, fmt::format("the {} schedule failed: {}", name, words));
  }
  Outcome outcome;
  auto metered = meter::readRun(log);
  if (!metered.ok()) return metered.status();
  outcome.metered = std::move(metered).value();
  std::vector<double> all, exposed;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::ifstream in(fmt::format("{}.{}.json", prefix, rank));
    const auto json = ordered_json::parse(in, nullptr, false);
    if (!json.is_object())
      return Status(StatusCode::kUnavailable, "a rank left no result: is the disk full?");
    const auto step_ms = json.at("step_ms").get<std::vector<double>>();
    const auto exposed_ms = json.at("exposed_ms").get<std::vector<double>>();
    for (size_t i = kWarmup; i < step_ms.size(); ++i) {
      all.push_back(step_ms[i]);
      exposed.push_back(exposed_ms[i]);
    }
  }
  outcome.step_ms = median(all);
  outcome.exposed_ms = median(exposed);
  return outcome;
}

ordered_json outcomeJson(const char* schedule, const Outcome& o) {
  return {{"schedule", schedule},
          {"step_ms", o.step_ms},
          {"exposed_true_ms", o.exposed_ms},
          {"exposed_metered_ms", o.metered.measured ? ordered_json(o.metered.exposed_ms) : ordered_json()},
          {"bytes_asked", o.metered.asked},
          {"bytes_exact_ring", o.metered.ring},
          {"bytes_sent", o.metered.sent},
          {"calls", o.metered.calls}};
}

int benchStep(const StepOptions& o) {
  const auto ranks = parseInteger(o.ranks, 2, kMaxFlatRanks, "number of ranks");
  if (!ranks.ok()) return refuse("-n " + ranks.status().message());
  const auto steps = parseInteger(o.steps, 20, 100'000, "number of steps");
  if (!steps.ok()) return refuse("--steps " + steps.status().message());
  if (const auto every = parseInteger(o.every, 1, 1'000'000, "number of steps"); !every.ok())
    return refuse("--meter-every " + every.status().message());
  if (o.mode != "meter" && o.mode != "wire")
    return refuse(fmt::format("--mode '{}' is not valid: use meter or wire", o.mode));
  if (o.schedule != "both" && o.schedule != "overlapped" && o.schedule != "merged")
    return refuse(fmt::format("--schedule '{}' is not valid: use overlapped, merged or both", o.schedule));
  if (!o.link.empty() && o.link != "none") {
    if (const auto rate = parseBitRate(o.link); !rate.ok())
      return refuse("--link " + rate.status().message() + ", or none");
  }
  const auto config = preset(o.preset);
  if (!config.ok()) return refuse(config.status().message());
  const TemporaryFolder folder("step");
  if (folder.path().empty())
    return refuse("cannot create a temporary folder: set TMPDIR to one that can be written");
  const std::string logs = o.log.empty() ? folder.path() : o.log;

  std::vector<std::pair<const char*, Outcome>> outcomes;
  for (const bool merged : {false, true}) {
    const char* name = merged ? "merged" : "overlapped";
    if (o.schedule != "both" && o.schedule != name) continue;
    auto outcome = runSchedule(o, config.value(), merged, ranks.value(), steps.value(), folder.path(), logs);
    if (!outcome.ok()) return refuse(outcome.status().message());
    outcomes.emplace_back(name, std::move(outcome).value());
  }
  const std::string sentence =
      outcomes.size() == 2 ? meter::verdict(outcomes[0].second.metered, outcomes[1].second.metered) : "";
  if (o.json) {
    ordered_json rows = ordered_json::array();
    for (const auto& [name, outcome] : outcomes) rows.push_back(outcomeJson(name, outcome));
    const ordered_json json = {{"schema", "halfwire.bench.step"},
                               {"preset", o.preset},
                               {"ranks", ranks.value()},
                               {"link", o.link},
                               {"rows", rows},
                               {"verdict", sentence}};
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  fmt::print("{}: {} ranks, link {}, {} steps\n{:<12} {:>9}  {:>13}  {:>15}  {:>9}  {:>9}  {:>6}\n", o.preset,
             ranks.value(), o.link, steps.value(), "schedule", "step ms", "exposed, true", "exposed, metered",
             "exact MB", "MB sent", "calls");
  for (const auto& [name, r] : outcomes) {
    fmt::print("{:<12} {:>9.3f}  {:>13.3f}  {:>15}  {:>9.3f}  {:>9.3f}  {:>6.1f}\n", name, r.step_ms,
               r.exposed_ms, r.metered.measured ? fmt::format("{:.3f}", r.metered.exposed_ms) : "-",
               r.metered.ring * 1e-6, r.metered.sent * 1e-6, r.metered.calls);
  }
  fmt::print(
      "Medians, a step and rank. True: by the kernels' own times. Metered: what the meter found in sampled "
      "steps.\n");
  if (!sentence.empty()) fmt::print("A overlapped, B merged. {}\n", sentence);
  return 0;
}

}  // namespace

void addBenchStep(CLI::App& bench, int* exit_code) {
  auto options = std::make_shared<StepOptions>();
  CLI::App* sub =
      bench.add_subcommand("step", "A training step in miniature: overlapped or merged communication");
  const auto text = [&](const char* name, std::string& to, const char* type, const char* help) {
    sub->add_option(name, to, help)->type_name(type)->default_str("");
  };
  text("--preset", options->preset, "NAME", "ddp, zero2, fsdp or many-small (default: ddp)");
  text("--schedule", options->schedule, "NAME",
       "overlapped: each collective as its data is there; merged: one at the end of a pass; or both "
       "(default)");
  text("-n", options->ranks, "RANKS", "ranks on this machine, 2 to 32 (default: 4)");
  text("--link", options->link, "RATE", "rate of each rank's emulated link, or none (default: 1Gbit)");
  text("--steps", options->steps, "N", "steps of each schedule (default: 60)");
  text("--mode", options->mode, "meter|wire", "exact or compressed collectives (default: meter)");
  text("--meter-every", options->every, "N", "sample one step in so many (default: 2)");
  text("--log", options->log, "DIR", "keep the run logs here, for `halfwire report`");
  sub->add_flag("--json", options->json, "one JSON object with rows");
  sub->footer(
      "Runs on the host engine, without a GPU; bench/step/step.py is the same on GPUs.\n\nExamples:\n"
      "  halfwire bench step --preset many-small\n"
      "  halfwire bench step --log logs && halfwire report --compare logs/overlapped logs/merged");
  sub->callback([options, exit_code] { *exit_code = benchStep(*options); });
}

}  // namespace halfwire::cli
