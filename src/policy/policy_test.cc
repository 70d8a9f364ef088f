#include "policy/policy.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "policy/run_log.h"

namespace halfwire {
namespace {

Result<Settings> read(const std::map<std::string, std::string>& variables) {
  return readSettings([&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

TEST(Settings, DefaultsAreOff) {
  const auto s = read({});
  ASSERT_TRUE(s.ok());
  EXPECT_EQ(s.value().mode, Mode::kOff);
  EXPECT_FALSE(s.value().min_bytes.has_value());
  EXPECT_EQ(linkDefaults(s.value(), false).floor_bytes, 4u << 20);
  EXPECT_EQ(linkDefaults(s.value(), true).floor_bytes, 64u << 20);
  EXPECT_EQ(linkDefaults(s.value(), true).chunk_bytes, 256u << 20);
  EXPECT_EQ(s.value().format, WireFormat{});
}

TEST(Settings, RefusesEveryUnknownValueAndNamesTheVariable) {
  for (const auto& [name, value] : std::map<std::string, std::string>{{"HALFWIRE_MODE", "on"},
                                                                      {"HALFWIRE_FORMAT", "fp8"},
                                                                      {"HALFWIRE_BLOCK", "100"},
                                                                      {"HALFWIRE_SCALE", "fp16"},
                                                                      {"HALFWIRE_OPS", "allreduce,send"},
                                                                      {"HALFWIRE_COMMS", "size:1"},
                                                                      {"HALFWIRE_MIN_BYTES", "-4"},
                                                                      {"HALFWIRE_CHUNK_BYTES", "1"},
                                                                      {"HALFWIRE_OVERLAP", "yes"},
                                                                      {"HALFWIRE_SEED", "-1"},
                                                                      {"HALFWIRE_ROUNDING", "up"},
                                                                      {"HALFWIRE_SHADOW_EVERY", "0"},
                                                                      {"HALFWIRE_SHADOW_BYTES", "1"},
                                                                      {"HALFWIRE_SHADOW_FORMATS", "e4m3,"},
                                                                      {"HALFWIRE_MEETING_TIMEOUT", "0"},
                                                                      {"HALFWIRE_ADDRESS", "0.0.0.0"}}) {
    const auto s = read({{name, value}});
    ASSERT_FALSE(s.ok()) << name;
    EXPECT_NE(s.status().message().find(name), std::string::npos) << s.status().message();
  }
}

TEST(Settings, DigestFollowsWhatRanksMustShare) {
  const Settings base = read({{"HALFWIRE_MODE", "wire"}, {"WORLD_SIZE", "4"}}).value();
  for (const auto& [name, value] :
       std::map<std::string, std::string>{{"HALFWIRE_MODE", "off"},
                                          {"HALFWIRE_FORMAT", "int8"},
                                          {"HALFWIRE_BLOCK", "64"},
                                          {"HALFWIRE_SCALE", "e8m0"},
                                          {"HALFWIRE_OPS", "allreduce"},
                                          {"HALFWIRE_COMMS", "size:4"},
                                          {"HALFWIRE_MIN_BYTES", "0"},
                                          {"HALFWIRE_CHUNK_BYTES", "1MiB"},
                                          {"HALFWIRE_OVERLAP", "on"},
                                          {"HALFWIRE_SEED", "2"},
                                          {"HALFWIRE_ROUNDING", "stochastic"},
                                          {"HALFWIRE_SHADOW_EVERY", "2"},
                                          {"HALFWIRE_SHADOW_BYTES", "1MiB"},
                                          {"HALFWIRE_SHADOW_FORMATS", "int8,e4m3"},
                                          {"WORLD_SIZE", "8"}}) {
    std::map<std::string, std::string> variables{{"HALFWIRE_MODE", "wire"}, {"WORLD_SIZE", "4"}};
    variables[name] = value;
    EXPECT_NE(settingsDigest(read(variables).value()), settingsDigest(base)) << name;
  }
  const Settings elsewhere = read({{"HALFWIRE_MODE", "wire"},
                                   {"WORLD_SIZE", "4"},
                                   {"HALFWIRE_LOG_DIR", "/x"},
                                   {"HALFWIRE_ADDRESS", "127.0.0.2"}})
                                 .value();
  EXPECT_EQ(settingsDigest(elsewhere), settingsDigest(base));
}

Agreement agreement(uint32_t ranks, std::map<std::string, std::string> variables = {}) {
  variables["HALFWIRE_MODE"] = "wire";
  variables["WORLD_SIZE"] = std::to_string(ranks);
  Agreement a;
  a.settings = read(variables).value();
  a.ranks = ranks;
  a.comm = decideCommunicator(a.settings, ranks);
  a.floor_bytes = linkDefaults(a.settings, false).floor_bytes;
  return a;
}

TEST(Policy, CommunicatorsByScope) {
  EXPECT_EQ(decideCommunicator(read({}).value(), 4), Reason::kModeOff);
  EXPECT_EQ(decideCommunicator(read({{"HALFWIRE_MODE", "wire"}}).value(), 4), Reason::kJobSizeUnknown);
  EXPECT_EQ(decideCommunicator(read({{"HALFWIRE_MODE", "wire"}, {"WORLD_SIZE", "8"}}).value(), 4),
            Reason::kCommNotSelected);
  EXPECT_EQ(decideCommunicator(read({{"HALFWIRE_MODE", "wire"}, {"WORLD_SIZE", "8"}}).value(), 8),
            Reason::kCompressed);
  EXPECT_EQ(decideCommunicator(read({{"HALFWIRE_MODE", "wire"}, {"HALFWIRE_COMMS", "all"}}).value(), 2),
            Reason::kCompressed);
  EXPECT_EQ(decideCommunicator(read({{"HALFWIRE_MODE", "wire"}, {"HALFWIRE_COMMS", "all"}}).value(), 1),
            Reason::kOneRank);
  EXPECT_EQ(decideCommunicator(read({{"HALFWIRE_MODE", "wire"}, {"HALFWIRE_COMMS", "all"}}).value(), 33),
            Reason::kTooManyRanks);
  EXPECT_EQ(decideCommunicator(read({{"HALFWIRE_MODE", "wire"}, {"HALFWIRE_COMMS", "size:2"}}).value(), 4),
            Reason::kCommNotSelected);
}

TEST(Policy, CallsByShape) {
  const Agreement a = agreement(4);
  const uint64_t big = 4u << 20;
  const auto decide = [&](CollectiveOp op, ncclDataType_t type, RedOpKind redop, uint64_t count,
                          bool capturing = false) {
    return decideCall(a, {op, type, redop, count, capturing});
  };
  using Op = CollectiveOp;
  EXPECT_EQ(decide(Op::kAllReduce, ncclBfloat16, RedOpKind::kSum, big), Reason::kCompressed);
  EXPECT_EQ(decide(Op::kAllReduce, ncclBfloat16, RedOpKind::kSum, (2u << 20)), Reason::kCompressed);
  EXPECT_EQ(decide(Op::kAllReduce, ncclBfloat16, RedOpKind::kSum, (2u << 20) - 1), Reason::kBelowFloor);
  EXPECT_EQ(decide(Op::kReduceScatter, ncclFloat32, RedOpKind::kAvg, 1u << 18), Reason::kCompressed);
  EXPECT_EQ(decide(Op::kAllReduce, ncclFloat16, RedOpKind::kPreMulSum, big), Reason::kCompressed);
  EXPECT_EQ(decide(Op::kAllReduce, ncclBfloat16, RedOpKind::kOther, big), Reason::kRedOpNotSupported);
  EXPECT_EQ(decide(Op::kAllReduce, ncclFloat64, RedOpKind::kSum, big), Reason::kTypeNotSupported);
  EXPECT_EQ(decide(Op::kAllReduce, ncclInt32, RedOpKind::kSum, big), Reason::kTypeNotSupported);
  EXPECT_EQ(decide(Op::kAllReduce, ncclBfloat16, RedOpKind::kSum, 0), Reason::kEmpty);
  EXPECT_EQ(decide(Op::kAllReduce, ncclBfloat16, RedOpKind::kSum, big, true), Reason::kCompressed);
  EXPECT_EQ(decide(Op::kAllGather, ncclBfloat16, RedOpKind::kNone, big), Reason::kOpNotAsked);
  EXPECT_EQ(decide(Op::kSend, ncclBfloat16, RedOpKind::kNone, big), Reason::kOpNotAsked);

  const Agreement gather = agreement(4, {{"HALFWIRE_OPS", "allgather"}});
  EXPECT_EQ(decideCall(gather, {Op::kAllGather, ncclBfloat16, RedOpKind::kNone, big}), Reason::kCompressed);
  EXPECT_EQ(decideCall(gather, {Op::kAllGather, ncclFloat32, RedOpKind::kNone, big}), Reason::kFp32Moved);
  EXPECT_EQ(decideCall(gather, {Op::kAllReduce, ncclBfloat16, RedOpKind::kSum, big}), Reason::kOpNotAsked);
  const Agreement fp32 = agreement(4, {{"HALFWIRE_OPS", "allgather-fp32"}});
  EXPECT_EQ(decideCall(fp32, {Op::kAllGather, ncclFloat32, RedOpKind::kNone, big}), Reason::kCompressed);
}

TEST(Policy, WhatMovesDataIsAskedForByNameAndItsFp32ByAnother) {
  using Op = CollectiveOp;
  const std::pair<Op, std::string> moves[] = {{Op::kAllGather, "allgather"}, {Op::kBroadcast, "broadcast"},
                                              {Op::kAlltoAll, "alltoall"},   {Op::kGather, "gather"},
                                              {Op::kScatter, "scatter"},     {Op::kSend, "sendrecv"}};
  const uint64_t big = 4u << 20;
  for (const auto& [op, name] : moves) {
    EXPECT_EQ(decideCall(agreement(4), {op, ncclBfloat16, RedOpKind::kNone, big}), Reason::kOpNotAsked)
        << name;
    const Agreement half = agreement(4, {{"HALFWIRE_OPS", name}});
    const Agreement full = agreement(4, {{"HALFWIRE_OPS", name + "-fp32"}});
    EXPECT_EQ(decideCall(half, {op, ncclFloat16, RedOpKind::kNone, big}), Reason::kCompressed) << name;
    EXPECT_EQ(decideCall(half, {op, ncclFloat32, RedOpKind::kNone, big}), Reason::kFp32Moved) << name;
    EXPECT_EQ(decideCall(full, {op, ncclFloat16, RedOpKind::kNone, big}), Reason::kCompressed) << name;
    EXPECT_EQ(decideCall(full, {op, ncclFloat32, RedOpKind::kNone, big}), Reason::kCompressed) << name;
    for (const auto& [other, other_name] : moves) {
      if (other == op) continue;
      EXPECT_EQ(decideCall(full, {other, ncclFloat16, RedOpKind::kNone, big}), Reason::kOpNotAsked)
          << name << ' ' << other_name;
    }
    for (const ncclDataType_t type : {ncclInt8, ncclInt32, ncclInt64, ncclFloat64})
      EXPECT_EQ(decideCall(full, {op, type, RedOpKind::kNone, big}), Reason::kTypeNotSupported) << name;
  }
  const Agreement reduce = agreement(4, {{"HALFWIRE_OPS", "reduce"}});
  EXPECT_EQ(decideCall(reduce, {Op::kReduce, ncclFloat32, RedOpKind::kSum, big}), Reason::kCompressed);
  EXPECT_EQ(decideCall(reduce, {Op::kReduce, ncclFloat32, RedOpKind::kOther, big}),
            Reason::kRedOpNotSupported);
  EXPECT_EQ(decideCall(reduce, {Op::kAllReduce, ncclFloat32, RedOpKind::kSum, big}), Reason::kOpNotAsked);
}

// Noise and shadow choose as the wire does, but for what would not outlive a group.
TEST(Policy, ModesThatStayExactChooseAsTheWireDoes) {
  const uint64_t big = 4u << 20;
  for (const char* mode : {"noise", "shadow"}) {
    Agreement a;
    a.settings =
        read({{"HALFWIRE_MODE", mode}, {"WORLD_SIZE", "4"}, {"HALFWIRE_OPS", "allreduce,allgather"}}).value();
    a.ranks = 4;
    a.comm = decideCommunicator(a.settings, 4);
    EXPECT_EQ(a.comm, Reason::kCompressed) << mode;
    using Op = CollectiveOp;
    EXPECT_EQ(decideCall(a, {Op::kAllReduce, ncclBfloat16, RedOpKind::kAvg, big}), Reason::kCompressed);
    EXPECT_EQ(decideCall(a, {Op::kAllReduce, ncclBfloat16, RedOpKind::kPreMulSum, big}),
              Reason::kRedOpNotSupported);
    EXPECT_EQ(decideCall(a, {Op::kAllReduce, ncclBfloat16, RedOpKind::kSum, 100}), Reason::kBelowFloor);
    EXPECT_EQ(decideCall(a, {Op::kAllReduce, ncclBfloat16, RedOpKind::kSum, big, true}), Reason::kCapturing);
    EXPECT_EQ(decideCall(a, {Op::kAllGather, ncclBfloat16, RedOpKind::kNone, big}),
              std::string(mode) == "noise" ? Reason::kOpNotSupported : Reason::kCompressed);
  }
}

TEST(Policy, RingBytes) {
  EXPECT_EQ(ringBytes(CollectiveOp::kAllReduce, ncclBfloat16, 1000, 4), 3000u);
  EXPECT_EQ(ringBytes(CollectiveOp::kReduceScatter, ncclBfloat16, 1000, 4), 6000u);
  EXPECT_EQ(ringBytes(CollectiveOp::kAllReduce, ncclBfloat16, 1000, 1), 0u);
}

TEST(Policy, EveryReasonAndOperationHasWords) {
  for (int i = 0; i < static_cast<int>(Reason::kCount); ++i)
    EXPECT_STRNE(reasonText(static_cast<Reason>(i)), "unknown");
  for (int i = 0; i < static_cast<int>(CollectiveOp::kCount); ++i)
    EXPECT_STRNE(opName(static_cast<CollectiveOp>(i)), "unknown");
  for (int i = 0; i < ncclNumTypes; ++i)
    EXPECT_STRNE(dataTypeName(static_cast<ncclDataType_t>(i)), "unknown");
}

TEST(RunLog, SurvivesAKilledProcess) {
  char directory[] = "/tmp/halfwire-run-log-XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  const pid_t child = fork();
  if (child == 0) {
    auto log = RunLog::create(directory);
    if (!log.ok()) _exit(1);
    RunLogCommunicator* comm = log.value()->addCommunicator();
    RunLog::row(*comm, CollectiveOp::kAllReduce, ncclBfloat16, Reason::kCompressed)->calls.fetch_add(3);
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    ++files;
    std::ifstream in(entry.path(), std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), {});
    ASSERT_EQ(bytes.size(), sizeof(RunLogFile));
    const auto* f = reinterpret_cast<const RunLogFile*>(bytes.data());
    EXPECT_EQ(std::string(f->magic, 8), std::string(kRunLogMagic, 8));
    EXPECT_EQ(f->pid, child);
    EXPECT_EQ(f->communicators.load(), 1u);
    EXPECT_EQ(f->communicator[0].rows[0].calls.load(), 3u);
    EXPECT_EQ(f->closed.load(), 0u);
  }
  EXPECT_EQ(files, 1);
  std::filesystem::remove_all(directory);
}

TEST(RunLog, SaysWhatToDoWhenTheFolderIsMissing) {
  const auto log = RunLog::create("/nonexistent/folder");
  ASSERT_FALSE(log.ok());
  EXPECT_NE(log.status().message().find("HALFWIRE_LOG_DIR"), std::string::npos);
}

TEST(RunLog, RowsAreFoundAgainAndRunOut) {
  auto log = RunLog::create("");
  ASSERT_TRUE(log.ok());
  RunLogCommunicator* comm = log.value()->addCommunicator();
  RunLogRow* first = RunLog::row(*comm, CollectiveOp::kSend, ncclInt8, Reason::kModeOff);
  EXPECT_EQ(RunLog::row(*comm, CollectiveOp::kSend, ncclInt8, Reason::kModeOff), first);
  EXPECT_NE(RunLog::row(*comm, CollectiveOp::kRecv, ncclInt8, Reason::kModeOff), first);
  int made = 0;
  for (int op = 0; op < 10; ++op) {
    for (int type = 0; type < ncclNumTypes; ++type) {
      made += RunLog::row(*comm, static_cast<CollectiveOp>(op), static_cast<ncclDataType_t>(type),
                          Reason::kEmpty) != nullptr;
    }
  }
  EXPECT_EQ(made, static_cast<int>(kRunLogRows) - 2);
}

}  // namespace
}  // namespace halfwire
