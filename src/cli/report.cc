// `halfwire report`: options and words; the work is in src/meter.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/command.h"
#include "cli/write_file.h"
#include "meter/meter_report.h"

namespace halfwire::cli {
namespace {

struct ReportOptions {
  std::vector<std::string> runs;
  std::string html;
  bool compare = false;
  bool json = false;
};

int refuse(const std::string& sentence) {
  fmt::print(stderr, "halfwire report: {}\n", sentence);
  return 2;
}

int report(const ReportOptions& o) {
  if (o.runs.size() != (o.compare ? 2u : 1u)) {
    return refuse(o.compare
                      ? "--compare takes two folders of run logs, as in `halfwire report --compare A B`"
                      : "give one folder of run logs, as in `halfwire report logs` (two with --compare)");
  }
  std::vector<meter::RunSummary> runs;
  for (const std::string& path : o.runs) {
    auto run = meter::readRun(path);
    if (!run.ok()) return refuse(run.status().message());
    runs.push_back(std::move(run).value());
  }
  if (!o.html.empty()) {
    const Status status =
        writeFile(o.html, o.compare ? meter::compareHtml(runs[0], runs[1]) : meter::reportHtml(runs[0]));
    if (!status.ok()) return refuse(status.message());
  }
  std::string text;
  if (o.compare) {
    text = o.json ? meter::compareJson(runs[0], runs[1]) : meter::compareText(runs[0], runs[1]);
  } else {
    text = o.json ? meter::reportJson(runs[0]) : meter::reportText(runs[0]);
  }
  fmt::print("{}", text);
  return 0;
}

}  // namespace

void addReportCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<ReportOptions>();
  CLI::App* sub = app.add_subcommand("report", "What a metered run waited for, or two runs side by side");
  sub->add_option("runs", options->runs, "folder that `halfwire run --log` wrote; two with --compare")
      ->type_name("DIR")
      ->required();
  sub->add_flag("--compare", options->compare, "two runs side by side, with one sentence of verdict");
  sub->add_flag("--json", options->json, "as JSON (docs/meter.md)");
  sub->add_option("--html", options->html, "also write a page that needs no network")->type_name("FILE");
  sub->footer(
      "Examples:\n"
      "  halfwire run --mode meter --log logs -- torchrun --nproc-per-node 4 train.py && halfwire report "
      "logs\n"
      "  halfwire report --compare exact compressed --html compare.html");
  sub->callback([options, exit_code] { *exit_code = report(*options); });
}

}  // namespace halfwire::cli
