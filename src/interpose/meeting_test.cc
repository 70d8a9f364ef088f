#include "interpose/meeting.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace halfwire {
namespace {

using namespace std::chrono_literals;

MemberRecord record(const Mark& mark, uint32_t rank, uint32_t ranks) {
  MemberRecord r;
  r.token = mark.token;
  r.rank = rank;
  r.ranks = ranks;
  r.digest = 42;
  r.mode = Mode::kWire;
  r.ready = true;
  r.words = "wire e4m3";
  return r;
}

std::vector<Verdict> meet(const Mark& mark, const std::vector<MemberRecord>& records) {
  std::vector<Meeting> meetings(records.size());
  std::vector<Verdict> verdicts;
  for (size_t i = 0; i < records.size(); ++i) EXPECT_TRUE(meetings[i].send(mark, records[i], 5).ok());
  for (Meeting& m : meetings) verdicts.push_back(m.receive(10));
  return verdicts;
}

struct MeetingTest : testing::Test {
  void SetUp() override {
    auto opened = MeetingPoint::open("127.0.0.1", 1);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    point = std::move(opened).value();
    mark = point->invite(Mode::kWire, 42);
  }
  std::unique_ptr<MeetingPoint> point;
  Mark mark;
};

TEST(Mark, TravelsInTheTailAndIsRefusedWhereNcclWrites) {
  ncclUniqueId id{};
  std::memset(id.internal, 7, 40);
  EXPECT_FALSE(readMark(id).has_value());
  Mark mark;
  mark.mode = Mode::kWire;
  mark.address = htonl(INADDR_LOOPBACK);
  mark.port = htons(1234);
  mark.digest = 99;
  mark.token[3] = 5;
  ASSERT_TRUE(writeMark(mark, &id).ok());
  const auto read = readMark(id);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->port, mark.port);
  EXPECT_EQ(read->digest, 99u);
  EXPECT_EQ(read->token, mark.token);
  EXPECT_EQ(read->mode, Mode::kWire);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(id.internal[i], 7);
  EXPECT_FALSE(writeMark(mark, &id).ok());  // no longer zero
}

TEST_F(MeetingTest, EqualMembersCompress) {
  for (const Verdict& v : meet(mark, {record(mark, 0, 3), record(mark, 1, 3), record(mark, 2, 3)})) {
    EXPECT_TRUE(v.status.ok()) << v.status.message();
    EXPECT_EQ(v.reason, Reason::kCompressed);
  }
}

TEST_F(MeetingTest, NvlinkIsWhatAllRanksShare) {
  const auto nvlink = [&](uint64_t a, uint64_t b) {
    mark = point->invite(Mode::kWire, 42);
    auto first = record(mark, 0, 2), second = record(mark, 1, 2);
    first.nvlink_domain = a;
    second.nvlink_domain = b;
    const auto verdicts = meet(mark, {first, second});
    EXPECT_EQ(verdicts[0].nvlink, verdicts[1].nvlink);
    return verdicts[0].nvlink;
  };
  EXPECT_TRUE(nvlink(7, 7));
  EXPECT_FALSE(nvlink(7, 8));
  EXPECT_FALSE(nvlink(0, 7));
  EXPECT_FALSE(nvlink(7, 0));
  EXPECT_FALSE(nvlink(0, 0));
}

TEST_F(MeetingTest, OtherSettingsAreNamed) {
  auto other = record(mark, 1, 2);
  other.digest = 43;
  other.words = "wire int8";
  for (const Verdict& v : meet(mark, {record(mark, 0, 2), other})) {
    ASSERT_FALSE(v.status.ok());
    EXPECT_NE(v.status.message().find("rank 1"), std::string::npos) << v.status.message();
    EXPECT_NE(v.status.message().find("wire int8"), std::string::npos);
  }
}

TEST_F(MeetingTest, OneMemberThatCannotKeepsAllFromCompressing) {
  auto unready = record(mark, 1, 2);
  unready.ready = false;
  unready.words = "out of memory";
  for (const Verdict& v : meet(mark, {record(mark, 0, 2), unready})) {
    EXPECT_TRUE(v.status.ok());
    EXPECT_EQ(v.reason, Reason::kMemberNotReady);
    EXPECT_NE(v.note.find("out of memory"), std::string::npos);
  }
  const Mark second = point->invite(Mode::kWire, 42);
  auto non_blocking = record(second, 0, 2);
  non_blocking.blocking = false;
  EXPECT_EQ(meet(second, {non_blocking, record(second, 1, 2)})[1].reason, Reason::kNonBlocking);
  const Mark third = point->invite(Mode::kWire, 42);
  auto one = record(third, 0, 2);
  one.one_connection = true;
  EXPECT_EQ(meet(third, {one, record(third, 1, 2)})[1].reason, Reason::kOneConnection);
}

TEST_F(MeetingTest, MissingRanksAreNamedInTime) {
  const auto start = std::chrono::steady_clock::now();
  for (const Verdict& v : meet(mark, {record(mark, 0, 4), record(mark, 2, 4)})) {
    ASSERT_FALSE(v.status.ok());
    EXPECT_NE(v.status.message().find("ranks 1, 3 of 4"), std::string::npos) << v.status.message();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
}

TEST_F(MeetingTest, BranchesOfOneCommunicatorMeetApart) {
  auto left = record(mark, 0, 2);
  left.branch = 1;
  auto right = record(mark, 0, 2);
  right.branch = 2;
  auto left1 = left;
  auto right1 = right;
  left1.rank = right1.rank = 1;
  for (const Verdict& v : meet(mark, {left, right, right1, left1}))
    EXPECT_TRUE(v.status.ok()) << v.status.message();
}

TEST_F(MeetingTest, StrangersAndReplaysAreDropped) {
  // A wrong token, a second record of rank 0, garbage and silence: none of them disturbs the meeting.
  auto stranger = record(mark, 1, 2);
  stranger.token[0] ^= 1;
  Meeting wrong;
  ASSERT_TRUE(wrong.send(mark, stranger, 5).ok());
  EXPECT_FALSE(wrong.receive(2).status.ok());

  Meeting first, replay, last;
  ASSERT_TRUE(first.send(mark, record(mark, 0, 2), 5).ok());
  std::this_thread::sleep_for(50ms);
  ASSERT_TRUE(replay.send(mark, record(mark, 0, 2), 5).ok());
  EXPECT_FALSE(replay.receive(2).status.ok());

  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = mark.address;
  where.sin_port = mark.port;
  const int silent = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(connect(silent, reinterpret_cast<sockaddr*>(&where), sizeof where), 0);
  const int garbage = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(connect(garbage, reinterpret_cast<sockaddr*>(&where), sizeof where), 0);
  std::vector<char> bytes(4096, 'x');
  ASSERT_GT(send(garbage, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);

  ASSERT_TRUE(last.send(mark, record(mark, 1, 2), 5).ok());
  EXPECT_TRUE(first.receive(5).status.ok());
  EXPECT_TRUE(last.receive(5).status.ok());
  close(silent);
  close(garbage);
}

TEST(Meeting, AnAddressNobodyListensOnIsNamed) {
  Mark mark;
  mark.address = htonl(INADDR_LOOPBACK);
  mark.port = htons(1);
  Meeting m;
  const Status s = m.send(mark, record(mark, 3, 4), 2);
  ASSERT_FALSE(s.ok());
  EXPECT_NE(s.message().find("rank 3"), std::string::npos);
  EXPECT_NE(s.message().find("--address"), std::string::npos);
}

TEST(MeetingPoint, RefusesAnAddressThatIsNotOurs) {
  const auto opened = MeetingPoint::open("203.0.113.1", 1);
  ASSERT_FALSE(opened.ok());
  EXPECT_NE(opened.status().message().find("--address"), std::string::npos);
}

}  // namespace
}  // namespace halfwire
