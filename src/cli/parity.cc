// `halfwire parity BASELINE... --candidate RUN...`: options and words; the work is in parity.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "cli/write_file.h"
#include "parity/compare.h"
#include "parity/load.h"
#include "parity/reports.h"

namespace halfwire::cli {
namespace {

struct Options {
  std::vector<std::string> baseline, candidate, noise;
  std::string margin, gross, tail, html;
  uint64_t margin_steps = 0;
  bool json = false;
};

int fail(const Status& status) {
  fmt::print(stderr, "halfwire parity: {}\n", status.message());
  return 2;
}

// "0.5%" is a share; "0.02" a number.
Result<double> parseNumber(const std::string& text, const char* option, bool* percent) {
  std::string_view digits = text;
  *percent = !digits.empty() && digits.back() == '%';
  if (*percent) digits.remove_suffix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || !(value > 0) || !(value < 1e300)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} '{}' is not understood: write 0.5% or a number above 0", option, text));
  }
  return *percent ? value / 100 : value;
}

int run(const Options& o) {
  parity::CompareOptions options;
  bool percent = false;
  if (!o.margin.empty()) {
    const Result<double> margin = parseNumber(o.margin, "--margin", &percent);
    if (!margin.ok()) return fail(margin.status());
    if (percent) {
      options.margin = margin.value();
    } else {
      options.margin_absolute = margin.value();
    }
  }
  if (o.margin_steps > 0) options.margin_steps = o.margin_steps;
  if (!o.gross.empty()) {
    const Result<double> gross = parseNumber(o.gross, "--gross", &percent);
    if (!gross.ok()) return fail(gross.status());
    if (!percent)
      return fail(Status(StatusCode::kInvalidArgument, "--gross is a share of the loss: write 10%"));
    options.gross = gross.value();
  }
  if (!o.tail.empty()) {
    const Result<double> tail = parseNumber(o.tail, "--tail", &percent);
    if (!tail.ok()) return fail(tail.status());
    if (!percent || tail.value() > 0.9)
      return fail(Status(StatusCode::kInvalidArgument, "--tail is a share of the steps, at most 90%"));
    options.tail = tail.value();
  }
  if (!o.noise.empty() && o.candidate.empty()) {
    return fail(Status(StatusCode::kInvalidArgument, "--noise is for a comparison: give --candidate too"));
  }
  ProgressBar bar;
  const parity::Progress progress = [&](const std::string& file, uint64_t done, uint64_t total) {
    bar.update(file, done, total);
  };
  parity::Inputs inputs;
  const auto load = [&](const std::vector<std::string>& paths, std::vector<parity::Run>* to) {
    for (const std::string& path : paths) {
      auto runs = parity::loadRuns(path, progress);
      if (!runs.ok()) return runs.status();
      for (parity::Run& r : std::move(runs).value()) to->push_back(std::move(r));
    }
    return Status();
  };
  for (const auto& [paths, to] :
       {std::pair(&o.baseline, &inputs.baseline), std::pair(&o.candidate, &inputs.candidate),
        std::pair(&o.noise, &inputs.noise)}) {
    const Status status = load(*paths, to);
    if (!status.ok()) {
      bar.clear();
      return fail(status);
    }
  }
  bar.clear();
  const parity::Comparison comparison = parity::compareRuns(inputs, options);
  if (!o.html.empty()) {
    const Status status = writeFile(o.html, parity::parityHtml(comparison, inputs));
    if (!status.ok()) return fail(status);
  }
  const std::string text = o.json ? parity::parityJson(comparison) : parity::parityText(comparison);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    fmt::print(stderr, "halfwire parity: the report could not be written to standard output\n");
    return 2;
  }
  return comparison.exit_code;
}

}  // namespace

void addParityCommand(CLI::App& app, int* exit_code) {
  CLI::App* command =
      app.add_subcommand("parity", "Do two ways to train give the same model? Compares recorded runs.");
  auto options = std::make_shared<Options>();
  command
      ->add_option(
          "RUN", options->baseline,
          "Runs of the baseline, or runs to check alone: folders of rank<R>.jsonl, TensorBoard event files, "
          "trainer_state.json, CSV, Megatron-style logs, or folders of these; "
          "FIRST+SECOND is one run in two parts, the second a resume")
      ->required();
  command->add_option("--candidate", options->candidate, "Runs to compare with the baseline");
  command->add_option("--noise", options->noise,
                      "Twins of the baseline, to know the noise between runs where there is one run a side");
  command->add_option(
      "--margin", options->margin,
      "What counts as equal: a share of the baseline's tail loss (0.5%, the default) or a loss (0.01)");
  command
      ->add_option("--margin-steps", options->margin_steps,
                   "The same in steps: the loss that the baseline had so many steps before its end")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 32));
  command->add_option("--gross", options->gross, "Gap that is different even with one run a side (10%)");
  command->add_option("--tail", options->tail, "Share of the steps whose mean loss decides (20%)");
  command->add_flag("--json", options->json, "Print JSON (docs/parity.md) instead of words");
  command->add_option("--html", options->html, "Write a report as one HTML file");
  command->footer(
      "Examples:\n"
      "  halfwire parity run/                        # one run alone: step0-no-op, replicas-apart, ...\n"
      "  halfwire parity bf16-1 bf16-2 bf16-3 --candidate fp8-1 fp8-2 fp8-3\n"
      "  halfwire parity bf16 --candidate fp8 --noise twins/ --html parity.html\n"
      "Exit code: 0 equivalent (alone: nothing hard was found), 1 different (alone: a hard finding),\n"
      "2 cannot tell, or input that cannot be read.");
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace halfwire::cli
