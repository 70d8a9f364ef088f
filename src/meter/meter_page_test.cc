// What a browser makes of the pages of one run and of two: their scripts run, at both widths, light and dark,
// by keyboard.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "meter/meter_report.h"

namespace halfwire::meter {
namespace {

namespace fs = std::filesystem;

TEST(MeterPage, WorksInABrowser) {
  if (std::system("/usr/bin/python3 -c 'import selenium' > /dev/null 2>&1 && command -v chromedriver > "
                  "/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "no selenium and chromedriver to use the page with";
  }
  const fs::path folder = fs::path(std::getenv("HALFWIRE_SOURCE_DIR")) / "src/meter";
  const auto read = [&](const char* name) {
    auto run = readRun(folder / "testdata/runs" / name);
    EXPECT_TRUE(run.ok());
    return std::move(run).value();
  };
  RunSummary unmeasured = read("merged");
  unmeasured.measured = false;
  unmeasured.ranks.front().measured = 0;
  unmeasured.path = std::string(200, 'p') + "<b>";  // a long path must not widen the page
  const std::string pages[] = {compareHtml(read("exact"), read("compressed")), reportHtml(read("overlapped")),
                               compareHtml(read("overlapped"), unmeasured)};
  const char* words[] = {
      "Two runs side by side|B sends 48.4 % fewer bytes|-14.165|A: AllReduce bf16 from 256 KiB on 2 ranks",
      "What the step waited for|3.464 ms|rank 1|behind collectives",
      "why is unknown|no such call|not measured|ppp<b>"};
  for (size_t i = 0; i < std::size(pages); ++i) {
    const fs::path file =
        fs::temp_directory_path() / ("halfwire-meter-" + std::to_string(::getpid()) + ".html");
    std::ofstream(file, std::ios::binary) << pages[i];
    EXPECT_EQ(std::system(("timeout 120 /usr/bin/python3 '" + (folder / "meter_page_test.py").string() +
                           "' '" + file.string() + "' '' '" + words[i] + "' > /dev/null")
                              .c_str()),
              0)
        << words[i];
    fs::remove(file);
  }
}

}  // namespace
}  // namespace halfwire::meter
