// `halfwire run`: starts a command, or local ranks of it, with the library preloaded, and reports what it
// did.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/units.h"
#include "cli/command.h"
#include "launch/launch.h"
#include "launch/preload.h"
#include "meter/meter_report.h"
#include "meter/nvtx_steps.h"
#include "policy/run_log_json.h"
#include "policy/settings.h"

#ifndef HALFWIRE_SANITIZER_RUNTIME
#define HALFWIRE_SANITIZER_RUNTIME ""
#endif

namespace halfwire::cli {
namespace {

constexpr int kMostLocalRanks = 1024;

// An option that becomes a variable. Options that were not given leave the variable as it is.
struct Setting {
  const char* option;
  const char* variable;
  const char* type;
  const char* help;
  std::string value;
  CLI::Option* given = nullptr;
};

struct RunOptions {
  std::vector<Setting> settings = {
      {"--mode", "HALFWIRE_MODE", "off|meter|shadow|wire|noise",
       "off: nothing is compressed; meter: off, and what the job waits for is measured; shadow: off, and "
       "samples are "
       "compressed beside the exact calls to show what wire would do; wire: collectives go as FP8; noise: "
       "they stay "
       "exact and their results get noise of one bf16 ulp, for a twin that `halfwire parity --noise` takes "
       "(default: wire)"},
      {"--shadow-formats", "HALFWIRE_SHADOW_FORMATS", "LIST",
       "element formats that the shadow's samples take in turn (default: that of --format)"},
      {"--shadow-every", "HALFWIRE_SHADOW_EVERY", "N", "one call in N is sampled (default: 61)"},
      {"--shadow-bytes", "HALFWIRE_SHADOW_BYTES", "SIZE", "larger messages are not sampled (default: 64MiB)"},
      {"--seed", "HALFWIRE_SEED", "N", "of the noise and of stochastic rounding (default: 1)"},
      {"--meter", "HALFWIRE_METER", "on|off",
       "measure how long streams wait for collectives, beneath any mode (default: off; --mode meter turns it "
       "on)"},
      {"--meter-every", "HALFWIRE_METER_EVERY", "N", "in one step of so many (default: 16)"},
      {"--format", "HALFWIRE_FORMAT", "FORMAT", "element format: e4m3, e3m4, e5m2 or int8 (default: e4m3)"},
      {"--block", "HALFWIRE_BLOCK", "N", "elements that share a scale: 32, 64, 128 or 256 (default: 128)"},
      {"--scale", "HALFWIRE_SCALE", "SCALE", "scale format: fp32 or e8m0 (default: fp32)"},
      {"--rounding", "HALFWIRE_ROUNDING", "HOW",
       "nearest, or stochastic: up with the probability of the distance, so that many roundings cancel; "
       "calls that are captured into CUDA graphs round to nearest (default: nearest)"},
      {"--ops", "HALFWIRE_OPS", "LIST",
       "what may be compressed, of allreduce, reducescatter, reduce, allgather, broadcast, alltoall, gather, "
       "scatter, sendrecv; NAME-fp32 for fp32 in the last six (default: "
       "allreduce,reducescatter)"},
      {"--comms", "HALFWIRE_COMMS", "WHICH",
       "on which communicators: world (the whole job), all, or size:N (default: world)"},
      {"--min-bytes", "HALFWIRE_MIN_BYTES", "SIZE",
       "leave smaller messages exact (default: auto, 4MiB, and 64MiB where NVLink joins all ranks)"},
      {"--chunk-bytes", "HALFWIRE_CHUNK_BYTES", "SIZE",
       "bytes of a message that the scratch holds at a time (default: auto, 64MiB, and 256MiB where NVLink "
       "joins all "
       "ranks)"},
      {"--overlap", "HALFWIRE_OVERLAP", "auto|on|off",
       "codec of one pass beside the transfers of another (default: auto, on with the host engine)"},
      {"--address", "HALFWIRE_ADDRESS", "IP",
       "address of this machine that the other ranks reach (default: 127.0.0.1)"},
      {"--link", "HALFWIRE_HOST_LINK", "RATE",
       "host engine only: emulate links of this rate, like 300Mbit or 1Gbit"},
      {"--hw-queues", "HALFWIRE_HOST_HW_QUEUES", "K",
       "host engine only: hardware queues of a device, 0 for one per stream"},
      {"--delay-us", "HALFWIRE_HOST_DELAY_US", "N",
       "host engine only: wait up to N random microseconds before each queue entry"}};
  std::string log;
  std::string ranks;
};

// Variables that Halfwire and its host engine read, beyond those that have an option. The last two are the
// test suite's.
constexpr const char* kOtherVariables[] = {
    "HALFWIRE_LOG_DIR",   "HALFWIRE_NCCL",         "HALFWIRE_MEETING_TIMEOUT", "HALFWIRE_HOST_DEVICES",
    "HALFWIRE_HOST_SEED", "HALFWIRE_HOST_ADDRESS", "HALFWIRE_HOST_TRACE",      "HALFWIRE_METER_RANGE",
    "HALFWIRE_HANDLES",   "HALFWIRE_SOURCE_DIR",   "HALFWIRE_BUILD_DIR"};

int refuse(const std::string& sentence) {
  fmt::print(stderr, "halfwire run: {}\n", sentence);
  return 2;
}

// A misspelt variable would silently not do what was meant.
Status checkNames(const RunOptions& options, const std::vector<std::string>& environment) {
  std::set<std::string> known(std::begin(kOtherVariables), std::end(kOtherVariables));
  for (const Setting& s : options.settings) known.insert(s.variable);
  for (const std::string& entry : environment) {
    const std::string name = entry.substr(0, entry.find('='));
    if (!name.starts_with("HALFWIRE_") || known.contains(name)) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("{} in the environment is no setting of Halfwire: correct its "
                        "spelling or unset it (docs/cli.md lists them)",
                        name)};
  }
  return {};
}

// Everything that is read by the library or the host engine, checked here so that a bad value stops the job
// before it starts and not in the middle of it.
Result<Settings> checkSettings(const RunOptions& options, const std::vector<std::string>& environment) {
  const auto lookup = [&](const char* name) { return findVariable(environment, name); };
  auto settings = readSettings(lookup);
  Status status = settings.status();
  if (const char* link = lookup("HALFWIRE_HOST_LINK"); status.ok() && link != nullptr && *link != '\0') {
    if (!parseBitRate(link).ok()) {
      status = {StatusCode::kInvalidArgument,
                fmt::format("HALFWIRE_HOST_LINK='{}' is not valid: use a rate like 300Mbit or 1Gbit", link)};
    }
  }
  struct Range {
    const char* name;
    int64_t max;
  };
  for (const Range& r : {Range{"HALFWIRE_HOST_HW_QUEUES", 32}, Range{"HALFWIRE_HOST_DELAY_US", 10'000'000}}) {
    const char* text = lookup(r.name);
    if (!status.ok() || text == nullptr || *text == '\0' || parseInteger(text, 0, r.max, r.name).ok())
      continue;
    status = {StatusCode::kInvalidArgument,
              fmt::format("{}='{}' is not valid: use a whole number from 0 to {}", r.name, text, r.max)};
  }
  if (const char* range = lookup("HALFWIRE_METER_RANGE");
      status.ok() && range != nullptr && *range != '\0' && !meter::isRangeName(range)) {
    status = {
        StatusCode::kInvalidArgument,
        fmt::format("HALFWIRE_METER_RANGE='{}' is not valid: use the name of the NVTX ranges that are the "
                    "program's steps, of up to {} printable characters, or off",
                    range, meter::kMostRangeName)};
  }
  if (status.ok()) return settings;
  // Name what the user typed.
  std::string words = status.message();
  for (const Setting& s : options.settings) {
    const std::string prefix = fmt::format("{}=", s.variable);
    if (s.given->count() > 0 && words.starts_with(prefix))
      words = fmt::format("{} {}", s.option, words.substr(prefix.size()));
  }
  return Status(status.code(), words);
}

// Lets the meter see the program's NVTX ranges, for its steps; a tool that is there or may come listens
// itself.
void listenToRanges(const std::string& meter_library, std::vector<std::string>* environment) {
  for (const char* tools : {"NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"}) {
    if (findVariable(*environment, tools) != nullptr) return;
  }
  const char* range = findVariable(*environment, "HALFWIRE_METER_RANGE");
  if (range != nullptr && std::string_view(range) == "off") return;
  const std::string library =
      (std::filesystem::path(meter_library).parent_path() / "libhalfwire-nvtx.so").string();
  if (access(library.c_str(), R_OK) == 0) setVariable(environment, "NVTX_INJECTION64_PATH", library);
}

void warnOfSmallBlocks(const Settings& settings) {
  if (settings.mode != Mode::kWire || settings.format.scale != ScaleFormat::kFp32 ||
      settings.format.block >= 128)
    return;
  const double saved = 100.0 * (1.0 - (1.0 + 4.0 / settings.format.block) / 2.0);
  fmt::print(stderr,
             "halfwire run: note: blocks of {} with fp32 scales save {:.1f} % of bf16's bytes, less than the "
             "48.4 % of blocks "
             "of 128: use --scale e8m0 or --block 128 to save more\n",
             settings.format.block, saved);
}

// A private folder for the logs of this run, removed with all it holds.
class LogFolder {
 public:
  static Result<LogFolder> make(const std::string& parent) {
    std::string name = parent + "/halfwire-run-XXXXXX";
    if (mkdtemp(name.data()) != nullptr) return LogFolder(name);
    return Status(
        StatusCode::kUnavailable,
        fmt::format(
            "cannot create a folder in {} ({}): give one that can be written with --log, or set TMPDIR",
            parent, std::strerror(errno)));
  }
  LogFolder(LogFolder&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  LogFolder& operator=(LogFolder&&) = delete;
  ~LogFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit LogFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// Where the private folder goes: into --log's, which workers in containers may share, or among temporary
// files.
Result<std::string> logParent(const std::string& log) {
  if (log.empty()) {
    const char* temporary = std::getenv("TMPDIR");
    return std::string(temporary != nullptr && *temporary != '\0' ? temporary : "/tmp");
  }
  std::error_code error;
  std::filesystem::create_directories(log, error);
  const std::filesystem::path path = std::filesystem::absolute(log, error);
  if (error || !std::filesystem::is_directory(path, error)) {
    return Status(StatusCode::kUnavailable,
                  fmt::format("--log {}: cannot make this folder ({}): give one that can be written", log,
                              error ? error.message() : "a file has its name"));
  }
  return path.string();
}

void keepJson(const std::vector<RunLogRecord>& records, const std::string& directory) {
  std::set<std::string> used;
  for (const RunLogRecord& record : records) {
    std::string name =
        record.rank >= 0 ? fmt::format("rank{}", record.rank) : fmt::format("process{}", record.pid);
    // A rank that was started again, or a child of it that made communicators of its own.
    for (int n = 2; !used.insert(name).second; ++n) name = fmt::format("rank{}-{}", record.rank, n);
    const std::string path = fmt::format("{}/{}.json", directory, name);
    const std::string half = path + ".tmp";
    std::ofstream out(half, std::ios::binary);
    out << runLogJson(record);
    out.close();
    std::error_code error;
    if (out) std::filesystem::rename(half, path, error);
    if (!out || error) fmt::print(stderr, "halfwire run: cannot write {}: is its disk full?\n", path);
  }
}

void report(const LogFolder& folder, const std::string& log_directory, bool off, bool metered) {
  std::vector<std::string> problems;
  std::vector<RunLogRecord> records = readRunLogs(folder.path(), &problems);
  bool any = false;
  for (const RunLogRecord& r : records) any = any || r.communicators_made != 0;
  std::string text = "\n";
  if (any || !records.empty()) text += runLogTable(records);
  if (any && metered)
    text += "\n" + meter::reportText(meter::summarize(records, "meter")) +
            (log_directory.empty() ? "keep the run logs with --log DIR for `halfwire report`\n" : "");
  if (!any) text += nothingIntercepted();
  if (!any && off) text += "  (with --mode off nothing would have been compressed)\n";
  for (const std::string& problem : problems) text += problem + "\n";
  if (!log_directory.empty()) {
    keepJson(records, log_directory);
    text +=
        fmt::format("{} log{} kept in {}\n", records.size(), records.size() == 1 ? "" : "s", log_directory);
  }
  fmt::print(stderr, "{}", text);
}

std::string outcomeWords(const LaunchOutcome& outcome) {
  std::string text = fmt::format("rank {} ", outcome.failed_rank);
  text += outcome.signal != 0
              ? fmt::format("was ended by signal {} ({})", outcome.signal, strsignal(outcome.signal))
              : fmt::format("ended with exit code {}", outcome.exit_code);
  if (outcome.terminated != 0) {
    text += fmt::format(": {} other rank{} stopped", outcome.terminated,
                        outcome.terminated == 1 ? " was" : "s were");
    if (outcome.killed != 0) text += fmt::format(", {} of them killed", outcome.killed);
  }
  return text;
}

int run(const RunOptions& options, const std::vector<std::string>& command) {
  if (command.empty()) {
    return refuse(
        "there is no command: put it after --, as in `halfwire run -- torchrun --nproc-per-node 4 train.py`");
  }
  int64_t ranks = 0;
  if (!options.ranks.empty()) {
    const auto parsed = parseInteger(options.ranks, 1, kMostLocalRanks, "number of ranks");
    if (!parsed.ok()) return refuse("-n " + parsed.status().message());
    ranks = parsed.value();
  }

  std::vector<std::string> environment = currentEnvironment();
  if (findVariable(environment, "HALFWIRE_MODE") == nullptr)
    setVariable(&environment, "HALFWIRE_MODE", "wire");
  for (const Setting& s : options.settings) {
    if (s.given->count() == 0) continue;
    if (s.value.empty()) return refuse(fmt::format("{} has no value: see halfwire run --help", s.option));
    setVariable(&environment, s.variable, s.value);
  }
  if (Status status = checkNames(options, environment); !status.ok()) return refuse(status.message());
  if (ranks > 0) setVariable(&environment, "WORLD_SIZE", std::to_string(ranks));
  const auto settings = checkSettings(options, environment);
  if (!settings.ok()) return refuse(settings.status().message());

  const auto library = findPreloadLibrary();
  if (!library.ok()) return refuse(library.status().message());
  const char* existing = findVariable(environment, "LD_PRELOAD");
  const auto preload =
      preloadValue(existing == nullptr ? "" : existing, library.value(), HALFWIRE_SANITIZER_RUNTIME);
  if (!preload.ok()) return refuse(preload.status().message());
  std::string libraries = preload.value();
  if (settings.value().meter) {
    const auto meter = findMeterLibrary();
    if (!meter.ok()) return refuse(meter.status().message());
    const auto both = preloadValue(libraries, meter.value(), "");
    if (!both.ok()) return refuse(both.status().message());
    libraries = both.value();
    listenToRanges(meter.value(), &environment);
  }
  setVariable(&environment, "LD_PRELOAD", libraries);
  if (Status status = checkPreload(environment, library.value()); !status.ok())
    return refuse(status.message());

  const auto parent = logParent(options.log);
  if (!parent.ok()) return refuse(parent.status().message());
  const auto folder = LogFolder::make(parent.value());
  if (!folder.ok()) return refuse(folder.status().message());
  setVariable(&environment, "HALFWIRE_LOG_DIR", folder.value().path());

  LaunchOptions job;
  job.command = command;
  job.ranks = ranks > 0;
  if (ranks > 0) {
    const auto port = freePort();
    if (!port.ok()) return refuse(port.status().message());
    for (int rank = 0; rank < ranks; ++rank) {
      job.environments.push_back(rankEnvironment(environment, rank, static_cast<int>(ranks), port.value()));
    }
  } else {
    job.environments.push_back(environment);
  }
  warnOfSmallBlocks(settings.value());
  const auto outcome = launch(job);
  if (!outcome.ok()) return refuse(outcome.status().message());
  if (job.ranks && outcome.value().failed_rank >= 0) {
    fmt::print(stderr, "halfwire run: {}\n", outcomeWords(outcome.value()));
  }
  report(folder.value(), options.log.empty() ? "" : parent.value(), settings.value().mode == Mode::kOff,
         settings.value().meter);
  return outcome.value().exit_code;
}

class RunFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: halfwire run [OPTIONS] -- COMMAND...\n";
  }
};

}  // namespace

void addRunCommand(CLI::App& app, const std::vector<std::string>& command, int* exit_code) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* sub = app.add_subcommand("run", "Run a program with its NCCL collectives sent as FP8");
  sub->formatter(std::make_shared<RunFormatter>());
  for (Setting& s : options->settings) {
    s.given = sub->add_option(s.option, s.value, s.help)->type_name(s.type);
  }
  sub->add_option("--log", options->log, "keep each rank's counters as JSON in this folder (docs/run-log.md)")
      ->type_name("DIR");
  sub->add_option(
         "-n", options->ranks,
         "start this many ranks of the command on this machine, with the variables that torchrun would set")
      ->type_name("RANKS");
  sub->footer(
      "Every option can also be set as a variable (HALFWIRE_MODE, HALFWIRE_FORMAT, ...); an option wins. A "
      "table of what\n"
      "was compressed, and why the rest was not, goes to the standard error at the end, however the program "
      "ended.\n"
      "\n"
      "Examples:\n"
      "  halfwire run -- torchrun --nproc-per-node 4 train.py\n"
      "  halfwire run --mode off -- torchrun --nproc-per-node 4 train.py    the same, all exact, counted\n"
      "  halfwire run --scale e8m0 --min-bytes 1MiB --log logs -- ./train\n"
      "  halfwire run -n 4 --link 300Mbit -- ./train_on_the_host_engine\n"
      "\n"
      "Exit code: the command's, 128 + signal if a signal ended it, 2 if nothing was run.");
  sub->callback([options, command, exit_code] { *exit_code = run(*options, command); });
}

}  // namespace halfwire::cli
