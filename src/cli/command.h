// One subcommand a file. A file adds its subcommand to the application; its callback does the work and leaves
// the exit code. Logic lives in the libraries below; these files own options and words.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace halfwire::cli {

// `exit_code` outlives the parse; a callback stores its result there (0 success, 2 bad input).
// `command` is what followed --.
void addRunCommand(CLI::App& app, const std::vector<std::string>& command, int* exit_code);
void addDoctorCommand(CLI::App& app, const std::vector<std::string>& command, int* exit_code);
void addBenchCommand(CLI::App& app, int* exit_code);
void addBenchStep(CLI::App& bench, int* exit_code);
void addReportCommand(CLI::App& app, int* exit_code);
void addAnalyzeCommand(CLI::App& app, int* exit_code);
void addParityCommand(CLI::App& app, int* exit_code);

}  // namespace halfwire::cli
