// A member without the library, with other settings or switched off is found when the communicator is made,
// named in NCCL's error text, and nobody waits for ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <vector>

#include "programs/programs.h"

namespace halfwire::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr double kMeetingSeconds = 3;

// Makes the world's communicator and says how that ended. A rank whose initialisation succeeded is not left
// waiting for peers that have given up: it sees an error.
RANK_PROGRAM(Meet) {
  const int maker = rank.args().empty() ? 0 : std::stoi(rank.args()[0]);
  const ncclUniqueId id = shareId(rank, maker);
  ncclComm_t comm = nullptr;
  Rank::note("making the communicator");
  const auto start = std::chrono::steady_clock::now();
  const ncclResult_t result = ncclCommInitRank(&comm, rank.ranks(), id, rank.rank());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  rank.report("result", std::to_string(result));
  rank.report("seconds", std::to_string(seconds));
  rank.report("error", result == ncclSuccess ? "" : ncclGetLastError(nullptr));
  if (result != ncclSuccess) {
    if (comm != nullptr) RANK_FAIL("a communicator came with an error");
    return;
  }
  Rank::note("using the communicator");
  Buffer buffer(ncclBfloat16, 1000);
  buffer.fill(rank.rank() + 1);
  const Stream stream;
  ncclResult_t async =
      ncclAllReduce(buffer.data(), buffer.data(), buffer.count(), ncclBfloat16, ncclSum, comm, stream);
  for (int i = 0; i < 200 && async == ncclSuccess && cudaStreamQuery(stream) == cudaErrorNotReady; ++i) {
    usleep(50000);
    CHECK_NCCL(ncclCommGetAsyncError(comm, &async));
  }
  rank.report("used", async != ncclSuccess                     ? "error"
                      : cudaStreamQuery(stream) == cudaSuccess ? "worked"
                                                               : "waiting");
  if (async != ncclSuccess) {
    (void)ncclCommAbort(comm);
    return;
  }
  stream.synchronize();
  CHECK_NCCL(ncclCommDestroy(comm));
}

Environment meetingEnvironment() {
  return with(compressing(),
              {{"HALFWIRE_MEETING_TIMEOUT", std::to_string(static_cast<int>(kMeetingSeconds))}});
}

class Meetings : public ::testing::Test {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  }
  static std::string report(const LaunchOutcome& outcome, int rank, const char* key) {
    const auto& reports = outcome.ranks[rank].reports;
    const auto found = reports.find(key);
    return found == reports.end() ? "(nothing reported)" : found->second.value;
  }

  // Every rank ended by itself, and each rank in `refused` was told about `named` in time.
  static void expectRefused(const LaunchOutcome& outcome, const std::vector<int>& refused, int named) {
    ASSERT_TRUE(outcome.ok()) << (outcome.timed_out ? "HANG\n" : "") << outcome.describe();
    for (const int rank : refused) {
      EXPECT_NE(report(outcome, rank, "result"), "0") << "rank " << rank << " got a communicator\n"
                                                      << outcome.describe();
      EXPECT_LT(std::stod(report(outcome, rank, "seconds")), kMeetingSeconds + 6) << "rank " << rank;
      EXPECT_THAT(report(outcome, rank, "error"), HasSubstr("rank " + std::to_string(named)))
          << "on rank " << rank;
    }
  }
};

TEST_F(Meetings, EqualRanksMeet) {
  LaunchOptions options;
  options.ranks = 3;
  options.env = meetingEnvironment();
  const LaunchOutcome outcome = launchRanks("Meet", options);
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(report(outcome, rank, "result"), "0");
    EXPECT_EQ(report(outcome, rank, "used"), "worked");
    EXPECT_LT(std::stod(report(outcome, rank, "seconds")), 2.5) << "a meeting that succeeds does not wait";
  }
}

TEST_F(Meetings, ARankWithoutTheLibraryIsNamed) {
  for (const int missing : {1, 2}) {
    LaunchOptions options;
    options.ranks = 3;
    options.env = meetingEnvironment();
    options.without_library = {missing};
    const LaunchOutcome outcome = launchRanks("Meet", options);
    expectRefused(outcome, missing == 1 ? std::vector<int>{0, 2} : std::vector<int>{0, 1}, missing);
    // The one without the library must not wait for ever for peers that have left.
    EXPECT_NE(report(outcome, missing, "used"), "waiting") << outcome.describe();
  }
}

TEST_F(Meetings, TheMakerOfTheIdWithoutTheLibraryIsNamed) {
  LaunchOptions options;
  options.ranks = 3;
  options.env = meetingEnvironment();
  options.without_library = {0};
  const LaunchOutcome outcome = launchRanks("Meet", options);
  expectRefused(outcome, {1, 2}, 0);
  EXPECT_NE(report(outcome, 0, "used"), "waiting") << outcome.describe();
}

TEST_F(Meetings, OtherSettingsAreNamed) {
  for (const Environment& own :
       {Environment{{"HALFWIRE_FORMAT", "int8"}}, Environment{{"HALFWIRE_BLOCK", "64"}},
        Environment{{"HALFWIRE_MIN_BYTES", "8MiB"}}, Environment{{"HALFWIRE_CHUNK_BYTES", "1MiB"}},
        Environment{{"HALFWIRE_OPS", "allreduce"}}}) {
    LaunchOptions options;
    options.ranks = 2;
    options.env = meetingEnvironment();
    options.rank_env[1] = own;
    const LaunchOutcome outcome = launchRanks("Meet", options);
    expectRefused(outcome, {0, 1}, 1);
  }
}

TEST_F(Meetings, ARankSwitchedOffIsNamed) {
  for (const int off : {0, 1}) {
    LaunchOptions options;
    options.ranks = 2;
    options.env = meetingEnvironment();
    options.rank_env[off] = {{"HALFWIRE_MODE", "off"}};
    const LaunchOutcome outcome = launchRanks("Meet", options);
    ASSERT_TRUE(outcome.ok()) << (outcome.timed_out ? "HANG\n" : "") << outcome.describe();
    const int on = 1 - off;
    EXPECT_NE(report(outcome, on, "result"), "0") << outcome.describe();
    EXPECT_LT(std::stod(report(outcome, on, "seconds")), kMeetingSeconds + 6);
    EXPECT_THAT(report(outcome, on, "error"), HasSubstr("off")) << outcome.describe();
    EXPECT_NE(report(outcome, off, "used"), "waiting") << outcome.describe();
  }
}

// The communicator's id may be made by another process than rank 0.
TEST_F(Meetings, AnyRankMayMakeTheId) {
  LaunchOptions options;
  options.ranks = 3;
  options.env = meetingEnvironment();
  options.args = {"2"};
  const LaunchOutcome outcome = launchRanks("Meet", options);
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(report(outcome, rank, "used"), "worked");
}

// A rank that cannot read its settings says so at once. Its peers wait inside NCCL's own initialisation, as
// they do for a rank that never starts: a launcher ends them.
TEST_F(Meetings, UnreadableSettingsAreSaid) {
  LaunchOptions options;
  options.ranks = 2;
  options.env = meetingEnvironment();
  options.rank_env[1] = {{"HALFWIRE_BLOCK", "17"}};
  options.timeout_s = 3;
  const LaunchOutcome outcome = launchRanks("Meet", options);
  EXPECT_TRUE(outcome.ranks[1].ok()) << outcome.describe();
  EXPECT_NE(report(outcome, 1, "result"), "0");
  EXPECT_THAT(report(outcome, 1, "error"), HasSubstr("HALFWIRE_BLOCK"));
}

// A member that is slow to come, but comes in time, is waited for.
RANK_PROGRAM(MeetLate) {
  const ncclUniqueId id = shareId(rank);
  if (rank.rank() == 1) usleep(4000000);
  ncclComm_t comm = nullptr;
  CHECK_NCCL(ncclCommInitRank(&comm, rank.ranks(), id, rank.rank()));
  CHECK_NCCL(ncclCommDestroy(comm));
}

// The real initialisation is a barrier: the time limit starts behind it.
TEST_F(Meetings, TimeLimitStartsAfterInitialisation) {
  const LaunchOutcome outcome = launchWith("MeetLate", 2, meetingEnvironment());
  EXPECT_TRUE(outcome.ok()) << outcome.describe();
}

// Several roots share the work of meeting: their ids are those of other processes, and one of them says where
// Halfwire's ranks meet.
RANK_PROGRAM(MeetScalable) {
  std::vector<ncclUniqueId> ids = {shareId(rank, 1), shareId(rank, 0)};
  ncclComm_t comm = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  CHECK_NCCL(ncclCommInitRankScalable(&comm, rank.ranks(), rank.rank(), static_cast<int>(ids.size()),
                                      ids.data(), &config));
  Buffer buffer(ncclBfloat16, 1000);
  for (size_t i = 0; i < buffer.count(); ++i)
    soak::store(buffer.type(), buffer.data(), i, 1 + static_cast<double>(i % 128) / 128);
  const Stream stream;
  CHECK_NCCL(allReduce(buffer, buffer, comm, stream));
  stream.synchronize();
  int rounded = 0;
  for (size_t i = 0; i < buffer.count(); ++i) {
    const double exact = rank.ranks() * (1 + static_cast<double>(i % 128) / 128);
    if (std::abs(buffer.get(i) - exact) > 0.14 * exact) RANK_FAIL("beyond the rounding of the wire");
    rounded += std::abs(buffer.get(i) - exact) > 0.01 * exact ? 1 : 0;
  }
  rank.report("rounded", std::to_string(rounded));
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST_F(Meetings, ScalableInitialisationIsFollowed) {
  const LaunchOutcome outcome = launchWith("MeetScalable", 3, meetingEnvironment());
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  for (int r = 0; r < 3; ++r) EXPECT_GT(std::stoi(report(outcome, r, "rounded")), 100);
  // Members must agree here too.
  LaunchOptions options;
  options.ranks = 3;
  options.env = meetingEnvironment();
  options.rank_env = {{2, {{"HALFWIRE_BLOCK", "64"}}}};
  EXPECT_FALSE(launchRanks("MeetScalable", options).ok());
}

}  // namespace
}  // namespace halfwire::testing
