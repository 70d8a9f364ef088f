#include <nlohmann/json.hpp>

#include "parity/reports.h"

namespace halfwire::parity {
namespace {

using nlohmann::ordered_json;

// JSON has no NaN and no infinity.
ordered_json number(double v) {
  if (std::isnan(v)) return nullptr;
  if (std::isinf(v)) return v > 0 ? "inf" : "-inf";
  return v;
}
template <class T>
ordered_json maybe(const std::optional<T>& v) {
  if (!v) return nullptr;
  if constexpr (std::is_floating_point_v<T>) {
    return number(*v);
  } else {
    return *v;
  }
}
ordered_json interval(const std::optional<Interval>& i) {
  if (!i) return nullptr;
  return ordered_json::array({number(i->low), number(i->high)});
}

}  // namespace

std::string parityJson(const Comparison& c) {
  ordered_json j;
  j["halfwire_parity_report"] = 1;
  j["question"] = c.alone ? "alone" : "compare";
  j["verdict"] = verdictName(c.verdict);
  j["reason"] = c.reason;
  j["exit_code"] = c.exit_code;
  j["runs"] = ordered_json::array();
  for (const RunSummary& r : c.runs) {
    j["runs"].push_back({{"side", c.alone ? "run" : sideName(r.side)},
                         {"label", r.label},
                         {"path", r.path},
                         {"ranks", r.ranks},
                         {"losses", r.losses},
                         {"first_step", r.first_step},
                         {"last_step", r.last_step},
                         {"tail_loss", maybe(r.tail)},
                         {"counted", r.counted}});
  }
  j["range"] = nullptr;
  if (c.range)
    j["range"] = {{"first_step", c.range->first}, {"tail_step", c.range->tail}, {"end_step", c.range->end}};
  j["noise_floor"] = {{"source", noiseSourceName(c.noise.source)},
                      {"sd", c.noise.df > 0 ? number(c.noise.sd) : ordered_json(nullptr)},
                      {"df", number(c.noise.df)},
                      {"runs", c.noise.runs}};
  j["difference"] = nullptr;
  if (c.difference) {
    const Difference& d = *c.difference;
    j["difference"] = {
        {"baseline", number(d.baseline)},
        {"candidate", number(d.candidate)},
        {"value", number(d.value)},
        {"relative", d.baseline != 0 ? number(d.value / std::fabs(d.baseline)) : ordered_json(nullptr)},
        {"equivalent_steps", maybe(d.steps)},
        {"margin", number(d.margin)},
        {"margin_relative",
         d.baseline != 0 ? number(d.margin / std::fabs(d.baseline)) : ordered_json(nullptr)},
        {"margin_steps", maybe(d.margin_steps)},
        {"gross_bound", number(d.gross)},
        {"method", methodName(d.method)},
        {"interval_90", interval(d.interval90)},
        {"interval_99_5", interval(d.interval_outer)},
        {"p_not_equivalent", maybe(d.p)},
        {"within_run_error", maybe(d.within_run)},
        {"batches", d.batches},
        {"autocorrelation_steps", d.tau > 0 ? number(d.tau) : ordered_json(nullptr)}};
  }
  j["runs_needed"] = maybe(c.runs_needed);
  j["runs_needed_is_least"] = c.runs_needed_is_least;
  j["paired_runs"] = c.paired;
  j["first_difference"] = ordered_json::array();
  for (const Parting& p : c.partings) {
    j["first_difference"].push_back({{"baseline", p.baseline},
                                     {"candidate", p.candidate},
                                     {"size", p.past_one_percent ? "past-1-percent" : "any-bit"},
                                     {"step", p.step},
                                     {"rank", p.rank},
                                     {"quantity", p.quantity},
                                     {"from", number(p.from)},
                                     {"to", number(p.to)}});
  }
  j["findings"] = ordered_json::array();
  for (const Finding& f : c.findings) {
    j["findings"].push_back({{"name", f.name},
                             {"severity", severityName(f.severity)},
                             {"run", f.run},
                             {"step", maybe(f.step)},
                             {"rank", maybe(f.rank)},
                             {"evidence", f.evidence},
                             {"cause", f.cause}});
  }
  return j.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace halfwire::parity
