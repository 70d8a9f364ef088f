// `halfwire analyze TRACE...`: options and words; the work is in trace, analysis and report.
#include "analysis/analyze.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/progress_bar.h"
#include "cli/write_file.h"
#include "meter/meter_report.h"
#include "report/html_report.h"
#include "report/json_report.h"
#include "report/perfetto_report.h"
#include "report/text_report.h"
#include "trace/trace_file.h"

namespace halfwire::cli {
namespace {

struct Options {
  std::vector<std::string> traces;
  std::vector<std::string> patterns;
  std::string what_if;
  std::string html;
  std::string perfetto;
  std::string bench;
  int top = 8;
  bool json = false;
  bool critical_path = false;
};

int fail(const Status& status) {
  fmt::print(stderr, "halfwire analyze: {}\n", status.message());
  return 2;
}

// "comm=0.52".
Result<double> parseWhatIf(const std::string& text) {
  constexpr std::string_view kComm = "comm=";
  double scale = 0;
  if (text.rfind(kComm, 0) == 0) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + kComm.size(), end, scale);
    if (error == std::errc() && stop == end && scale >= 0 && scale <= 10) return scale;
  }
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("--what-if '{}' is not understood: write comm=0.52, a factor from 0 to 10", text));
}

// Cost of packing a byte of user data, from what `halfwire bench codec --json` wrote: an AllReduce quantizes
// and dequantizes all of it and sums as many packets' bytes. Of each operation the row of the default format
// with the largest working set counts, the faster path where there are two.
Result<analysis::CodecRate> readBench(const std::string& path) {
  constexpr std::streamsize kMost = 16 << 20;
  const auto bad = [&](const std::string& what) {
    return Status(StatusCode::kInvalidData,
                  fmt::format("--bench {}: {}; give what `halfwire bench codec --json` printed", path, what));
  };
  std::ifstream in(path, std::ios::binary);
  if (!in) return Status(StatusCode::kUnavailable, fmt::format("--bench {}: {}", path, std::strerror(errno)));
  std::string text(static_cast<size_t>(kMost), '\0');
  in.read(text.data(), kMost);
  if (in.gcount() == kMost) return bad("is larger than 16 MiB");
  text.resize(static_cast<size_t>(in.gcount()));
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("rows") || !json["rows"].is_array()) return bad("has no `rows`");
  double seconds = 0;
  for (const char* op : {"quantize", "reduce", "dequantize"}) {
    double largest = 0;
    double best = 0;  // seconds per byte of user data
    for (const auto& row : json["rows"]) {
      if (!row.is_object() || row.value("op", nlohmann::json()) != op) continue;
      if (row.value("format", nlohmann::json()) != "e4m3" || row.value("block", nlohmann::json()) != 128 ||
          row.value("scale", nlohmann::json()) != "fp32" || row.value("input", nlohmann::json()) != "bf16" ||
          row.value("path", nlohmann::json()) == "scalar") {
        continue;
      }
      const auto number = [&](const char* name) {
        const auto found = row.find(name);
        return found != row.end() && found->is_number() ? found->get<double>() : 0.0;
      };
      const double size = number("working_set_bytes");
      const double rate = number("bytes_per_s");
      const double elements = number("elements");
      if (!(size > 0) || !(rate > 0) || !(elements > 0) || size < largest) continue;
      // A reduction's user data are the elements of all its packets, of which it was measured with eight.
      const double data = 2 * elements * (std::string_view(op) == "reduce" ? 8 : 1);
      const double cost = size / rate / data;
      best = size > largest ? cost : std::min(best, cost);
      largest = size;
    }
    if (largest == 0) return bad(fmt::format("has no row of {} for bf16 as e4m3/128/fp32", op));
    seconds += best;
  }
  return analysis::CodecRate{seconds};
}

// Whether all inputs are run logs, or folders of them, that `halfwire run --log` wrote.
bool areRunLogs(const std::vector<std::string>& inputs) {
  const auto is = [](const std::filesystem::path& path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) return false;  // what a pipe holds can be read once
    char begin[64] = {};
    std::ifstream in(path, std::ios::binary);
    in.read(begin, sizeof begin - 1);
    return std::string_view(begin).find("\"halfwire-run-log\"") != std::string_view::npos;
  };
  return std::all_of(inputs.begin(), inputs.end(), [&](const std::string& input) {
    std::error_code error;
    if (!std::filesystem::is_directory(input, error)) return is(input);
    for (const auto& entry : std::filesystem::directory_iterator(input, error)) {
      if (entry.path().extension() == ".json") return is(entry.path());
    }
    return false;
  });
}

// Run logs hold no kernels: what they say of waiting is `halfwire report`'s.
int reportRunLogs(const Options& o) {
  for (const std::string& input : o.traces) {
    const auto run = meter::readRun(input);
    if (!run.ok()) return fail(run.status());
    if (!o.html.empty()) {
      const Status status = writeFile(o.html, meter::reportHtml(run.value()));
      if (!status.ok()) return fail(status);
    }
    fmt::print("{}", o.json ? meter::reportJson(run.value()) : meter::reportText(run.value()));
  }
  return 0;
}

int run(const Options& o) {
  if (areRunLogs(o.traces)) return reportRunLogs(o);
  Result<std::vector<std::string>> files = trace::expandInputs(o.traces);
  if (!files.ok()) return fail(files.status());
  analysis::AnalyzeOptions options;
  options.comm_patterns = o.patterns;
  if (!o.what_if.empty()) {
    Result<double> scale = parseWhatIf(o.what_if);
    if (!scale.ok()) return fail(scale.status());
    options.what_if_comm = scale.value();
  }
  if (!o.bench.empty()) {
    Result<analysis::CodecRate> rate = readBench(o.bench);
    if (!rate.ok()) return fail(rate.status());
    options.codec = rate.value();
  }
  options.keep_timelines = !o.html.empty() || !o.perfetto.empty();
  if (o.critical_path) options.critical_path = true;
  ProgressBar progress;
  options.progress = [&](const std::string& file, uint64_t done, uint64_t total) {
    progress.update(file, done, total);
  };
  Result<analysis::Analysis> result = analysis::analyzeFiles(files.value(), options);
  progress.clear();
  if (!result.ok()) return fail(result.status());
  if (!o.html.empty()) {
    const Status status = writeFile(o.html, report::analyzeHtml(result.value()));
    if (!status.ok()) return fail(status);
  }
  if (!o.perfetto.empty()) {
    const Status status =
        writeFile(o.perfetto, [&](std::FILE* file) { return report::writePerfetto(result.value(), file); });
    if (!status.ok()) return fail(status);
  }
  const std::string text =
      o.json ? report::analyzeJson(result.value()) : report::analyzeText(result.value(), o.top);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    fmt::print(stderr, "halfwire analyze: the report could not be written to standard output\n");
    return 2;
  }
  return 0;
}

}  // namespace

void addAnalyzeCommand(CLI::App& app, int* exit_code) {
  CLI::App* command =
      app.add_subcommand("analyze", "Where did the step go? Reads recorded traces, needs no GPU.");
  auto options = std::make_shared<Options>();
  command
      ->add_option(
          "TRACE", options->traces,
          "PyTorch profiler traces (.json, .json.gz), Nsight Systems SQLite exports, or folders; or run logs "
          "with a meter, as `halfwire report` shows them")
      ->required();
  command->add_flag("--json", options->json, "Print JSON (docs/analyze-schema.md) instead of tables");
  command->add_option("--top", options->top, "Rows of the longer tables")->check(CLI::Range(1, 100000));
  command
      ->add_option("--comm-pattern", options->patterns,
                   "Further communication kernels: a regular expression of their names, or REGEX=type; may "
                   "be repeated")
      ->allow_extra_args(false);
  command->add_option("--html", options->html, "Write a report as one HTML file");
  command->add_option(
      "--perfetto", options->perfetto,
      "Write the trace with tracks of exposed communication and idle causes, for ui.perfetto.dev");
  command->add_option("--what-if", options->what_if, "Replay with communication scaled, e.g. comm=0.52");
  command->add_option("--bench", options->bench,
                      "What `halfwire bench codec --json` printed: its cost is taken off what FP8 could buy");
  command->add_flag("--critical-path", options->critical_path, "Critical path also for large traces");
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace halfwire::cli
