// Makes every fault of the zoo, asks `halfwire parity` about it, and counts what was found by its name and
// what was found where nothing was wrong.
//
//   parity_zoo --halfwire BIN [--seeds 20] [--fault-free 400] [--only NAME] [--require] [--keep DIR]
#include <fmt/format.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "zoo.h"

namespace {

using halfwire::zoo::Case;
using halfwire::zoo::Config;
using halfwire::zoo::Question;

struct Options {
  std::string halfwire, only, keep;
  size_t seeds = 20, fault_free = 400;
  bool require = false;
};

struct Report {
  int exit_code = 2;
  std::string verdict;
  nlohmann::json findings = nlohmann::json::array();
};

class Zoo {
 public:
  explicit Zoo(Options options) : options_(std::move(options)) {
    std::string name = (std::filesystem::temp_directory_path() / "parity-zoo-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a folder in " + name);
    folder_ = name;
  }
  ~Zoo() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  int run() {
    fmt::print("{:<22} {:<38} {:>9} {:>6} {:>8} {:>10}\n", "fault", "how it is made", "found", "hard",
               "warning", "different");
    for (const Case& c : halfwire::zoo::cases()) {
      if (options_.only.empty() || options_.only == c.name) fault(c);
    }
    if (options_.only.empty()) {
      fmt::print("\n{:<34} {:>10} {:>24}  {}\n", "fault-free", "alarms", "one-sided 95 % limit",
                 "with a warning, by name");
      faultFree("one run alone", Question::kAlone, options_.fault_free, true);
      faultFree("3 and 3, other seeds", Question::kThree, options_.fault_free / 2, false);
      faultFree("3 and 3, other order of reduction", Question::kThree,
                options_.fault_free - options_.fault_free / 2, true);
      if (groups_ > 1) line("all", all_alarms_, all_, {});
    }
    for (const std::string& p : problems_) fmt::print("{}\n", p);
    return options_.require && failed_ ? 1 : 0;
  }

 private:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  void train(const Config& c, const std::string& name) {
    std::filesystem::remove_all(folder_ / name);
    const std::string problem = halfwire::zoo::train(c, path(name));
    if (!problem.empty()) throw std::runtime_error("training: " + problem);
  }

  Report ask(const std::vector<std::string>& baseline, const std::vector<std::string>& candidate) {
    const auto quoted = [](const std::string& s) {
      std::string q = "'";
      for (const char c : s) q += c == '\'' ? std::string("'\\''") : std::string(1, c);
      return q + "'";
    };
    std::string command = quoted(options_.halfwire) + " parity --json";
    for (const std::string& b : baseline) command += " " + quoted(path(b));
    if (!candidate.empty()) command += " --candidate";
    for (const std::string& c : candidate) command += " " + quoted(path(c));
    std::FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) throw std::runtime_error("cannot start " + command);
    std::string out;
    char buffer[65536];
    for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) out.append(buffer, n);
    const int status = pclose(pipe);
    Report r;
    r.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 255;
    const auto json = nlohmann::json::parse(out, nullptr, false);
    if (json.is_discarded()) throw std::runtime_error("no JSON from: " + command);
    r.verdict = json.value("verdict", "");
    r.findings = json.value("findings", nlohmann::json::array());
    return r;
  }

  Report ask(Question question, const Config& baseline, const Config& candidate, uint64_t other_seeds) {
    if (question == Question::kAlone) {
      train(candidate, "run");
      return ask({"run"}, {});
    }
    const size_t runs = question == Question::kThree ? 3 : 1;
    std::vector<std::string> left, right;
    for (size_t i = 0; i < runs; ++i) {
      Config b = baseline, c = candidate;
      b.seed = baseline.seed + 10000 * i;
      c.seed = candidate.seed + 10000 * i + other_seeds;
      left.push_back(fmt::format("baseline-{}", i + 1));
      right.push_back(fmt::format("candidate-{}", i + 1));
      train(b, left.back());
      train(c, right.back());
    }
    return ask(left, right);
  }

  void keep(const std::string& name) {
    if (options_.keep.empty()) return;
    const auto to = std::filesystem::path(options_.keep) / name;
    std::filesystem::create_directories(to);
    std::filesystem::copy(
        folder_, to,
        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  }

  void fault(const Case& c) {
    size_t found = 0, hard = 0, warned = 0, different = 0, right = 0;
    for (uint64_t seed = 1; seed <= options_.seeds; ++seed) {
      Config baseline = halfwire::zoo::faultFree(seed);
      baseline.schedule = halfwire::zoo::Schedule::kCosine;
      Config candidate = baseline;
      c.make(&baseline, &candidate);
      const Report r = ask(c.question, baseline, candidate, 0);
      std::string severity;
      for (const auto& f : r.findings) {
        const std::string s = f.value("severity", "");
        if (f.value("name", "") != c.name || s == "note") continue;
        if (severity != "hard") severity = s;
      }
      found += !severity.empty();
      hard += severity == "hard";
      warned += severity == "warning";
      different += r.verdict == "different";
      bool as_meant = !severity.empty();
      if (c.only_warning) as_meant = severity == "warning" && r.exit_code == 0;
      if (c.refused) as_meant = severity == "refusal" && r.verdict == "undecided" && r.exit_code == 2;
      right += as_meant;
      if (!as_meant) {
        failed_ = failed_ || !c.uncertain;
        problems_.push_back(fmt::format("missed: {} ({}), seed {}: verdict {}, findings {}", c.name,
                                        c.variant, seed, r.verdict, names(r)));
        keep(fmt::format("{}-{}-{}", c.name, &c - halfwire::zoo::cases().data(), seed));
      }
    }
    fmt::print("{:<22} {:<38} {:>9} {:>6} {:>8} {:>10}\n", c.name, c.variant,
               fmt::format("{} of {}", right, options_.seeds), hard, warned, different);
    std::fflush(stdout);
  }

  static std::string names(const Report& r) {
    std::string s;
    for (const auto& f : r.findings) {
      s += (s.empty() ? "" : ", ") + f.value("name", "") + " " + f.value("severity", "");
    }
    return s.empty() ? "none" : s;
  }

  void line(const std::string& what, size_t alarms, size_t n, const std::map<std::string, size_t>& warnings) {
    std::string list;
    for (const auto& [name, count] : warnings)
      list += fmt::format("{}{} {}", list.empty() ? "" : ", ", name, count);
    fmt::print("{:<34} {:>10} {:>22.2f} %  {}\n", what, fmt::format("{} of {}", alarms, n),
               100 * halfwire::zoo::upperLimit(alarms, n), list);
    std::fflush(stdout);
  }

  void faultFree(const std::string& what, Question question, size_t n, bool same_seeds) {
    size_t alarms = 0;
    std::map<std::string, size_t> warnings, verdicts;
    for (uint64_t i = 1; i <= n; ++i) {
      const uint64_t seed = 500000 + i + (same_seeds ? 0 : 100000);
      const Config baseline = halfwire::zoo::faultFree(seed);
      const Config candidate =
          question == Question::kThree && same_seeds ? halfwire::zoo::reordered(baseline, seed) : baseline;
      const Report r = ask(question, baseline, candidate, same_seeds ? 0 : 1000000);
      bool alarm = r.verdict == "different" || r.exit_code == 1;
      std::map<std::string, size_t> once;
      for (const auto& f : r.findings) {
        alarm = alarm || f.value("severity", "") == "hard";
        if (f.value("severity", "") == "warning") once[f.value("name", "")] = 1;
      }
      for (const auto& [name, one] : once) warnings[name] += one;
      ++verdicts[r.verdict];
      alarms += alarm;
      if (alarm) {
        failed_ = true;
        problems_.push_back(fmt::format("false alarm: {}, seed {}: verdict {}, findings {}", what, seed,
                                        r.verdict, names(r)));
        keep(fmt::format("fault-free-{}", seed));
      }
    }
    line(what, alarms, n, warnings);
    if (question != Question::kAlone) {
      std::string list;
      for (const auto& [name, count] : verdicts)
        list += fmt::format("{}{} {}", list.empty() ? "" : ", ", name, count);
      fmt::print("{:<34} {}\n", "", "verdicts: " + list);
    }
    all_alarms_ += alarms;
    all_ += n;
    ++groups_;
  }

  Options options_;
  std::filesystem::path folder_;
  std::vector<std::string> problems_;
  bool failed_ = false;
  size_t all_alarms_ = 0, all_ = 0, groups_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Faults of training runs, really made, and whether `halfwire parity` finds them");
  app.add_option("--halfwire", o.halfwire, "The halfwire command")->required();
  app.add_option("--seeds", o.seeds, "Seeds of each fault");
  app.add_option("--fault-free", o.fault_free, "Runs without fault, and as many comparisons");
  app.add_option("--only", o.only, "Only the fault of this name");
  app.add_option("--keep", o.keep, "Keep the records of misses and false alarms here");
  app.add_flag("--require", o.require, "Exit code 1 if a fault was missed or an alarm was false");
  CLI11_PARSE(app, argc, argv);
  try {
    return Zoo(std::move(o)).run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "parity_zoo: {}\n", e.what());
    return 2;
  }
}
