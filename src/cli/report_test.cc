// `halfwire report` as a program, on run logs that are kept with the meter's tests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/command_test.h"

namespace halfwire {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Report : public CommandTest {
 protected:
  Report() : CommandTest("report") {}
  static std::string logs(const char* run) {
    return std::string(std::getenv("HALFWIRE_SOURCE_DIR")) + "/src/meter/testdata/runs/" + run;
  }
};

TEST_F(Report, ComparesTwoRunsInWordsJsonAndAPage) {
  const Ran text = halfwire({"--compare", logs("exact"), logs("compressed"), "--html", "both.html"});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("B sends 48.4 % fewer bytes and its step is 13.99 ms (16.6 %) shorter"));
  const std::string page = contents(root_ / "both.html");
  EXPECT_THAT(page, HasSubstr("B sends 48.4 % fewer bytes and its step is 13.99 ms (16.6 %) shorter"));
  EXPECT_THAT(page, HasSubstr("Two runs side by side"));
  const Ran json = halfwire({"--compare", "--json", logs("exact"), logs("compressed")});
  EXPECT_EQ(nlohmann::json::parse(json.out)["schema"], "halfwire.report.compare");
}

TEST_F(Report, OneRunHasAPageToo) {
  const Ran one = halfwire({logs("merged"), "--html", "one.html"});
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_THAT(contents(root_ / "one.html"), HasSubstr("17.404 ms (21.0 %) wait for collectives"));
}

TEST_F(Report, APageThatCannotBeWrittenIsSaid) {
  const Ran ran = halfwire({logs("merged"), "--html", "no/such/folder.html"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("no/such/folder.html: cannot be created"));
  EXPECT_THAT(ran.out, Not(HasSubstr("rank")));
}

}  // namespace
}  // namespace halfwire
