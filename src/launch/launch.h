// Starts the processes of a job and stays until they are gone: signals go on to them, and when a rank dies
// the others are not left behind.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/status.h"

namespace halfwire {

struct LaunchOptions {
  std::vector<std::string> command;
  // One process for each entry: the whole environment as NAME=value.
  std::vector<std::vector<std::string>> environments;
  // Ranks of a job: each in its own process group, with an empty standard input. Otherwise the one process
  // behaves as if its caller had started it: same process group, same input.
  bool ranks = false;
  // A survivor of a dead rank gets SIGTERM, and SIGKILL this much later.
  std::chrono::milliseconds grace{10000};
  // Survivors that were asked to end by a signal passed on may be saving their state: this long they are left
  // alone.
  std::chrono::milliseconds grace_after_signal{30000};
};

struct LaunchOutcome {
  int exit_code = 0;     // of the first process that failed: its exit code, or 128 + its signal
  int failed_rank = -1;  // which one that was, -1 for none
  int signal = 0;        // the signal that ended it, 0 for none
  int terminated = 0;    // survivors that were told to stop
  int killed = 0;        // of these, how many had to be killed
};

// Runs the job to its end. Blocks. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT and
// SIGWINCH that reach this process are passed on. If this process dies, so do its direct children.
// Descendants that outlive their parents become children of this process; they are stopped if a rank failed,
// and left alone if the job ended well. An error means that nothing ran: the program cannot be started.
//
// Owns every child of this process while it runs: call it from the main thread, with no other thread that
// forks.
Result<LaunchOutcome> launch(const LaunchOptions& options);

// The environment that torchrun would give rank `rank` of `ranks` on this machine, on top of `base`.
std::vector<std::string> rankEnvironment(const std::vector<std::string>& base, int rank, int ranks,
                                         int master_port);

// A TCP port on the loopback interface that was free a moment ago.
Result<int> freePort();

// NAME=value entries: replaces or adds one, removes one, and finds a value (null if absent).
void setVariable(std::vector<std::string>* environment, const std::string& name, const std::string& value);
void unsetVariable(std::vector<std::string>* environment, const std::string& name);
const char* findVariable(const std::vector<std::string>& environment, const std::string& name);

// This process's environment.
std::vector<std::string> currentEnvironment();

}  // namespace halfwire
