// The `halfwire` command: one subcommand a file, no logic here.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "cli/command.h"
#include "launch/preload.h"

namespace {

// One sentence for CLI11's errors, with the help to look at.
std::string errorSentence(const CLI::App& app, const CLI::ParseError& error) {
  std::string where = "halfwire";
  const CLI::App* sub = &app;
  while (!sub->get_subcommands().empty()) {
    sub = sub->get_subcommands().front();
    where += " " + sub->get_name();
  }
  std::string words = error.what();
  while (!words.empty() && (words.back() == '\n' || words.back() == '.')) words.pop_back();
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !sub->remaining().empty()) {
    words = fmt::format("'{}' is not known here{}", sub->remaining().front(),
                        where == "halfwire run" ? " (the program to run goes after --)" : "");
  } else if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    words = fmt::format("{} needs a value", words.substr(0, words.find(':')));
  } else if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr &&
             words.find("ubcommand") != std::string::npos) {
    words = "a subcommand is missing";
  }
  return fmt::format("{}: {}: see {} --help", where, words, where);
}

}  // namespace

int main(int argc, char** argv) {
  int exit_code = 0;
  if (halfwire::preloadProbe(argc, argv, &exit_code)) return exit_code;

  // What follows the first -- is the program to run, and nothing in it is ours.
  char** const end = argv + argc;
  char** const dashes = std::find_if(argv, end, [](const char* a) { return std::string_view(a) == "--"; });
  const std::vector<std::string> command(dashes == end ? end : dashes + 1, end);
  if (dashes != end &&
      (argc < 2 || (std::string_view(argv[1]) != "run" && std::string_view(argv[1]) != "doctor"))) {
    fmt::print(
        stderr,
        "halfwire: only `halfwire run` and `halfwire doctor` take a command after --: see halfwire --help\n");
    return 2;
  }

  CLI::App app{"Halfwire: send NCCL's collectives as FP8, and see what that buys."};
  app.name("halfwire");
  app.require_subcommand(1);
  app.set_version_flag("--version", HALFWIRE_VERSION);
  app.footer(
      "Examples:\n"
      "  halfwire run -- torchrun --nproc-per-node 4 train.py\n"
      "  halfwire doctor -- python3 train.py\n"
      "  halfwire bench codec\n"
      "  halfwire report logs\n"
#ifdef HALFWIRE_HAVE_ANALYZE
      "  halfwire analyze trace.json.gz\n"
#endif
#ifdef HALFWIRE_HAVE_PARITY
      "  halfwire parity baseline/ --candidate candidate/\n"
#endif
      "Each subcommand has its own --help.");
  halfwire::cli::addRunCommand(app, command, &exit_code);
  halfwire::cli::addDoctorCommand(app, command, &exit_code);
  halfwire::cli::addBenchCommand(app, &exit_code);
  halfwire::cli::addReportCommand(app, &exit_code);
#ifdef HALFWIRE_HAVE_ANALYZE
  halfwire::cli::addAnalyzeCommand(app, &exit_code);
#endif
#ifdef HALFWIRE_HAVE_PARITY
  halfwire::cli::addParityCommand(app, &exit_code);
#endif
  try {
    app.parse(static_cast<int>(dashes - argv), argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    fmt::print(stderr, "{}\n", errorSentence(app, error));
    return 2;
  }
  return exit_code;
}
