// `halfwire doctor`: what Halfwire would meet on this machine, one line each.
#include "doctor/doctor.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "cli/command.h"
#include "launch/launch.h"
#include "launch/preload.h"
#include "policy/settings.h"

namespace halfwire::cli {
namespace {

Finding examinePreload() {
  const auto library = findPreloadLibrary();
  if (!library.ok()) return {Health::kProblem, "library", library.status().message()};
  std::vector<std::string> environment = currentEnvironment();
  const char* existing = findVariable(environment, "LD_PRELOAD");
  const auto preload = preloadValue(existing == nullptr ? "" : existing, library.value(), "");
  if (!preload.ok()) return {Health::kProblem, "library", preload.status().message()};
  setVariable(&environment, "LD_PRELOAD", preload.value());
  const Status loads = checkPreload(environment, library.value());
  if (!loads.ok()) return {Health::kProblem, "library", loads.message()};
  return {Health::kGood, "library", fmt::format("{} loads", library.value())};
}

int doctor(const std::vector<std::string>& command) {
  std::vector<Finding> findings{examinePreload()};
  const auto add = [&](std::vector<Finding> more) {
    findings.insert(findings.end(), more.begin(), more.end());
  };
  add(examineGpus());
  add(examineEnvironment([](const char* name) -> const char* { return std::getenv(name); }));
  add(examineProgram(command));
  Settings wire;
  wire.mode = Mode::kWire;
  findings.push_back({Health::kGood, "by default", describeSettings(wire)});

  bool problem = false;
  for (const Finding& f : findings) {
    const char* mark = f.health == Health::kGood ? "ok  " : f.health == Health::kNote ? "note" : "FIX ";
    fmt::print("{}  {}: {}\n", mark, f.subject, f.words);
    problem = problem || f.health == Health::kProblem;
  }
  return problem ? 1 : 0;
}

}  // namespace

void addDoctorCommand(CLI::App& app, const std::vector<std::string>& command, int* exit_code) {
  CLI::App* sub =
      app.add_subcommand("doctor", "Say what Halfwire would meet on this machine and what to fix");
  sub->footer(
      "Exit code 1 if something must be fixed.\n"
      "Examples:\n  halfwire doctor\n  halfwire doctor -- python3 train.py");
  sub->callback([command, exit_code] { *exit_code = doctor(command); });
}

}  // namespace halfwire::cli
