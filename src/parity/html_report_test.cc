// What a browser makes of the page: its script runs, at both widths, light and dark, by keyboard.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "parity/reports.h"
#include "parity/synthetic_run.h"

namespace halfwire::parity {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::string page() {
  Inputs inputs;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Synthetic s;
    s.seed = seed;
    s.steps = 3000;  // more than are drawn one by one
    inputs.baseline.push_back(makeRun(s));
    s.seed += 10;
    s.gap = 0.1;
    inputs.candidate.push_back(makeRun(s));
    for (RankRecord& r : inputs.candidate.back().ranks) r.header.tied_expected = true;
  }
  return parityHtml(compareRuns(inputs), inputs);
}

TEST(ParityPage, WorksInABrowser) {
  if (std::system("command -v chromium > /dev/null 2>&1") != 0)
    GTEST_SKIP() << "no chromium to look at the report with";
  const fs::path file =
      fs::temp_directory_path() / ("halfwire-parity-" + std::to_string(::getpid()) + ".html");
  const fs::path dom = file.string() + ".dom";
  std::ofstream(file, std::ios::binary) << page();
  const std::string command =
      "timeout 60 chromium --headless=new --no-sandbox --disable-gpu --virtual-time-budget=2000 --dump-dom "
      "'file://" +
      file.string() + "' > '" + dom.string() + "' 2> /dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0);
  std::ifstream in(dom);
  std::stringstream text;
  text << in.rdbuf();
  EXPECT_THAT(text.str(), HasSubstr(">different</span>"));
  EXPECT_THAT(text.str(), HasSubstr("<strong>tying-lost</strong>"));
  EXPECT_THAT(text.str(), HasSubstr("id=\"update-clip\""));  // the last chart's
  fs::remove(dom);
  if (std::system("/usr/bin/python3 -c 'import selenium' > /dev/null 2>&1 && command -v chromedriver > "
                  "/dev/null 2>&1") == 0) {
    const fs::path script = fs::path(std::getenv("HALFWIRE_SOURCE_DIR")) / "src/parity/html_report_test.py";
    EXPECT_EQ(std::system(("timeout 200 /usr/bin/python3 '" + script.string() + "' '" + file.string() +
                           "' > /dev/null")
                              .c_str()),
              0);
  }
  fs::remove(file);
}

}  // namespace
}  // namespace halfwire::parity
