// Starts the ranks of a test program as processes of their own, talks to them over sockets, and never waits
// for ever: the parent's side. rank.h is the side of the rank.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

namespace halfwire::testing {

using Environment = std::map<std::string, std::string>;

struct LaunchOptions {
  int ranks = 2;
  bool preload = true;            // with libhalfwire.so in LD_PRELOAD
  std::set<int> without_library;  // ranks that are started without it all the same
  Environment env;                // for every rank; an empty value removes the variable
  std::map<int, Environment> rank_env;
  std::vector<std::string> args;
  double timeout_s = 60;      // then every rank is asked where it is, and killed
  std::string executable;     // empty: this program itself
  std::string library;        // empty: the build's libhalfwire.so
  int kill_rank = -1;         // this rank gets SIGKILL ...
  double kill_after_s = 0.0;  // ... this long after all ranks have reported "ready"
};

struct Report {
  std::string value;
  double at_s = 0;  // seconds since the launch, on the parent's clock
};

struct RankOutcome {
  int exit_code = -1;  // -1 if it ended by a signal
  int signal = 0;      // the signal that ended it
  bool hung = false;   // alive when the time was over
  double ended_s = 0;  // seconds since the launch
  std::string output;  // stdout and stderr together
  std::map<std::string, Report> reports;

  bool ok() const { return exit_code == 0 && signal == 0 && !hung; }
};

struct LaunchOutcome {
  std::vector<RankOutcome> ranks;
  bool timed_out = false;
  double wall_s = 0;

  bool ok() const;
  // What every rank did and wrote, for a failure message.
  std::string describe() const;
};

// Runs `program` (registered with RANK_PROGRAM in `executable`) in options.ranks processes and waits for all
// of them. Each rank gets RANK, WORLD_SIZE and LOCAL_RANK; HALFWIRE_* variables of the caller's environment
// are not inherited.
LaunchOutcome launchRanks(const std::string& program, const LaunchOptions& options);

struct CommandOptions {
  bool preload = false;
  Environment env;
  double timeout_s = 60;
  std::string library;  // empty: the build's libhalfwire.so
};

struct CommandOutcome {
  int exit_code = -1;
  int signal = 0;
  bool timed_out = false;
  std::string output;  // stdout
  std::string errors;  // stderr

  bool ok() const { return exit_code == 0 && signal == 0 && !timed_out; }
  std::string describe() const;
};

// Runs one command to its end, without a shell.
CommandOutcome runCommand(const std::vector<std::string>& argv, const CommandOptions& options = {});

// The library under test: HALFWIRE_TEST_LIBRARY if set, else the build's own; empty where it is not built.
std::string libraryPath();

// LD_PRELOAD's value for `library`: a sanitizer's runtime has to come first.
std::string preloadValue(const std::string& library);

// A fresh directory that is removed with its contents when the object dies.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace halfwire::testing
