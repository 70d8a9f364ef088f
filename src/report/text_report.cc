#include "report/text_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/units.h"

namespace halfwire::report {
namespace {

using analysis::LaneReport;

double percent(int64_t part, int64_t whole) {
  return whole <= 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

// Names come from files: no escape sequences for the terminal, and no line longer than it.
std::string clean(std::string_view text, size_t width) {
  std::string out;
  for (const char c : text) out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  if (out.size() > width) out = out.substr(0, width - 3) + "...";
  return out;
}

std::string baseName(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

std::string who(const LaneReport& r, bool with_device) {
  std::string text = r.rank ? fmt::format("rank {}", *r.rank) : clean(baseName(r.file), 28);
  if (with_device) text += fmt::format(" gpu {}", r.lane.device);
  return text;
}

// The largest cause of idleness, for one column.
std::string whyIdle(const LaneReport& r) {
  const auto largest = std::max_element(r.lane.idle.begin(), r.lane.idle.end());
  if (*largest == 0) return "";
  static constexpr const char* kWords[analysis::kIdleCauses] = {
      "launched late", "host collective", "host sync", "data loading", "device gaps", "not recorded"};
  return fmt::format("{} {:.0f} %", kWords[largest - r.lane.idle.begin()],
                     percent(*largest, r.lane.total.idle));
}

class Text {
 public:
  Text(const analysis::Analysis& a, int top) : a_(a), top_(static_cast<size_t>(std::max(1, top))) {
    int64_t longest = 0;
    for (const LaneReport& r : a.lanes) longest = std::max(longest, r.lane.total.span);
    if (longest < 10'000'000) {
      divisor_ = 1e3;
      unit_ = "us";
    }
  }

  std::string run() {
    overview();
    for (const auto& g : a_.groups) {
      line("");
      line(fmt::format("Together: {}.", g.words));
    }
    const std::vector<size_t> detailed = details();
    for (const size_t i : detailed) detail(a_.lanes[i]);
    warnings();
    return std::move(out_);
  }

 private:
  double ms(int64_t ns) const { return static_cast<double>(ns) / divisor_; }

  std::string amount(int64_t ns) const { return fmt::format("{:.1f} {}", ms(ns), unit_); }

  void line(std::string_view text) {
    out_ += text;
    out_ += '\n';
  }

  void overview() {
    bool several_devices = false;
    for (size_t i = 1; i < a_.lanes.size(); ++i)
      several_devices = several_devices || a_.lanes[i].file == a_.lanes[i - 1].file;
    line(fmt::format(
        "times in {}        span   compute  exposed = wire + waiting   copies     idle  of it mostly",
        unit_));
    for (const LaneReport& r : a_.lanes) {
      if (!r.has_device_activity) {
        line(fmt::format("{:<14} no device activity recorded", who(r, false)));
        continue;
      }
      const auto& p = r.lane.total;
      const std::string wait =
          r.group ? fmt::format("{:9.1f}", ms(r.exposed_wait_ns)) : fmt::format("{:>9}", "-");
      line(fmt::format("{:<14} {:9.1f} {:9.1f} {:8.1f} {:6.1f} {} {:8.1f} {:8.1f}  {}",
                       who(r, several_devices), ms(p.span), ms(p.compute), ms(p.exposed),
                       ms(p.exposed - r.exposed_wait_ns), wait, ms(p.copy_alone), ms(p.idle), whyIdle(r)));
    }
    line("compute + exposed + copies + idle = span; waiting (for late ranks) needs several ranks' traces.");
  }

  // One lane in full: the only one, or of each group the one that lost most.
  std::vector<size_t> details() const {
    std::vector<size_t> out;
    std::vector<bool> grouped(a_.lanes.size(), false);
    for (const auto& g : a_.groups) {
      for (const size_t i : g.lanes) grouped[i] = true;
      out.push_back(*std::max_element(g.lanes.begin(), g.lanes.end(), [&](size_t x, size_t y) {
        const auto lost = [&](size_t i) {
          return a_.lanes[i].lane.total.span - a_.lanes[i].lane.total.compute;
        };
        return lost(x) < lost(y);
      }));
    }
    for (size_t i = 0; i < a_.lanes.size(); ++i) {
      if (!grouped[i]) out.push_back(i);
    }
    return out;
  }

  void detail(const LaneReport& r) {
    line("");
    line(fmt::format("{}: {}.", r.rank ? fmt::format("Rank {}", *r.rank) : clean(baseName(r.file), 60),
                     r.headline));
    if (!r.has_device_activity) return;
    line(fmt::format("FP8: {}.", r.fp8.words));
    if (r.lane.total.codec > 0) {
      line(fmt::format("Halfwire's own kernels: {} busy, {} of it shows with no collective running.",
                       amount(r.lane.total.codec), amount(r.lane.total.exposed_codec)));
    }
    collectives(r);
    idle(r);
    stalled(r);
    steps(r);
    path(r);
    taken(r);
  }

  void collectives(const LaneReport& r) {
    if (r.collectives.empty()) return;
    line("");
    line(
        fmt::format("  collective        type  size of each   calls        GB   busy {0}  exposed {0}   "
                    "algbw   busbw  group",
                    unit_));
    size_t shown = 0;
    for (const auto& row : r.collectives) {
      if (shown++ == top_) break;
      const std::string size = row.bucket > 0 ? fmt::format("{}..", formatBytes(row.bucket)) : "?";
      const std::string rate = row.algbw_gbps > 0
                                   ? fmt::format("{:7.1f} {:7.1f}", row.algbw_gbps, row.busbw_gbps)
                                   : "      -       -";
      const std::string bytes =
          row.sized > 0 ? fmt::format("{:9.3f}", static_cast<double>(row.bytes) / 1e9) : "        -";
      line(fmt::format("  {:<15} {:>6} {:>13} {:>7} {} {:>9.1f} {:>11.1f} {}  {}",
                       trace::collectiveName(row.type), trace::elementName(row.element), size, row.count,
                       bytes, ms(row.busy_ns), ms(row.exposed_ns), rate, clean(row.group, 20)));
    }
    if (r.collectives.size() > top_)
      line(fmt::format("  and {} more rows (--top)", r.collectives.size() - top_));
  }

  void idle(const LaneReport& r) {
    const auto& p = r.lane.total;
    if (p.idle == 0) return;
    static constexpr const char* kWords[analysis::kIdleCauses] = {
        "launch-bound: the next launch came after the device had run dry",
        "the host was inside a collective of its own",
        "the host was blocked in a synchronisation or copy",
        "the host was waiting for the data loader",
        "already launched: latency and waits on the device",
        "nothing recorded says what came next"};
    line("");
    line(fmt::format("  idle {}, {:.1f} % of the span", amount(p.idle), percent(p.idle, p.span)));
    for (int i = 0; i < analysis::kIdleCauses; ++i) {
      if (r.lane.idle[i] > 0) line(fmt::format("  {:>12}  {}", amount(r.lane.idle[i]), kWords[i]));
    }
    const int64_t quiet = r.lane.launch_bound_host_quiet;
    if (quiet * 2 > r.lane.idle[0] && quiet > p.span / 50) {
      line(
          fmt::format("               for {} of the launch-bound time the host ran nothing that the "
                      "profiler records",
                      amount(quiet)));
    }
  }

  // Between idle time and steps, in a paragraph of its own where nothing is idle.
  void stalled(const LaneReport& r) {
    const auto& l = r.lane;
    if (l.waits == 0) return;
    if (l.total.idle == 0) line("");
    if (l.stalled_from == analysis::StalledFrom::kNothing) {
      line(
          "  stalled: not known (the trace does not name the events that streams waited for, nor do the "
          "times)");
      return;
    }
    std::string text =
        fmt::format("  stalled {}: a computing stream stood at an event behind a collective", amount(l.stalled));
    const std::string unknown =
        l.waits_unknown > 0 ? fmt::format("nothing is known of {} of {} waits", l.waits_unknown, l.waits)
                            : "";
    if (l.stalled_from == analysis::StalledFrom::kInferred) {
      text += " (inferred: the trace does not name the events";
      text += unknown.empty() ? ")" : "; " + unknown + ")";
    } else if (!unknown.empty()) {
      text += " (" + unknown + ")";
    }
    line(text);
  }

  void steps(const LaneReport& r) {
    if (r.lane.steps.size() < 2) return;
    line("");
    line(fmt::format("  step{}       span   compute  exposed   copies     idle",
                     r.lane.steps_detected ? "*" : " "));
    size_t shown = 0;
    for (const auto& s : r.lane.steps) {
      if (shown++ == top_) break;
      line(fmt::format("  {:<6} {:9.1f} {:9.1f} {:8.1f} {:8.1f} {:8.1f}", s.number, ms(s.parts.span),
                       ms(s.parts.compute), ms(s.parts.exposed), ms(s.parts.copy_alone), ms(s.parts.idle)));
    }
    if (r.lane.steps.size() > top_)
      line(fmt::format("  and {} more steps (--top)", r.lane.steps.size() - top_));
    if (r.lane.steps_detected)
      line("  * no annotations: steps are taken from the repeating pattern of collectives");
  }

  void path(const LaneReport& r) {
    if (!r.replay) return;
    line("");
    std::string text = "  critical path:";
    std::vector<int> order(analysis::kPathKinds);
    for (int i = 0; i < analysis::kPathKinds; ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](int x, int y) { return r.replay->critical[x] > r.replay->critical[y]; });
    for (const int i : order) {
      if (r.replay->critical[i] > 0)
        text += fmt::format(" {} {:.1f}", analysis::kPathKindNames[i], ms(r.replay->critical[i]));
    }
    line(fmt::format("{} {}", text, unit_));
    const int64_t unexplained = r.replay->unexplained_ns;
    if (unexplained * 50 > r.replay->measured_ns) {
      line(fmt::format("  {} of it follow from nothing recorded: take the path and what-if with care",
                       amount(unexplained)));
    }
    if (a_.what_if_comm) {
      line(
          fmt::format("  what if communication took {:g} of its time: {} instead of {} (replay without "
                      "change: {})",
                      *a_.what_if_comm, amount(r.replay->what_if_ns), amount(r.replay->measured_ns),
                      amount(r.replay->replayed_ns)));
    }
  }

  void taken(const LaneReport& r) {
    if (r.comm_names.empty()) return;
    line("");
    std::string text = "  taken for communication:";
    size_t shown = 0;
    for (const auto& [name, count] : r.comm_names) {
      if (shown++ == 4) {
        text += fmt::format(" and {} more names", r.comm_names.size() - 4);
        break;
      }
      text +=
          fmt::format("{} {} x{}", shown > 1 ? "," : "", clean(name.substr(0, name.find('(')), 60), count);
    }
    line(text);
  }

  void warnings() {
    bool first = true;
    std::string last_file;
    for (const LaneReport& r : a_.lanes) {
      if (r.file == last_file) continue;
      last_file = r.file;
      for (const std::string& w : r.warnings) {
        if (first) line("");
        first = false;
        line(fmt::format("note: {}: {}", clean(baseName(r.file), 60), clean(w, 300)));
      }
    }
  }

  const analysis::Analysis& a_;
  size_t top_;
  double divisor_ = 1e6;  // of all times shown
  const char* unit_ = "ms";
  std::string out_;
};

}  // namespace

std::string analyzeText(const analysis::Analysis& a, int top) { return Text(a, top).run(); }

}  // namespace halfwire::report
