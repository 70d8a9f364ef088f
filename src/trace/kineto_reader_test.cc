#include "trace/kineto_reader.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace halfwire::trace {
namespace {

using ::testing::HasSubstr;

Result<Timeline> read(std::string_view text, size_t window = 1 << 20) {
  static const CommPatterns patterns = CommPatterns::create({}).value();
  const auto source = memorySource(text);
  ReadOptions options;
  options.window_bytes = window;
  options.max_window_bytes = 1 << 20;
  return readKineto(*source, "t.json", patterns, options);
}

std::string kernel(int i, const char* extra = "") {
  return fmt::format(R"({{"ph": "X", "cat": "kernel", "name": "gemm{{}}, {{[\"{}", "pid": 0, "tid": 7,
    "ts": {}.{:03}, "dur": 5.25, "args": {{"stream": 7, "device": 0, "correlation": {}, "grid": [1, 2, 3]{}}}}})",
                     i % 7, 1669783687464181 + i * 10, i % 1000, i + 1, extra);
}

std::string call(int i) {
  return fmt::format(R"({{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9,
    "ts": {}, "dur": 3, "args": {{"correlation": {}, "nested": [{{"a": 1}}, {{"b": [2]}}]}}}})",
                     1669783687464171 + i * 10, i + 1);
}

std::string trace(
    int n, std::string_view head = R"("schemaVersion": 1, "distributedInfo": {"rank": 3, "world_size": 8},)",
    std::string_view tail = R"(, "traceName": "x")") {
  std::string events;
  for (int i = 0; i < n; ++i) events += (i > 0 ? ",\n" : "") + call(i) + ", " + kernel(i);
  return fmt::format("{{{} \"traceEvents\": [{}]{}}}", head, events, tail);
}

bool same(const Timeline& a, const Timeline& b) {
  if (a.activities.size() != b.activities.size() || a.calls.size() != b.calls.size() || a.events != b.events)
    return false;
  for (size_t i = 0; i < a.activities.size(); ++i) {
    const Activity& x = a.activities[i];
    const Activity& y = b.activities[i];
    if (x.start_ns != y.start_ns || x.end_ns != y.end_ns || x.correlation != y.correlation ||
        x.call != y.call)
      return false;
    if (a.names.at(x.name) != b.names.at(y.name)) return false;
  }
  return a.rank == b.rank && a.world_size == b.world_size && a.base_ns == b.base_ns &&
         a.events_end == b.events_end;
}

TEST(KinetoReader, ReadsKernelsAndTheirLaunches) {
  const auto r = read(trace(3));
  ASSERT_TRUE(r.ok()) << r.status().message();
  const Timeline& t = r.value();
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.world_size, 8);
  EXPECT_EQ(t.events, 6U);
  ASSERT_EQ(t.activities.size(), 3U);
  EXPECT_EQ(t.activities[1].start_ns, 1669783687464191001);
  EXPECT_EQ(t.activities[1].duration(), 5250);
  EXPECT_EQ(t.names.at(t.activities[1].name), "gemm{}, {[\"1");
  ASSERT_EQ(t.activities[1].call, 1);
  EXPECT_EQ(t.calls[1].start_ns, 1669783687464181000);
  EXPECT_TRUE(t.warnings.empty());
}

TEST(KinetoReader, WindowsOfAnySizeGiveTheSame) {
  for (const auto& text :
       {trace(60),
        trace(60, "",
              R"(, "baseTimeNanoseconds": 5, "distributedInfo": {"rank": 2, "deep": [{"x": 1}, {"y": 2}]})"),
        "[" + call(0) + "," + kernel(0) + " ,\n " + call(1) + "\n,\n" + kernel(1) + "]"}) {
    const auto whole = read(text);
    ASSERT_TRUE(whole.ok()) << whole.status().message();
    for (size_t window = 256; window < 4000; window = window * 5 / 4 + 1) {
      const auto cut = read(text, window);
      ASSERT_TRUE(cut.ok()) << window << ": " << cut.status().message();
      EXPECT_TRUE(same(whole.value(), cut.value())) << window;
    }
  }
}

TEST(KinetoReader, DamageIsFoundInWindowsOfAnySize) {
  std::string text = trace(40);
  for (size_t at = text.find("gemm"); at != std::string::npos; at = text.find("gemm", at + 1))
    text[at + 1] = '\xff';
  const auto whole = read(text);
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  EXPECT_THAT(whole.value().warnings.at(0), HasSubstr("40 byte(s)"));
  for (size_t window = 256; window < 4000; window = window * 5 / 4 + 1) {
    const auto cut = read(text, window);
    ASSERT_TRUE(cut.ok()) << window << ": " << cut.status().message();
    EXPECT_EQ(cut.value().activities.size(), 40U);
  }
}

// Whatever is missing at the end: never a part passed off as the whole.
TEST(KinetoReader, EveryTruncationIsAnError) {
  for (const std::string& text : {trace(4), "[" + call(0) + ", " + kernel(0) + "]"}) {
    for (size_t n = 0; n < text.size(); ++n) {
      for (const size_t window : {size_t{256}, size_t{1} << 20}) {
        const auto r = read(std::string_view(text).substr(0, n), window);
        ASSERT_FALSE(r.ok()) << n << " of " << text.size() << " window " << window;
        EXPECT_EQ(r.status().code(), StatusCode::kInvalidData);
        EXPECT_THAT(r.status().message(), HasSubstr("byte"));
      }
    }
    EXPECT_TRUE(read(text).ok());
  }
}

TEST(KinetoReader, OtherFilesAreRefusedInASentence) {
  const auto message = [](std::string_view text) { return read(text).status().message(); };
  EXPECT_THAT(message(""), HasSubstr("is empty"));
  EXPECT_THAT(message("  \n "), HasSubstr("white space"));
  EXPECT_THAT(message("ELF\x01"), HasSubstr("not JSON"));
  EXPECT_THAT(message(R"({"a": 1})"), HasSubstr("traceEvents"));
  EXPECT_THAT(message(R"({"traceEvents": 3})"), HasSubstr("cannot be read"));
  EXPECT_THAT(message(R"([1, 2, 3])"), HasSubstr("'ph'"));
  EXPECT_THAT(message(R"({"traceEvents": [{"a": 1}]})"), HasSubstr("'ph'"));
  EXPECT_THAT(message("{\"a\": 1}\n{\"a\": 2}\n"), HasSubstr("JSON lines"));
  EXPECT_THAT(message(trace(1) + trace(1)), HasSubstr("JSON lines"));
}

TEST(KinetoReader, AbsurdNumbersNameFieldAndOffset) {
  for (const char* bad : {"1e300", "99999999999999999999"}) {
    std::string text = trace(2);
    const size_t at = text.find("1669783687464181.000");
    text.replace(at, 20, bad);
    const auto r = read(text);
    ASSERT_FALSE(r.ok());
    EXPECT_THAT(r.status().message(), HasSubstr("'ts'"));
    EXPECT_THAT(r.status().message(), HasSubstr(fmt::format("byte {}", text.rfind("{\"ph\"", at))));
  }
  std::string text = trace(2);
  text.replace(text.find("5.25"), 4, "1e18");
  EXPECT_THAT(read(text).status().message(), HasSubstr("'dur'"));
}

TEST(KinetoReader, FieldsMayComeInAnyOrder) {
  const auto r = read(
      R"({"traceEvents": [{"args": {"correlation": 4, "stream": "stream 9", "device": 1}, "dur": "2", "ts": "5",
    "tid": "x", "pid": "y", "name": "k", "cat": "Kernel", "ph": "X"}]})");
  ASSERT_TRUE(r.ok()) << r.status().message();
  ASSERT_EQ(r.value().activities.size(), 1U);
  EXPECT_EQ(r.value().activities[0].correlation, 4);
  EXPECT_EQ(r.value().streams[0].device, 1);
  EXPECT_EQ(r.value().streams[0].number, 9);
  EXPECT_EQ(r.value().activities[0].start_ns, 5000);
}

TEST(KinetoReader, EventsWithoutTimesAreCountedNotGuessed) {
  const auto r = read(R"({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": null, "dur": 1},
    {"ph": "X", "cat": "kernel", "name": "b", "ts": 1}, {"ph": "X", "cat": "kernel", "name": "c", "ts": 1, "dur": -4}]})");
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(r.value().activities.size(), 1U);
  EXPECT_EQ(r.value().activities[0].duration(), 0);
  EXPECT_EQ(r.value().warnings.size(), 3U);  // no times, negative, no stream
}

TEST(KinetoReader, CollectivesAreDescribedByTheirOperators) {
  const auto r = read(R"json({"traceEvents": [
    {"ph":"X","cat":"cpu_op","name":"record_param_comms","pid":1,"tid":1,"ts":0,"dur":100,
     "args":{"Collective name":"allreduce","In msg nelems":4096,"dtype":"BFloat16","Group size":8,"Process Group Name":"dp"}},
    {"ph":"X","cat":"user_annotation","name":"nccl:all_to_all","pid":1,"tid":1,"ts":200,"dur":50,
     "args":{"Input Dims":[[6144, 2]],"Input type":["float"]}},
    {"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernelExC","pid":1,"tid":1,"ts":20,"dur":5,"args":{"correlation":1}},
    {"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernelExC","pid":1,"tid":1,"ts":220,"dur":5,"args":{"correlation":2}},
    {"ph":"X","cat":"kernel","name":"ncclDevKernel_Generic(x)","pid":0,"tid":7,"ts":30,"dur":50,"args":{"correlation":1,"stream":7}},
    {"ph":"X","cat":"kernel","name":"ncclDevKernel_SendRecv(x)","pid":0,"tid":7,"ts":230,"dur":50,"args":{"correlation":2,"stream":7}}]})json");
  ASSERT_TRUE(r.ok()) << r.status().message();
  const Timeline& t = r.value();
  ASSERT_EQ(t.comms.size(), 2U);
  EXPECT_EQ(t.comms[0].type, Collective::kAllReduce);
  EXPECT_EQ(t.comms[0].element, ElementType::kBf16);
  EXPECT_EQ(t.comms[0].in_elements, 4096);
  EXPECT_EQ(t.comms[0].group_size, 8);
  EXPECT_EQ(t.comms[1].type, Collective::kAllToAll);
  EXPECT_EQ(t.comms[1].element, ElementType::kFp32);
  EXPECT_EQ(t.comms[1].in_elements, 12288);
}

}  // namespace
}  // namespace halfwire::trace
