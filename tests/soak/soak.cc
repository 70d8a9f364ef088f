// Runs random NCCL programs on the host engine, through libhalfwire.so, and checks every result.
#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

#include "soak/program.h"
#include "support/launch.h"
#include "support/rank.h"

namespace halfwire::soak {
namespace {

struct Options {
  int programs = 30;
  uint64_t seed = 1;
  int64_t one = -1;
  int ranks = 0;
  bool kill = false;
  bool abort = false;
  bool print = false;
  bool verbose = false;
  bool bare = false;
  bool any_order = false;
  double hang_s = 60;
  double error_s = 5;
  int jobs = 1;
  int compare_every = 4;
  std::string library;
  std::vector<std::string> set;
};

using Hashes = std::map<int, uint64_t>;

Hashes parseHashes(const testing::RankOutcome& rank) {
  Hashes hashes;
  const auto report = rank.reports.find("hashes");
  if (report == rank.reports.end()) return hashes;
  std::istringstream in(report->second.value);
  int op;
  uint64_t hash;
  while (in >> op >> hash) hashes[op] = hash;
  return hashes;
}

// How a rank of the program ends before the others.
enum class Ending { kNone, kKill, kAbort };

class Soak {
 public:
  explicit Soak(const Options& options) : options_(options) {}

  // True if the program ran as it should. Thread-safe.
  bool runProgram(uint64_t seed) {
    GenerateOptions generate;
    generate.ranks = options_.ranks;
    generate.any_order = options_.any_order;
    Program program = generateProgram(seed, generate);
    for (const std::string& text : options_.set) {
      const size_t equals = text.find('=');
      program.settings[text.substr(0, equals)] = equals == std::string::npos ? "" : text.substr(equals + 1);
    }
    if (options_.print) {
      const std::lock_guard<std::mutex> lock(mutex_);
      printf("%s", describeProgram(program).c_str());
    }
    const Ending ending = endingOf(program);
    const testing::LaunchOutcome outcome = launch(program, ending, !options_.bare);
    std::string error =
        ending == Ending::kNone ? judge(program, outcome) : judgeEnded(program, ending, outcome);
    // What passes through must not differ by a bit from what NCCL does without the library.
    if (error.empty() && ending == Ending::kNone && !options_.bare && seed % options_.compare_every == 0) {
      const testing::LaunchOutcome bare = launch(program, ending, false);
      error = bare.ok() ? comparePassing(program, outcome, bare) : "without the library:\n" + bare.describe();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    slowest_s_ = std::max(slowest_s_, outcome.wall_s);
    if (options_.verbose)
      printf("seed %llu: %s, %.2f s\n", static_cast<unsigned long long>(seed),
             error.empty() ? "ok" : "FAILED", outcome.wall_s);
    if (error.empty()) return true;
    printf("FAILED seed %llu (halfwire_soak --one %llu%s%s%s --print)\n%s\n",
           static_cast<unsigned long long>(seed), static_cast<unsigned long long>(seed), endingOption(ending),
           options_.any_order ? " --any-order" : "",
           options_.ranks > 0 ? (" --ranks " + std::to_string(options_.ranks)).c_str() : "", error.c_str());
    fflush(stdout);
    return false;
  }

  double slowestSeconds() const { return slowest_s_; }
  double slowestErrorSeconds() const { return slowest_error_s_; }

 private:
  Ending endingOf(const Program& program) const {
    if (options_.kill && options_.abort) return program.aborts ? Ending::kAbort : Ending::kKill;
    return options_.kill ? Ending::kKill : options_.abort ? Ending::kAbort : Ending::kNone;
  }

  static const char* endingOption(Ending ending) {
    return ending == Ending::kKill ? " --kill" : ending == Ending::kAbort ? " --abort" : "";
  }

  testing::LaunchOutcome launch(const Program& program, Ending ending, bool library) {
    testing::LaunchOptions launch;
    launch.ranks = program.ranks;
    launch.preload = library;
    launch.library = options_.library;
    launch.env = {program.settings.begin(), program.settings.end()};
    launch.timeout_s = options_.hang_s;
    launch.args = {std::to_string(program.seed), std::to_string(options_.ranks),
                   ending == Ending::kKill    ? "kill"
                   : ending == Ending::kAbort ? "abort"
                                              : "run",
                   library ? "library" : "bare", options_.any_order ? "any" : "same"};
    if (ending == Ending::kKill && program.end_timed) {
      launch.kill_rank = program.victim;
      launch.kill_after_s = program.end_after_s;
    }
    return testing::launchRanks("Soak", launch);
  }

  static std::string judge(const Program& program, const testing::LaunchOutcome& outcome) {
    if (!outcome.ok()) return (outcome.timed_out ? "HANG\n" : "") + outcome.describe();
    std::vector<Hashes> hashes;
    for (const auto& rank : outcome.ranks) hashes.push_back(parseHashes(rank));
    for (const Op& op : program.ops) {
      if (op.kind != OpKind::kAllReduce && op.kind != OpKind::kAllGather && op.kind != OpKind::kBroadcast)
        continue;
      const auto& members = program.comms[op.comm].members;
      for (const int member : members) {
        if (hashes[member].count(op.id) == 0)
          return describeOp(program, op) + ": rank " + std::to_string(member) + " has no result";
        if (hashes[member].at(op.id) != hashes[members[0]].at(op.id)) {
          return describeOp(program, op) + ": ranks " + std::to_string(members[0]) + " and " +
                 std::to_string(member) + " hold different bits";
        }
      }
    }
    return {};
  }

  static std::string comparePassing(const Program& program, const testing::LaunchOutcome& with,
                                    const testing::LaunchOutcome& bare) {
    for (int rank = 0; rank < program.ranks; ++rank) {
      const Hashes a = parseHashes(with.ranks[rank]);
      const Hashes b = parseHashes(bare.ranks[rank]);
      for (const Op& op : program.ops) {
        if (shouldCompress(program, op) || a.count(op.id) == 0) continue;
        if (b.count(op.id) == 0 || a.at(op.id) != b.at(op.id)) {
          return describeOp(program, op) + ": passes through, but rank " + std::to_string(rank) +
                 " gets other bits than without the library";
        }
      }
    }
    return {};
  }

  std::string judgeEnded(const Program& program, Ending ending, const testing::LaunchOutcome& outcome) {
    if (outcome.timed_out) return "HANG\n" + outcome.describe();
    const testing::RankOutcome& victim = outcome.ranks[program.victim];
    double end_s = victim.ended_s;
    if (ending == Ending::kKill) {
      if (victim.signal != SIGKILL) return "the victim was not killed\n" + outcome.describe();
    } else {
      const auto aborted = victim.reports.find("aborted");
      if (aborted == victim.reports.end()) return "the victim did not abort\n" + outcome.describe();
      end_s = aborted->second.at_s;
      if (!victim.ok()) return "the victim did not leave by itself\n" + outcome.describe();
      if (victim.ended_s - end_s > 2 * options_.error_s)
        return "the victim took long to leave\n" + outcome.describe();
    }
    for (int rank = 0; rank < program.ranks; ++rank) {
      if (rank == program.victim) continue;
      const testing::RankOutcome& survivor = outcome.ranks[rank];
      const std::string name = "rank " + std::to_string(rank);
      if (!survivor.ok()) return name + " did not leave by itself\n" + outcome.describe();
      const auto seen = survivor.reports.find("error");
      if (seen == survivor.reports.end()) return name + " saw no error\n" + outcome.describe();
      const double after = seen->second.at_s - end_s;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        slowest_error_s_ = std::max(slowest_error_s_, after);
      }
      if (after > options_.error_s)
        return name + " saw the error only after " + std::to_string(after) + " s\n" + outcome.describe();
      if (survivor.ended_s - end_s > 2 * options_.error_s)
        return name + " took long to leave\n" + outcome.describe();
    }
    return {};
  }

  const Options options_;
  std::mutex mutex_;  // guards standard output and what follows
  double slowest_s_ = 0;
  double slowest_error_s_ = 0;
};

int runSoak(const Options& options) {
  if (!options.bare && options.library.empty() && testing::libraryPath().empty()) {
    fprintf(stderr, "libhalfwire.so is not built; name it with --library or run with --bare\n");
    return 2;
  }
  const auto start = std::chrono::steady_clock::now();
  Soak soak(options);
  std::atomic<int> next{0}, done{0}, failed{0};
  const int programs = options.one >= 0 ? 1 : options.programs;
  const auto work = [&] {
    for (int i = next++; i < programs && failed < 20; i = next++) {
      const uint64_t seed =
          options.one >= 0 ? static_cast<uint64_t>(options.one) : options.seed + static_cast<uint64_t>(i);
      if (!soak.runProgram(seed)) ++failed;
      ++done;
    }
  };
  std::vector<std::thread> workers;
  for (int i = 1; i < options.jobs; ++i) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  if (failed >= 20) printf("20 programs failed: stopped\n");
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  printf("%d programs%s, %d failed, %.0f s, slowest %.1f s", done.load(),
         options.kill && options.abort ? " with a killed or aborting rank"
         : options.kill                ? " with a killed rank"
         : options.abort               ? " with an aborting rank"
                                       : "",
         failed.load(), wall, soak.slowestSeconds());
  if (options.kill || options.abort) printf(", errors seen within %.3f s", soak.slowestErrorSeconds());
  printf("\n");
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace halfwire::soak

int main(int argc, char** argv) {
  if (const auto code = halfwire::testing::runAsRank(argc, argv)) return *code;
  setvbuf(stdout, nullptr, _IOLBF, 0);  // whoever watches a file sees how far it is
  halfwire::soak::Options options;
  CLI::App app(
      "Random NCCL programs on the host engine, through libhalfwire.so, checked against an fp64 oracle");
  app.add_option("--programs", options.programs, "how many programs to run")->check(CLI::PositiveNumber);
  app.add_option("--seed", options.seed, "seed of the first program; the next one has the next seed");
  app.add_option("--one", options.one, "run this seed only")->check(CLI::NonNegativeNumber);
  app.add_option("--ranks", options.ranks, "ranks of every program; any of 2 to 5 if not given")
      ->check(CLI::Range(2, 5));
  app.add_flag("--kill", options.kill, "kill a rank of every program; the others have to notice in time");
  app.add_flag("--abort", options.abort,
               "a second thread of a rank of every program aborts; with --kill, either, by the seed");
  app.add_flag("--print", options.print, "print each program before it runs");
  app.add_flag("--any-order", options.any_order,
               "compressed AlltoAll, Gather and Scatter in any order that NCCL allows");
  app.add_flag("-v,--verbose", options.verbose, "a line for each program");
  app.add_flag("--bare", options.bare, "without libhalfwire.so: the engine alone");
  app.add_option("--compare-every", options.compare_every,
                 "compare every n-th program's passing calls with a run without the library")
      ->check(CLI::PositiveNumber);
  app.add_option("--hang", options.hang_s, "seconds after which a program counts as hung")
      ->check(CLI::PositiveNumber);
  app.add_option("--error", options.error_s, "seconds after which all ranks must know of one that is gone")
      ->check(CLI::PositiveNumber);
  app.add_option("--jobs", options.jobs, "programs at the same time: they wait more than they compute")
      ->check(CLI::Range(1, 64));
  app.add_option("--set", options.set,
                 "NAME=VALUE: a variable of the ranks' environment other than the program's own");
  app.add_option("--library", options.library, "the libhalfwire.so to test");
  CLI11_PARSE(app, argc, argv);
  return halfwire::soak::runSoak(options);
}
