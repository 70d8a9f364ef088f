#include "report/html_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "report/json_report.h"
#include "report/perfetto_report.h"
#include "trace/trace_file.h"

namespace halfwire::report {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

fs::path temporary(const std::string& name) {
  return fs::path(::testing::TempDir()) / ("halfwire_" + std::to_string(::getpid()) + "_" + name);
}

analysis::Analysis analyze(const fs::path& path) {
  const auto files = trace::expandInputs({path.string()});
  EXPECT_TRUE(files.ok());
  analysis::AnalyzeOptions options;
  options.keep_timelines = true;
  options.what_if_comm = 0.5;
  auto result = analysis::analyzeFiles(files.value(), options);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return std::move(result).value();
}

fs::path testdata(const char* name) {
  const char* source = std::getenv("HALFWIRE_SOURCE_DIR");
  return fs::path(source == nullptr ? "." : source) / "src/report/testdata" / name;
}

nlohmann::json embedded(const std::string& html) {
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const size_t from = html.find(open) + open.size();
  return nlohmann::json::parse(html.substr(from, html.find("</script>", from) - from));
}

TEST(HtmlReport, HoldsEverythingItNeeds) {
  const analysis::Analysis a = analyze(testdata("r12_base_time"));
  const std::string html = analyzeHtml(a);
  for (const char* outside : {"http:", "https:", "//cdn", " src=", "<link", "@import", "url(", "fetch("}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
  const nlohmann::json data = embedded(html);
  EXPECT_EQ(data["report"], nlohmann::json::parse(analyzeJson(a)));
  ASSERT_EQ(data["draw"].size(), 2U);
  EXPECT_EQ(data["draw"][0]["span"], 500.0);
  EXPECT_EQ(data["draw"][0]["streams"][1]["number"], 20);
  EXPECT_EQ(data["draw"][0]["streams"][1]["events"][1], 400.0);
}

TEST(HtmlReport, HostileNamesStayText) {
  const fs::path file = temporary("hostile.json");
  std::ofstream(file)
      << R"js({"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 5, "pid": 0, "tid": 1,
    "name": "nccl</script><script>alert(1)</script><!--"}]})js";
  const std::string html = analyzeHtml(analyze(file));
  EXPECT_THAT(html, Not(HasSubstr("alert(1)</script>")));
  EXPECT_THAT(embedded(html)["draw"][0]["names"][0].get<std::string>(),
              HasSubstr("</script><script>alert(1)"));
  fs::remove(file);
}

TEST(HtmlReport, LargeRecordingsAreThinnedNotCut) {
  const fs::path file = temporary("many.json");
  {
    std::ofstream out(file);
    out << "{\"traceEvents\": [";
    for (int i = 0; i < 60000; ++i) {
      out << (i > 0 ? "," : "") << R"({"ph":"X","cat":"kernel","name":"k","pid":0,"tid":1,"ts":)" << i * 10
          << R"(,"dur":9})";
    }
    out << "]}";
  }
  const nlohmann::json draw = embedded(analyzeHtml(analyze(file)))["draw"][0];
  EXPECT_EQ(draw["merged"], true);
  const auto& events = draw["streams"][0]["events"];
  EXPECT_LE(events.size() / 3, kDrawnEvents);
  const size_t last = events.size() - 3;
  EXPECT_DOUBLE_EQ(events[last].get<double>() + events[last + 1].get<double>(), 59999 * 10 + 9);
  fs::remove(file);
}

TEST(PerfettoReport, AddsTracksAndChangesNothingElse) {
  for (const char* name : {"r01_nccl_dev_kernel.json", "r12_base_time"}) {
    const analysis::Analysis a = analyze(testdata(name));
    const fs::path out = temporary("perfetto.json");
    std::FILE* file = std::fopen(out.c_str(), "wb");
    ASSERT_NE(file, nullptr);
    EXPECT_TRUE(writePerfetto(a, file).ok());
    std::fclose(file);
    std::ifstream in(out);
    const nlohmann::json j = nlohmann::json::parse(in);
    double exposed = 0;
    for (const auto& e : j["traceEvents"]) {
      if (e.value("name", "") == "exposed") exposed += e["dur"].get<double>();
    }
    double expected = 0;
    for (const auto& r : a.lanes) expected += static_cast<double>(r.lane.total.exposed) / 1000;
    EXPECT_DOUBLE_EQ(exposed, expected) << name;
    if (a.timelines.size() == 1) {
      std::ifstream original(testdata(name));
      const nlohmann::json before = nlohmann::json::parse(original);
      for (size_t i = 0; i < before["traceEvents"].size(); ++i)
        EXPECT_EQ(j["traceEvents"][i], before["traceEvents"][i]);
      EXPECT_EQ(j["distributedInfo"], before["distributedInfo"]);
    }
    fs::remove(out);
  }
}

// What a browser makes of it: its script runs and fills the page.
TEST(HtmlReport, WorksInABrowser) {
  if (std::system("command -v chromium > /dev/null 2>&1") != 0)
    GTEST_SKIP() << "no chromium to look at the report with";
  const fs::path page = temporary("report.html");
  const fs::path dom = temporary("dom.txt");
  std::ofstream(page, std::ios::binary) << analyzeHtml(analyze(testdata("r12_base_time")));
  const std::string command =
      "timeout 60 chromium --headless=new --no-sandbox --disable-gpu --virtual-time-budget=2000 --dump-dom "
      "'file://" +
      page.string() + "' > '" + dom.string() + "' 2> /dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0);
  std::ifstream in(dom);
  std::stringstream text;
  text << in.rdbuf();
  EXPECT_THAT(text.str(), HasSubstr("rank 1 comes last and costs the others 300.0 us"));
  EXPECT_THAT(text.str(), HasSubstr("<option value=\"1\">rank 1</option>"));
  EXPECT_THAT(text.str(), HasSubstr("all_reduce bf16 x1"));
  EXPECT_THAT(text.str(), HasSubstr("0 to 500.0 us"));  // drawn by the timeline, the last thing that runs
  fs::remove(page);
  fs::remove(dom);
}

// Both widths, light and dark, by keyboard.
TEST(HtmlReport, IsUsableAtBothWidthsAndInBothThemes) {
  if (std::system("/usr/bin/python3 -c 'import selenium' > /dev/null 2>&1 && command -v chromedriver > "
                  "/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "no selenium and chromedriver to use the report with";
  }
  const fs::path page = temporary("used.html");
  std::ofstream(page, std::ios::binary) << analyzeHtml(analyze(testdata("r12_base_time")));
  const fs::path script = testdata("").parent_path().parent_path() / "html_report_test.py";
  EXPECT_EQ(std::system(
                ("timeout 120 /usr/bin/python3 '" + script.string() + "' '" + page.string() + "' > /dev/null")
                    .c_str()),
            0);
  fs::remove(page);
}

}  // namespace
}  // namespace halfwire::report
