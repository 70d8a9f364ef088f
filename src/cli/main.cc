// The `halfwire` command: one subcommand a file, no logic here.
#include <CLI/CLI.hpp>

#include "cli/command.h"

int main(int argc, char** argv) {
  CLI::App app{"Halfwire: send NCCL's collectives as FP8, see what that buys, prove that the model learns the same."};
  app.name("halfwire");
  app.require_subcommand(1);
  app.set_version_flag("--version", HALFWIRE_VERSION);
  app.footer(
      "Examples:\n"
      "  halfwire run --mode wire -- torchrun --nproc-per-node 4 train.py\n"
      "  halfwire bench codec\n"
      "  halfwire analyze trace.json.gz\n"
      "Each subcommand has its own --help.");
  int exit_code = 0;
  halfwire::cli::addRunCommand(app, &exit_code);
  halfwire::cli::addBenchCommand(app, &exit_code);
#ifdef HALFWIRE_HAVE_ANALYZE
  halfwire::cli::addAnalyzeCommand(app, &exit_code);
#endif
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : 2;
  }
  return exit_code;
}
