#include <fmt/format.h>

#include <algorithm>

#include "parity/reports.h"

namespace halfwire::parity {
namespace {

constexpr size_t kWidth = 110;

// Names come from files: no escape sequences for the terminal.
std::string clean(std::string_view text) {
  std::string out;
  for (const char c : text) out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return out;
}

// The end of a path tells runs apart.
std::string shortPath(const std::string& path, size_t width) {
  std::string out = clean(path);
  if (out.size() > width) out = "..." + out.substr(out.size() - (width - 3));
  return out;
}

std::string wrapped(const std::string& words, size_t indent) {
  std::string out;
  size_t column = 0;
  size_t at = 0;
  const std::string text = clean(words);
  while (at < text.size()) {
    size_t end = text.find(' ', at);
    if (end == std::string::npos) end = text.size();
    const size_t length = end - at;
    if (column == 0) {
      out += std::string(indent, ' ');
      column = indent;
    } else if (column + 1 + length > kWidth) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
    } else {
      out += ' ';
      ++column;
    }
    out.append(text, at, length);
    column += length;
    at = end + 1;
  }
  return out + "\n";
}

std::string steps(const std::optional<double>& s) {
  if (!s) return "";
  return fmt::format(" = {:.0f} steps", std::fabs(*s));
}

void runs(const Comparison& c, std::string* out) {
  *out += fmt::format("{:<14} {:>5} {:>9} {:>9} {:>12}  {}\n", "", "ranks", "losses", "last step",
                      "tail loss", "record");
  constexpr size_t kMost = 12;
  for (size_t i = 0; i < std::min(kMost, c.runs.size()); ++i) {
    const RunSummary& r = c.runs[i];
    *out += fmt::format("{:<14} {:>5} {:>9} {:>9} {:>12}  {}{}\n", r.label, r.ranks, r.losses, r.last_step,
                        r.tail ? fmt::format("{:.6g}", *r.tail) : "-", shortPath(r.path, 50),
                        r.counted ? "" : " (a copy)");
  }
  if (c.runs.size() > kMost) *out += fmt::format("and {} more\n", c.runs.size() - kMost);
}

void difference(const Comparison& c, std::string* out) {
  const Difference& d = *c.difference;
  *out += fmt::format("\ntail: steps {} to {}\n", c.range->tail, c.range->end - 1);
  std::string equal;
  if (d.steps) {
    equal = *d.steps >= 0 ? fmt::format("; the baseline had this loss {:.0f} steps before its end", *d.steps)
                          : fmt::format("; the baseline would need about {:.0f} more steps", -*d.steps);
  }
  *out += wrapped(
      fmt::format("difference {:+.5g} ({:+.3f} %){}", d.value, 100 * d.value / std::fabs(d.baseline), equal),
      0);
  *out += fmt::format("margin     {:.5g} ({:.3f} %){}\n", d.margin, 100 * d.margin / std::fabs(d.baseline),
                      steps(d.margin_steps));
  if (d.interval90) {
    *out +=
        fmt::format("interval   {:+.5g} to {:+.5g} at 90 %, {:+.5g} to {:+.5g} at 99.5 % ({}); p = {:.2g}\n",
                    d.interval90->low, d.interval90->high, d.interval_outer->low, d.interval_outer->high,
                    methodName(d.method), *d.p);
  }
  if (c.noise.df > 0) {
    *out += fmt::format("noise      {:.4g} ({:.3f} %) between runs, from {} runs ({})\n", c.noise.sd,
                        100 * c.noise.sd / std::fabs(d.baseline), c.noise.runs,
                        c.noise.source == NoiseFloor::Source::kNoiseRuns ? "noise runs" : "repeats");
  } else if (d.within_run) {
    *out += fmt::format(
        "noise      between runs not known; {:.3g} within the runs{}\n", *d.within_run,
        d.batches > 0 ? fmt::format(" ({} batch means, autocorrelation over {:.1f} steps)", d.batches, d.tau)
                      : "");
  }
}

void partings(const Comparison& c, std::string* out) {
  constexpr size_t kMost = 4;
  for (size_t i = 0; i < std::min(kMost, c.partings.size()); ++i) {
    const Parting& p = c.partings[i];
    const std::string values = std::isnan(p.from) ? "" : fmt::format(" ({:.9g} and {:.9g})", p.from, p.to);
    *out += wrapped(
        fmt::format("{} and {} part{} at step {}, rank {}: {}{}", p.baseline, p.candidate,
                    p.past_one_percent ? " by more than 1 %" : "", p.step, p.rank, p.quantity, values),
        0);
  }
}

void findings(const Comparison& c, std::string* out) {
  if (c.findings.empty()) {
    *out += "no findings\n";
    return;
  }
  // One of a name and severity in full, and how many runs more.
  std::vector<bool> told(c.findings.size(), false);
  for (size_t i = 0; i < c.findings.size(); ++i) {
    if (told[i]) continue;
    const Finding& f = c.findings[i];
    size_t more = 0;
    for (size_t k = i + 1; k < c.findings.size(); ++k) {
      if (c.findings[k].name != f.name || c.findings[k].severity != f.severity) continue;
      told[k] = true;
      ++more;
    }
    std::string where = f.run;
    if (f.step) where += fmt::format(", step {}", *f.step);
    if (f.rank) where += fmt::format(", rank {}", *f.rank);
    if (more > 0) where += fmt::format(" (and {} more)", more);
    *out += fmt::format("{:<8} {}: {}\n", severityName(f.severity), f.name, where);
    *out += wrapped(f.evidence, 9);
    *out += wrapped("likely: " + f.cause, 9);
  }
}

}  // namespace

std::string parityText(const Comparison& c) {
  std::string out;
  runs(c, &out);
  if (c.difference) difference(c, &out);
  if (!c.partings.empty()) {
    out += "\n";
    partings(c, &out);
  }
  out += "\n";
  findings(c, &out);
  const bool clean_run = c.alone && c.exit_code == 0;
  out += "\n" + wrapped(fmt::format("{}: {}", clean_run ? "clean" : verdictName(c.verdict), c.reason), 0);
  return out;
}

}  // namespace halfwire::parity
