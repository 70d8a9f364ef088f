// The reader of run logs: what the writer wrote comes back, and bytes that no writer wrote are refused.
#include "policy/run_log_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "policy/run_log.h"

namespace halfwire {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class RunLogJson : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/halfwire-log-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // A log as rank `rank` of 4 would leave it.
  void write(int rank, uint64_t calls, bool closed) {
    auto log = RunLog::create(directory_);
    ASSERT_TRUE(log.ok()) << log.status().message();
    RunLogFile& f = log.value()->file();
    f.rank = rank;
    f.world = 4;
    f.nccl_version = 22809;
    RunLog::setText(f.engine, "nccl");
    RunLog::setText(f.codec, "hardware");
    RunLog::setText(f.settings, "wire e4m3/128/fp32");
    RunLog::setText(f.nccl_path, "/usr/lib/libnccl.so.2");
    RunLog::setText(f.unknown_entry_points, "ncclFuture, ncclOther");
    RunLogCommunicator* comm = log.value()->addCommunicator();
    ASSERT_NE(comm, nullptr);
    comm->rank = static_cast<uint32_t>(rank);
    comm->ranks = 4;
    comm->reason = static_cast<uint32_t>(Reason::kCompressed);
    comm->scratch_bytes = 64u << 20;
    RunLog::setText(comm->note, "a note");
    RunLogRow* row = RunLog::row(*comm, CollectiveOp::kAllReduce, ncclBfloat16, Reason::kCompressed);
    row->calls = calls;
    row->bytes_asked = calls << 23;
    row->bytes_ring = calls * 3 << 22;
    row->bytes_sent = calls * 6489600;
    row->launches = calls * 4;
    row->host_ns = calls * 20000;
    RunLogRow* small = RunLog::row(*comm, CollectiveOp::kBroadcast, ncclFloat32, Reason::kOpNotSupported);
    small->calls = 2;
    small->bytes_asked = small->bytes_ring = small->bytes_sent = 4096;
    RunLogSize* size = RunLog::sizeRow(*comm, CollectiveOp::kAllReduce, ncclBfloat16, (8u << 20) + 5);
    size->calls = calls;
    size->bytes_asked = calls << 23;
    size->waits = 3;
    size->exposed_ns = 1500000;
    RunLogShadow* shadow =
        RunLog::shadowRow(*comm, CollectiveOp::kReduceScatter, ncclFloat32, 4096, {ElementFormat::kInt8});
    shadow->samples = 3;
    shadow->elements = 1000;
    shadow->flushed = 10;
    shadow->not_finite = 1;
    shadow->exact_squares = 400;
    shadow->other_squares = 400;
    shadow->error_squares = 4;
    shadow->product = 399;
    shadow->worst_block = 0.25;
    for (int i = 0; i < 3; ++i) {
      shadow->exact_us[i] = 100.0f + static_cast<float>(i);
      shadow->compressed_us[i] = 50.0f + static_cast<float>(i);
    }
    comm->used = 1;
    f.meter.state = static_cast<uint32_t>(MeterState::kOn);
    f.meter.source = static_cast<uint32_t>(StepSource::kRange);
    RunLog::setText(f.meter.range, "iteration");
    f.meter.every = 4;
    f.meter.warmup = 1;
    f.meter.steps = 4;
    for (uint64_t i = 0; i < 3; ++i) {
      RunLogStep& step = f.step[i];
      step.begin_ns = 1000000 * i;
      step.duration_ns = 1000000;
      step.bytes_sent = 100 + i;
      step.sampled = i == 2 ? 1 : 0;
      step.measured = i == 2 ? 1 : 0;
      step.exposed_ns = i == 2 ? 250000 : 77;
      step.number = i + 1;
    }
    f.closed = closed ? 1 : 0;
  }

  std::vector<RunLogRecord> read() {
    problems_.clear();
    return readRunLogs(directory_, &problems_);
  }

  std::string bytesOfOne() {
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      std::ifstream in(entry.path(), std::ios::binary);
      return {std::istreambuf_iterator<char>(in), {}};
    }
    return {};
  }

  static Result<RunLogRecord> parse(const std::string& bytes) {
    return parseRunLog(std::as_bytes(std::span(bytes.data(), bytes.size())));
  }

  std::string directory_;
  std::vector<std::string> problems_;
};

TEST_F(RunLogJson, WhatWasWrittenComesBack) {
  write(2, 7, true);
  const auto records = read();
  EXPECT_TRUE(problems_.empty());
  ASSERT_EQ(records.size(), 1u);
  const RunLogRecord& r = records[0];
  EXPECT_EQ(r.rank, 2);
  EXPECT_EQ(r.world, 4);
  EXPECT_EQ(r.pid, getpid());
  EXPECT_TRUE(r.closed);
  EXPECT_EQ(r.unknown_entry_points, (std::vector<std::string>{"ncclFuture", "ncclOther"}));
  ASSERT_EQ(r.communicators.size(), 1u);
  EXPECT_EQ(r.communicators[0].rank, 2u);
  ASSERT_EQ(r.communicators[0].calls.size(), 2u);
  EXPECT_EQ(r.communicators[0].calls[0].bytes_sent, 7u * 6489600);

  const auto json = nlohmann::json::parse(runLogJson(r));
  EXPECT_EQ(json["format"], "halfwire-run-log");
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(json["rank"], 2);
  EXPECT_EQ(json["ended_normally"], true);
  EXPECT_EQ(json["unknown_entry_points"].size(), 2u);
  const auto& comm = json["communicators"][0];
  EXPECT_EQ(comm["ranks"], 4);
  EXPECT_EQ(comm["compressed"], true);
  EXPECT_EQ(comm["scratch_bytes"], 64u << 20);
  const auto& call = comm["calls"][0];
  EXPECT_EQ(call["operation"], "AllReduce");
  EXPECT_EQ(call["type"], "bf16");
  EXPECT_EQ(call["calls"], 7);
  EXPECT_EQ(call["bytes_asked"], 7u << 23);
  EXPECT_EQ(call["bytes_exact_ring"], 7u * 3 << 22);
  EXPECT_EQ(call["launches"], 28);
  EXPECT_EQ(comm["calls"][1]["compressed"], false);
}

TEST_F(RunLogJson, TheMetersPartComesBack) {
  write(2, 7, true);
  const auto records = read();
  ASSERT_EQ(records.size(), 1u);
  const RunLogMeterRecord& m = records[0].meter;
  EXPECT_EQ(m.state, MeterState::kOn);
  EXPECT_EQ(m.source, StepSource::kRange);
  EXPECT_EQ(m.range, "iteration");
  ASSERT_EQ(m.steps.size(), 3u);
  EXPECT_EQ(m.steps[1].number, 1u);
  EXPECT_FALSE(m.steps[1].measured);
  EXPECT_EQ(m.steps[1].exposed_ns, 0u) << "what was not measured is not shown";
  EXPECT_EQ(m.steps[2].exposed_ns, 250000u);
  ASSERT_EQ(records[0].communicators[0].sizes.size(), 1u);
  EXPECT_EQ(records[0].communicators[0].sizes[0].size_bucket, 8u << 20);
  EXPECT_EQ(records[0].communicators[0].sizes[0].exposed_ns, 1500000u);
  const auto json = nlohmann::json::parse(runLogJson(records[0]));
  EXPECT_TRUE(json["meter"]["steps"][0]["exposed_ns"].is_null());
  EXPECT_EQ(json["meter"]["steps"][2]["exposed_ns"], 250000);
}

TEST_F(RunLogJson, TheShadowsPartComesBack) {
  write(0, 7, true);
  write(1, 7, true);
  const auto records = read();
  ASSERT_EQ(records.size(), 2u);
  ASSERT_EQ(records[0].communicators[0].shadows.size(), 1u);
  const RunLogShadowed& s = records[0].communicators[0].shadows[0];
  EXPECT_EQ(s.op, CollectiveOp::kReduceScatter);
  EXPECT_EQ(s.format, WireFormat{ElementFormat::kInt8});
  EXPECT_EQ(s.bytes, 4096u);
  EXPECT_EQ(s.exact_us, 101);
  EXPECT_EQ(s.compressed_us, 51);
  const auto again = parseRunLogJson(runLogJson(records[0]));
  ASSERT_TRUE(again.ok()) << again.status().message();
  ASSERT_EQ(again.value().communicators[0].shadows.size(), 1u);
  EXPECT_EQ(again.value().communicators[0].shadows[0].sums.product, 399);
  // Ranks' sums add: 8 of 800, a tenth of the norm, 20 dB.
  const std::string table = runLogTable(records);
  EXPECT_THAT(table, HasSubstr("In the shadow"));
  EXPECT_THAT(table, HasSubstr("0.1000    20.0"));
  EXPECT_THAT(table, HasSubstr("1.000 %"));
  EXPECT_THAT(table, HasSubstr("int8/128/fp32"));
  EXPECT_THAT(table, HasSubstr("2 elements were not finite"));
}

TEST_F(RunLogJson, ShadowSumsThatCannotBeAreLeftOut) {
  write(0, 7, true);
  std::string bytes = bytesOfOne();
  const size_t at = offsetof(RunLogFile, communicator) + offsetof(RunLogCommunicator, shadows) +
                    offsetof(RunLogShadow, error_squares);
  for (const double bad :
       {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    std::memcpy(bytes.data() + at, &bad, sizeof bad);
    const auto record = parse(bytes);
    ASSERT_TRUE(record.ok());
    EXPECT_TRUE(record.value().communicators[0].shadows.empty()) << bad;
  }
}

TEST_F(RunLogJson, TheJsonIsReadBack) {
  write(2, 7, true);
  const auto records = read();
  ASSERT_EQ(records.size(), 1u);
  const std::string text = runLogJson(records[0]);
  const auto again = parseRunLogJson(text);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(runLogJson(again.value()), text);

  // A log of an earlier version of Halfwire has no meter, or one without ranges.
  auto json = nlohmann::json::parse(text);
  json["meter"].erase("range");
  EXPECT_TRUE(parseRunLogJson(json.dump()).ok());
  json.erase("meter");
  json["communicators"][0].erase("sizes");
  EXPECT_TRUE(parseRunLogJson(json.dump()).ok());
  for (const char* field : {"format", "version", "rank", "communicators"}) {
    auto less = nlohmann::json::parse(text);
    less.erase(field);
    const auto bad = parseRunLogJson(less.dump());
    ASSERT_FALSE(bad.ok()) << field;
    EXPECT_THAT(bad.status().message(), HasSubstr(field));
  }
  json["rank"] = -2;
  EXPECT_FALSE(parseRunLogJson(json.dump()).ok());
  json["rank"] = 1.5;
  EXPECT_FALSE(parseRunLogJson(json.dump()).ok());
}

TEST_F(RunLogJson, DamagedJsonNeverCrashes) {
  write(0, 1, true);
  const std::string whole = runLogJson(read().at(0));
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    std::string text = whole;
    for (int k = 0; k < 3; ++k) text[random() % text.size()] = "0123456789-\"{}[],:etnul"[random() % 23];
    const auto record = parseRunLogJson(text);
    if (record.ok()) {
      EXPECT_TRUE(nlohmann::json::accept(runLogJson(record.value())));
    } else {
      EXPECT_FALSE(record.status().message().empty());
    }
  }
}

TEST_F(RunLogJson, TableMergesRanksAndSaysWhereTheyDiffer) {
  for (int rank = 0; rank < 4; ++rank) write(rank, rank == 3 ? 6 : 7, rank != 3);
  const auto records = read();
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(records[3].rank, 3);
  const std::string table = runLogTable(records);
  EXPECT_THAT(table, HasSubstr("4 processes, NCCL 2.28.9, codec hardware"));
  EXPECT_THAT(table, HasSubstr("Communicator 1 of 4 ranks: compresses; scratch 64 MiB a rank"));
  EXPECT_THAT(table, HasSubstr("6..7"));
  EXPECT_THAT(table, HasSubstr("0.516"));
  EXPECT_THAT(table, HasSubstr("compressed, 4.0 launches and 20 us of host time a call"));
  EXPECT_THAT(table, HasSubstr("exact: this operation is always exact"));
  EXPECT_THAT(table, HasSubstr("ended without closing the log (killed, or left by _exit): rank 3;"));
  EXPECT_THAT(table, HasSubstr("ncclFuture, ncclOther"));
}

TEST_F(RunLogJson, GroupsOfAMeshAreCounted) {
  // Four ranks, each in a pair of its own: two communicators of two ranks.
  std::vector<RunLogRecord> records(4);
  for (int rank = 0; rank < 4; ++rank) {
    records[rank].rank = rank;
    records[rank].communicators_made = 2;
    records[rank].communicators.resize(2);
    records[rank].communicators[0] = {0, static_cast<uint32_t>(rank), 4, Reason::kModeOff, 0, 0, "", 0, {}};
    records[rank].communicators[1] = {1, static_cast<uint32_t>(rank % 2), 2, Reason::kModeOff, 0, 0, "", 0,
                                      {}};
  }
  const std::string table = runLogTable(records);
  EXPECT_THAT(table, HasSubstr("Communicator 1 of 4 ranks"));
  EXPECT_THAT(table, HasSubstr("2 communicators of 2 ranks"));
}

TEST_F(RunLogJson, OneProcessThatDrivesSeveralRanksHasOneCommunicator) {
  std::vector<RunLogRecord> records(1);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    records[0].communicators.push_back({rank, rank, 4, Reason::kModeOff, 0, 0, "", 0, {}});
  }
  EXPECT_THAT(runLogTable(records), HasSubstr("Communicator 1 of 4 ranks"));
  EXPECT_THAT(runLogTable(records), Not(HasSubstr("Communicator 2")));
}

TEST_F(RunLogJson, CutFilesAreRefused) {
  write(0, 1, true);
  const std::string whole = bytesOfOne();
  ASSERT_EQ(whole.size(), sizeof(RunLogFile));
  for (const size_t n :
       {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{15}, size_t{16}, size_t{200}, whole.size() - 1}) {
    EXPECT_FALSE(parse(whole.substr(0, n)).ok()) << n;
  }
  EXPECT_FALSE(parse(whole + "x").ok());
  EXPECT_TRUE(parse(whole).ok());
}

TEST_F(RunLogJson, ForeignFieldsAreRefused) {
  write(0, 1, true);
  const std::string whole = bytesOfOne();
  const auto with = [&](size_t offset, auto value) {
    std::string bytes = whole;
    std::memcpy(bytes.data() + offset, &value, sizeof value);
    return parse(bytes);
  };
  EXPECT_FALSE(with(0, 'X').ok());
  const auto version = with(offsetof(RunLogFile, version), uint32_t{1});
  ASSERT_FALSE(version.ok());
  EXPECT_THAT(version.status().message(), HasSubstr("version 1"));
  EXPECT_FALSE(with(offsetof(RunLogFile, bytes), uint32_t{17}).ok());
  EXPECT_FALSE(with(offsetof(RunLogFile, rank), int32_t{-2}).ok());
  EXPECT_FALSE(with(offsetof(RunLogFile, world), int32_t{-1}).ok());
  const size_t comm = offsetof(RunLogFile, communicator);
  EXPECT_FALSE(with(comm + offsetof(RunLogCommunicator, rank), uint32_t{4}).ok());
  EXPECT_FALSE(with(comm + offsetof(RunLogCommunicator, ranks), uint32_t{0}).ok());
  EXPECT_FALSE(with(comm + offsetof(RunLogCommunicator, ranks), uint32_t{0xffffffff}).ok());
  EXPECT_FALSE(with(comm + offsetof(RunLogCommunicator, reason), uint32_t{1000}).ok());
  EXPECT_FALSE(with(comm + offsetof(RunLogCommunicator, rows), uint32_t{0xffffffff}).ok());
  EXPECT_FALSE(with(comm + offsetof(RunLogCommunicator, rows), uint32_t{0x100}).ok());  // operation 255
  EXPECT_FALSE(with(offsetof(RunLogFile, meter) + offsetof(RunLogMeter, state), uint32_t{9}).ok());
  EXPECT_FALSE(with(offsetof(RunLogFile, meter) + offsetof(RunLogMeter, source), uint32_t{9}).ok());

  // More communicators than slots is legal and said; a slot that was never filled is skipped.
  const auto many = with(offsetof(RunLogFile, communicators), uint32_t{0xffffffff});
  ASSERT_TRUE(many.ok());
  EXPECT_EQ(many.value().communicators.size(), 1u);
  EXPECT_THAT(runLogTable({many.value()}), HasSubstr("found no room"));
}

TEST_F(RunLogJson, TextsCannotDriveATerminal) {
  write(0, 1, true);
  std::string bytes = bytesOfOne();
  std::memset(bytes.data() + offsetof(RunLogFile, host), 'a', 64);  // no zero anywhere
  const char hostile[] = "\x1b[2J\xff\xfe\xc2\x9b gr\xc3\xbc\xc3\x9f\n\xed\xa0\x80";
  std::memcpy(bytes.data() + offsetof(RunLogFile, error), hostile, sizeof hostile);
  const auto record = parse(bytes);
  ASSERT_TRUE(record.ok());
  EXPECT_EQ(record.value().host, std::string(64, 'a'));
  EXPECT_EQ(record.value().error, "?[2J???? gr\xc3\xbc\xc3\x9f????");
  EXPECT_TRUE(nlohmann::json::accept(runLogJson(record.value())));
}

TEST_F(RunLogJson, RandomDamageNeverCrashes) {
  write(0, 1, true);
  const std::string whole = bytesOfOne();
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::string bytes = whole;
    for (int k = 0; k < 8; ++k) {
      // Half of the damage in the header and the first communicator, where it is read.
      const size_t span = k % 2 == 0 ? offsetof(RunLogFile, communicator) + 4096 : bytes.size();
      bytes[8 + random() % (span - 8)] = static_cast<char>(random());
    }
    const auto record = parse(bytes);
    if (record.ok()) {
      EXPECT_TRUE(nlohmann::json::accept(runLogJson(record.value())));
      (void)runLogTable({record.value()});
    } else {
      EXPECT_FALSE(record.status().message().empty());
    }
  }
}

TEST_F(RunLogJson, OddFilesInTheFolderAreNamed) {
  write(1, 1, true);
  std::ofstream(directory_ + "/short.bin") << "HWRUNLOG";
  ASSERT_EQ(symlink("/dev/zero", (directory_ + "/link.bin").c_str()), 0);
  ASSERT_EQ(mkfifo((directory_ + "/pipe.bin").c_str(), 0600), 0);
  std::filesystem::create_directory(directory_ + "/dir.bin");
  std::ofstream(directory_ + "/other.txt") << "not a log";
  EXPECT_EQ(read().size(), 1u);
  EXPECT_EQ(problems_.size(), 4u);
  for (const std::string& problem : problems_) EXPECT_THAT(problem, HasSubstr(directory_));
}

TEST_F(RunLogJson, MissingFolderIsAProblem) {
  std::vector<std::string> problems;
  EXPECT_TRUE(readRunLogs("/nonexistent/halfwire", &problems).empty());
  EXPECT_EQ(problems.size(), 1u);
}

}  // namespace
}  // namespace halfwire
