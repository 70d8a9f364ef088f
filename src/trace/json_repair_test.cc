#include "trace/json_repair.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace halfwire::trace {
namespace {

std::string mend(std::string_view text) { return repairJson(text, 0, true).text; }

TEST(RepairJson, LeavesGoodJsonAlone) {
  for (const char* good :
       {R"({"a": "x\"y\\ \u00e9", "b": [1, -2.5e3, true, false, null, {}], "c": "ä"})",
        R"({"name": "f(a, b): {c}", "args": {"x": "[0, 1]"}})", "[]", R"({"k":"","l":"a:b"})"}) {
    const RepairedJson r = repairJson(good, 0, true);
    EXPECT_EQ(r.text, good);
    EXPECT_EQ(r.changes, 0U);
    EXPECT_EQ(r.depth, 0);
  }
}

TEST(RepairJson, MendsWhatRecordersBreak) {
  EXPECT_EQ(mend(R"({"n": "C:\Path"})"), R"({"n": "C:\\Path"})");
  EXPECT_EQ(mend(R"({"n": "a "_inductor" b", "p": 1})"), R"({"n": "a \"_inductor\" b", "p": 1})");
  EXPECT_EQ(mend("{\"n\": \"two\nlines\"}"), "{\"n\": \"two lines\"}");
  EXPECT_EQ(mend(R"({"a": 1, tid": 0})"), R"({"a": 1, "tid": 0})");
  EXPECT_EQ(mend(R"({"n": "x", tid": 0})"), R"({"n": "x", "tid": 0})");
  EXPECT_EQ(mend(R"({"t": ncclFloat32, "p": 0x7f, "d": NaN})"),
            R"({"t": "ncclFloat32", "p": "0x7f", "d": null})");
  EXPECT_EQ(mend("{\"n\": \"a\x80\xff\x01z\"}"), R"({"n": "a?? z"})");
  EXPECT_EQ(mend(R"({"n": "a \u12 b"})"), R"({"n": "a \\u12 b"})");
}

TEST(RepairJson, FindsTheLastWholeEventWhateverTheStringsHold) {
  const std::string text = R"({"n":"a}, {b"}, {"n":"c", "args":{"l":[{"x":1}, {"y":2}]}}, {"n":"d}, {)";
  const RepairedJson r = repairJson(text, 0, false);
  EXPECT_TRUE(r.found_event);
  EXPECT_TRUE(r.inside_string);
  EXPECT_EQ(text.substr(r.end), R"(, {"n":"d}, {)");
  EXPECT_EQ(r.text, text.substr(0, r.end));
}

TEST(RepairJson, MapsOffsetsBack) {
  const std::string text = R"({"n": "a\Pb", "m": "c\Qd", "z": 1})";
  const RepairedJson r = repairJson(text, 0, true);
  for (const char* mark : {"\"n\"", "\"m\"", "\"z\"", "1}"}) {
    EXPECT_EQ(r.original(r.text.find(mark)), text.find(mark)) << mark;
  }
}

// Any bytes become JSON that a strict parser reads, or stay recognisably open.
TEST(RepairJson, BalancedDamageBecomesStrictJson) {
  const std::string base = R"({"name": "kernel", "ts": 12.5, "args": {"stream": 7, "ok": true}})";
  for (size_t i = 10; i < 16; ++i) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string text = base;
      text[i] = static_cast<char>(byte);
      const RepairedJson r = repairJson(text, 0, true);
      if (r.inside_string || r.depth != 0) continue;
      EXPECT_TRUE(nlohmann::json::accept(r.text)) << text << " -> " << r.text;
    }
  }
}

}  // namespace
}  // namespace halfwire::trace
