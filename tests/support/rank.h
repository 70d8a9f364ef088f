// What a rank of a test program sees: its number, its arguments and a channel to the other ranks and to the
// parent that has nothing to do with NCCL. launch.h is the parent's side.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace halfwire::testing {

class Rank {
 public:
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  const std::vector<std::string>& args() const { return args_; }

  // Everyone's bytes in rank order; empty for a rank that has ended. Blocks until all living ranks have
  // called it.
  std::vector<std::string> allGather(const std::string& bytes);
  std::string broadcast(const std::string& bytes, int root) { return allGather(bytes)[root]; }
  void barrier() { allGather(""); }

  // A value for the parent's RankOutcome::reports.
  void report(const std::string& key, const std::string& value);

  // Says where this rank is, in the words of the test; shown if it hangs. Cheap. `text` must outlive the
  // rank.
  static void note(const char* text, long number = -1);
  // The same for what the streams are doing.
  static void noteWork(const char* text, long number = -1);

  // Ends the process with exit code 1 after printing `message`.
  [[noreturn]] static void fail(const char* file, int line, const std::string& message);

 private:
  friend std::optional<int> runAsRank(int argc, char** argv);
  int rank_ = 0;
  int ranks_ = 1;
  int fd_ = -1;
  std::vector<std::string> args_;
};

using RankProgram = void (*)(Rank&);

struct RankProgramRegistration {
  RankProgramRegistration(const char* name, RankProgram program);
};

// In a process started by launchRanks: runs the program and returns its exit code. Elsewhere: nothing.
std::optional<int> runAsRank(int argc, char** argv);

}  // namespace halfwire::testing

// Defines a program that launchRanks("name", ...) starts; returning means success.
#define RANK_PROGRAM(name)                                                                             \
  static void rankProgram##name(::halfwire::testing::Rank& rank);                                      \
  static const ::halfwire::testing::RankProgramRegistration kRegister##name(#name, rankProgram##name); \
  static void rankProgram##name([[maybe_unused]] ::halfwire::testing::Rank& rank)

#define RANK_FAIL(message) ::halfwire::testing::Rank::fail(__FILE__, __LINE__, message)
#define RANK_CHECK(condition)                \
  do {                                       \
    if (!(condition)) RANK_FAIL(#condition); \
  } while (0)
