// The library in front of a real NCCL on a machine without a GPU: what works there (version, id, groups,
// argument checks, refusals) gives the same answers with and without it.
#include <gtest/gtest.h>

#include <cstring>
#include <sstream>
#include <string>

#include "abi/nccl.h"
#include "support/launch.h"
#include "support/rank.h"

namespace halfwire::testing {
namespace {

#ifdef HALFWIRE_HAVE_REAL_NCCL

RANK_PROGRAM(Answers) {
  std::ostringstream out;
  int number = 0;
  out << "version " << ncclGetVersion(&number) << " " << number << "\n";
  out << "version null " << ncclGetVersion(nullptr) << "\n";
  out << "string " << ncclGetErrorString(ncclInvalidArgument) << "\n";

  ncclUniqueId id, second;
  memset(&id, 0x5a, sizeof id);
  out << "id " << ncclGetUniqueId(&id) << " " << ncclGetUniqueId(&second) << "\n";
  out << "id null " << ncclGetUniqueId(nullptr) << "\n";
  out << "ids differ " << (memcmp(&id, &second, sizeof id) != 0) << "\n";

  ncclRedOp_t op;
  float a[4] = {1, 2, 3, 4}, b[4] = {};
  out << "all reduce without comm " << ncclAllReduce(a, b, 4, ncclFloat32, ncclSum, nullptr, nullptr) << "\n";
  out << "bcast without comm " << ncclBcast(a, 4, ncclFloat32, 0, nullptr, nullptr) << "\n";
  out << "broadcast without comm " << ncclBroadcast(a, b, 4, ncclFloat32, 0, nullptr, nullptr) << "\n";
  out << "send without comm " << ncclSend(a, 4, ncclFloat32, 0, nullptr, nullptr) << "\n";
  out << "premul without comm "
      << ncclRedOpCreatePreMulSum(&op, a, ncclFloat32, ncclScalarHostImmediate, nullptr) << "\n";
  out << "count without comm " << ncclCommCount(nullptr, &number) << "\n";
  out << "group end alone " << ncclGroupEnd() << "\n";
  out << "group " << ncclGroupStart() << ncclGroupStart() << ncclGroupEnd() << ncclGroupEnd() << "\n";
  out << "group end alone " << ncclGroupEnd() << "\n";
  out << "in group " << ncclGroupStart() << ncclAllReduce(a, b, 4, ncclFloat32, ncclSum, nullptr, nullptr)
      << ncclGroupEnd() << "\n";
  out << "group end alone " << ncclGroupEnd() << "\n";

  ncclComm_t comm = nullptr;
  Rank::note("init without a GPU");
  const ncclResult_t init = ncclCommInitRank(&comm, 1, id, 0);
  out << "init " << init << " comm " << (comm != nullptr) << "\n";
  out << "init bad rank " << ncclCommInitRank(&comm, 2, id, 5) << "\n";
  out << "init bad ranks " << ncclCommInitRank(&comm, 0, id, 0) << "\n";
  ncclComm_t both[2] = {};
  out << "init all " << ncclCommInitAll(both, 2, nullptr) << "\n";
  out << "in group init " << ncclGroupStart() << " " << ncclCommInitRank(&comm, 1, second, 0);
  out << " " << ncclGroupEnd() << "\n";
  out << "group end alone " << ncclGroupEnd() << "\n";
  out << "destroy null " << ncclCommDestroy(nullptr) << "\n";
  out << "last error is text " << (ncclGetLastError(nullptr) != nullptr) << "\n";
  rank.report("answers", out.str());
  rank.report("id", std::string(id.internal, sizeof id.internal));
}

LaunchOutcome ask(bool preload, const Environment& env) {
  LaunchOptions options;
  options.ranks = 1;
  options.preload = preload;
  options.env = env;
  options.timeout_s = 90;
  options.env["NCCL_SOCKET_IFNAME"] = "lo";
  options.env["ASAN_OPTIONS"] = "detect_leaks=0";  // what NCCL leaves behind after a refusal is not ours
  return launchRanks("Answers", options);
}

TEST(RealNccl, AnswersAreTheSameWithTheLibrary) {
  if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  const LaunchOutcome bare = ask(false, {});
  ASSERT_TRUE(bare.ok()) << bare.describe();
  const std::string expected = bare.ranks[0].reports.at("answers").value;
  if (expected.find("\ninit 0") != std::string::npos)
    GTEST_SKIP() << "this machine has a GPU: the answers differ from call to call";
  EXPECT_NE(expected.find("all reduce without comm 4"), std::string::npos) << expected;
  EXPECT_NE(expected.find("group end alone 5"), std::string::npos) << expected;
  for (const char* mode : {"off", "wire"}) {
    const LaunchOutcome with =
        ask(true, {{"HALFWIRE_MODE", mode}, {"HALFWIRE_MIN_BYTES", "0"}, {"HALFWIRE_COMMS", "all"}});
    ASSERT_TRUE(with.ok()) << with.describe();
    EXPECT_EQ(with.ranks[0].reports.at("answers").value, expected) << mode;
  }
}

// NCCL leaves most of the id's 128 bytes zero; the library's mark for the meeting goes there and nowhere
// else.
TEST(RealNccl, UniqueIdCarriesTheMark) {
  if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  constexpr size_t kNcclBytes = 40;
  const LaunchOutcome bare = ask(false, {});
  ASSERT_TRUE(bare.ok()) << bare.describe();
  const std::string plain = bare.ranks[0].reports.at("id").value;
  ASSERT_EQ(plain.size(), 128u);
  EXPECT_EQ(plain.substr(kNcclBytes), std::string(128 - kNcclBytes, '\0'))
      << "this NCCL uses more of the id than we know";
  const LaunchOutcome with = ask(true, {{"HALFWIRE_MODE", "wire"}});
  ASSERT_TRUE(with.ok()) << with.describe();
  const std::string marked = with.ranks[0].reports.at("id").value;
  EXPECT_NE(marked.substr(kNcclBytes), std::string(128 - kNcclBytes, '\0')) << "no mark";
  EXPECT_NE(marked.substr(0, kNcclBytes), std::string(kNcclBytes, '\0')) << "NCCL's own part is there";
}

#else

TEST(RealNccl, IsInstalled) {
  GTEST_SKIP() << "no libnccl.so.2 on this machine: install the CUDA toolkit with NCCL to run these";
}

#endif

}  // namespace
}  // namespace halfwire::testing
