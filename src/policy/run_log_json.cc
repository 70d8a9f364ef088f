#include "policy/run_log_json.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "base/units.h"
#include "policy/run_log.h"

namespace halfwire {
namespace {

constexpr uint32_t kMostRanks = 1u << 24;

Status damaged(std::string_view what) {
  return {StatusCode::kInvalidData,
          fmt::format("not a usable run log ({}): it was cut, damaged or written by another "
                      "version of Halfwire",
                      what)};
}

// Length of the UTF-8 sequence at the start of `text` if it is valid and printable, else 0.
size_t printableSequence(std::string_view text) {
  const auto at = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const auto follows = [&](size_t i) { return (at(i) & 0xc0) == 0x80; };
  const uint8_t c = at(0);
  if (c >= 0x20 && c < 0x7f) return 1;
  // U+0080 to U+009F are control characters too.
  if (c == 0xc2) return follows(1) && at(1) >= 0xa0 ? 2 : 0;
  if (c >= 0xc3 && c <= 0xdf) return follows(1) ? 2 : 0;
  if (c >= 0xe0 && c <= 0xef) {
    const bool overlong = c == 0xe0 && at(1) < 0xa0;
    const bool surrogate = c == 0xed && at(1) >= 0xa0;
    return follows(1) && follows(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (c >= 0xf0 && c <= 0xf4) {
    const bool overlong = c == 0xf0 && at(1) < 0x90;
    const bool beyond = c == 0xf4 && at(1) >= 0x90;
    return follows(1) && follows(2) && follows(3) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

// Text with '?' for every byte that a terminal or JSON could stumble
// over.
std::string printable(std::string_view rest) {
  std::string text;
  while (!rest.empty()) {
    const size_t n = printableSequence(rest);
    text += n == 0 ? std::string_view("?") : rest.substr(0, n);
    rest.remove_prefix(n == 0 ? 1 : n);
  }
  return text;
}

template <size_t N>
std::string fieldText(const char (&field)[N]) {
  return printable({field, strnlen(field, N)});
}

uint64_t get(const std::atomic<uint64_t>& value) { return value.load(std::memory_order_relaxed); }

Status parseCommunicator(const RunLogCommunicator& in, RunLogComm* out) {
  out->rank = in.rank;
  out->ranks = in.ranks;
  if (in.ranks == 0 || in.ranks > kMostRanks || in.rank >= in.ranks) {
    return damaged(fmt::format("communicator {} claims rank {} of {}", out->slot, in.rank, in.ranks));
  }
  if (in.reason >= static_cast<uint32_t>(Reason::kCount)) {
    return damaged(fmt::format("communicator {} has an unknown reason {}", out->slot, in.reason));
  }
  out->reason = static_cast<Reason>(in.reason);
  out->scratch_bytes = in.scratch_bytes;
  out->connection_bytes = in.connection_bytes;
  out->note = fieldText(in.note);
  out->dropped = get(in.dropped);
  for (const RunLogRow& row : in.rows) {
    const uint32_t key = row.key.load(std::memory_order_relaxed);
    if (key == 0) continue;
    const uint32_t op = (key - 1) & 0xff;
    const uint32_t type = (key - 1) >> 8 & 0xff;
    const uint32_t reason = (key - 1) >> 16;
    if (op >= static_cast<uint32_t>(CollectiveOp::kCount) ||
        reason >= static_cast<uint32_t>(Reason::kCount)) {
      return damaged(fmt::format("communicator {} has an unknown kind of call {:#x}", out->slot, key));
    }
    RunLogCall call;
    call.op = static_cast<CollectiveOp>(op);
    // A newer NCCL's type has no name here.
    call.type = static_cast<ncclDataType_t>(std::min<uint32_t>(type, ncclNumTypes));
    call.reason = static_cast<Reason>(reason);
    call.calls = get(row.calls);
    call.bytes_asked = get(row.bytes_asked);
    call.bytes_ring = get(row.bytes_ring);
    call.bytes_sent = get(row.bytes_sent);
    call.launches = get(row.launches);
    call.host_ns = get(row.host_ns);
    call.in_place = get(row.in_place);
    if (call.calls != 0) out->calls.push_back(call);
  }
  return {};
}

double medianOf(const std::atomic<float> (&times)[kRunLogShadowTimes], uint64_t samples) {
  std::vector<double> known;
  for (uint64_t i = 0; i < std::min<uint64_t>(samples, kRunLogShadowTimes); ++i) {
    const double t = times[i].load(std::memory_order_relaxed);
    if (std::isfinite(t) && t >= 0) known.push_back(t);
  }
  if (known.empty()) return 0;
  const auto middle = known.begin() + static_cast<ptrdiff_t>(known.size() / 2);
  std::nth_element(known.begin(), middle, known.end());
  return *middle;
}

bool soundSums(const ErrorSums& s) {
  for (const double v : {s.exact_squares, s.other_squares, s.error_squares, s.worst_block}) {
    if (!std::isfinite(v) || v < 0) return false;
  }
  return std::isfinite(s.product);
}

void parseShadows(const RunLogCommunicator& in, RunLogComm* out) {
  out->dropped_shadows = get(in.dropped_shadows);
  for (const RunLogShadow& row : in.shadows) {
    const uint32_t key = row.key.load(std::memory_order_relaxed);
    if (key == 0) continue;
    const uint32_t op = (key - 1) & 0xff, element = (key - 1) >> 16 & 3, scale = (key - 1) >> 18 & 3;
    const uint32_t block_log2 = (key - 1) >> 20;
    if (op >= static_cast<uint32_t>(CollectiveOp::kCount) || element >= kElementFormatCount || scale > 1 || block_log2 < 5 ||
        block_log2 > 8)
      continue;  // never ours
    RunLogShadowed shadow;
    shadow.op = static_cast<CollectiveOp>(op);
    shadow.type = static_cast<ncclDataType_t>(std::min<uint32_t>((key - 1) >> 8 & 0xff, ncclNumTypes));
    shadow.format = {static_cast<ElementFormat>(element), static_cast<ScaleFormat>(scale),
                     static_cast<uint16_t>(1u << block_log2)};
    shadow.bytes = get(row.bytes);
    shadow.samples = get(row.samples);
    shadow.sums = {row.exact_squares.load(), row.other_squares.load(), row.error_squares.load(),
                   row.product.load(),       get(row.elements),        get(row.flushed),
                   get(row.not_finite),      row.worst_block.load()};
    shadow.exact_us = medianOf(row.exact_us, shadow.samples);
    shadow.compressed_us = medianOf(row.compressed_us, shadow.samples);
    if (shadow.samples != 0 && soundSums(shadow.sums)) out->shadows.push_back(shadow);
  }
}

void parseSizes(const RunLogCommunicator& in, RunLogComm* out) {
  out->dropped_sizes = get(in.dropped_sizes);
  for (const RunLogSize& row : in.sizes) {
    const uint32_t key = row.key.load(std::memory_order_relaxed);
    if (key == 0) continue;
    const uint32_t op = (key - 1) & 0xff;
    const uint32_t exponent = (key - 1) >> 16;
    if (op >= static_cast<uint32_t>(CollectiveOp::kCount) || exponent > 63) continue;  // never ours
    RunLogSized sized;
    sized.op = static_cast<CollectiveOp>(op);
    sized.type = static_cast<ncclDataType_t>(std::min<uint32_t>((key - 1) >> 8 & 0xff, ncclNumTypes));
    sized.size_bucket = uint64_t{1} << exponent;
    sized.calls = get(row.calls);
    sized.bytes_asked = get(row.bytes_asked);
    sized.bytes_ring = get(row.bytes_ring);
    sized.bytes_sent = get(row.bytes_sent);
    sized.sampled_calls = get(row.sampled_calls);
    sized.waits = get(row.waits);
    sized.exposed_ns = get(row.exposed_ns);
    if (sized.calls != 0) out->sizes.push_back(sized);
  }
}

Status parseMeter(const RunLogFile& file, RunLogMeterRecord* out) {
  const RunLogMeter& m = file.meter;
  const uint32_t state = m.state.load(std::memory_order_relaxed);
  const uint32_t source = m.source.load(std::memory_order_relaxed);
  if (state > static_cast<uint32_t>(MeterState::kRefused) ||
      source > static_cast<uint32_t>(StepSource::kRange))
    return damaged(fmt::format("its meter claims state {} and steps {}", state, source));
  out->state = static_cast<MeterState>(state);
  out->source = static_cast<StepSource>(source);
  out->every = m.every;
  out->warmup = m.warmup;
  out->words = fieldText(m.words);
  out->range = fieldText(m.range);
  out->collectives = get(m.collectives);
  out->event_calls = get(m.event_calls);
  out->steps_begun = get(m.steps);
  out->checked = get(m.checked);
  out->predicted = get(m.predicted);
  out->waits = get(m.waits);
  out->unmeasured = get(m.unmeasured);
  out->captured = get(m.captured);
  out->lost_marks = get(m.lost_marks);
  out->blocking = get(m.blocking);
  for (const RunLogStep& in : file.step) {
    const uint64_t number = get(in.number);
    if (number == 0) continue;
    RunLogStepRecord step;
    step.number = number - 1;
    step.begin_ns = in.begin_ns;
    step.duration_ns = in.duration_ns;
    step.calls = in.calls;
    step.bytes_asked = in.bytes_asked;
    step.bytes_ring = in.bytes_ring;
    step.bytes_sent = in.bytes_sent;
    step.host_blocked_ns = in.host_blocked_ns;
    step.host_behind_ns = in.host_behind_ns;
    step.sampled = in.sampled != 0;
    step.measured = step.sampled && in.measured.load(std::memory_order_relaxed) != 0;
    step.exposed_ns = step.measured ? get(in.exposed_ns) : 0;
    step.waits = in.waits;
    step.unmeasured = in.unmeasured;
    out->steps.push_back(step);
  }
  std::sort(out->steps.begin(), out->steps.end(),
            [](const auto& a, const auto& b) { return a.number < b.number; });
  return {};
}

std::vector<std::string> splitNames(const std::string& text) {
  std::vector<std::string> names;
  std::string name;
  for (const char c : text + " ") {
    if (c != ' ' && c != ',' && c != ';') {
      name += c;
    } else if (!name.empty()) {
      names.push_back(std::move(name));
      name.clear();
    }
  }
  return names;
}

uint64_t saturatingAdd(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }

// The smallest, largest and summed value of one column over the ranks.
struct Spread {
  uint64_t low = UINT64_MAX;
  uint64_t high = 0;
  uint64_t sum = 0;

  void add(uint64_t value) {
    low = std::min(low, value);
    high = std::max(high, value);
    sum = saturatingAdd(sum, value);
  }
};

std::string range(const std::string& low, const std::string& high) {
  return low == high ? low : low + ".." + high;
}
std::string numberCell(const Spread& s) { return range(fmt::format("{}", s.low), fmt::format("{}", s.high)); }
std::string bytesCell(const Spread& s) { return range(formatBytes(s.low), formatBytes(s.high)); }

struct CallMerge {
  Spread calls, asked, ring, sent;
  uint64_t launches = 0, host_ns = 0, in_place = 0;
};

// Ranks' samples of one kind: sums add, of times the slowest rank's counts.
struct ShadowMerge {
  WireFormat format;
  uint64_t samples = 0;
  ErrorSums sums;
  double exact_us = 0;
  double compressed_us = 0;
};

// Communicators that are likely the same one seen from several ranks.
struct CommMerge {
  uint64_t members = 0;
  std::map<Reason, uint64_t> reasons;  // a communicator's ranks agree, unless they never met
  std::set<std::string> notes;
  Spread scratch, connections;
  uint64_t dropped = 0;
  std::map<std::tuple<CollectiveOp, int, Reason>, CallMerge> calls;
  std::map<std::tuple<CollectiveOp, int, uint64_t, int, int, int>, ShadowMerge> shadows;
  uint64_t dropped_shadows = 0;
};

// (ranks, how many earlier communicators of that size its process had made). Ranks of one job make their
// communicators in the same order. One process that drives several ranks makes a communicator's members one
// after the other; such processes have no RANK.
using CommKey = std::pair<uint32_t, uint32_t>;

std::vector<CommKey> commKeys(const RunLogRecord& record) {
  std::vector<CommKey> keys;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> seen;
  for (const RunLogComm& comm : record.communicators) {
    const uint32_t member = record.rank < 0 ? comm.rank : 0;
    keys.emplace_back(comm.ranks, seen[{comm.ranks, member}]++);
  }
  return keys;
}

void mergeShadows(const RunLogComm& comm, CommMerge* merge) {
  merge->dropped_shadows = saturatingAdd(merge->dropped_shadows, comm.dropped_shadows);
  for (const RunLogShadowed& s : comm.shadows) {
    ShadowMerge& m =
        merge->shadows[{s.op, static_cast<int>(s.type), s.bytes, static_cast<int>(s.format.element),
                        static_cast<int>(s.format.scale), s.format.block}];
    m.format = s.format;
    m.samples = std::max(m.samples, s.samples);
    m.sums.exact_squares += s.sums.exact_squares;
    m.sums.other_squares += s.sums.other_squares;
    m.sums.error_squares += s.sums.error_squares;
    m.sums.product += s.sums.product;
    m.sums.elements = saturatingAdd(m.sums.elements, s.sums.elements);
    m.sums.flushed = saturatingAdd(m.sums.flushed, s.sums.flushed);
    m.sums.not_finite = saturatingAdd(m.sums.not_finite, s.sums.not_finite);
    m.sums.worst_block = std::max(m.sums.worst_block, s.sums.worst_block);
    m.exact_us = std::max(m.exact_us, s.exact_us);
    m.compressed_us = std::max(m.compressed_us, s.compressed_us);
  }
}

void mergeCommunicator(const RunLogComm& comm, CommMerge* merge) {
  ++merge->members;
  ++merge->reasons[comm.reason];
  if (!comm.note.empty()) merge->notes.insert(comm.note);
  merge->scratch.add(comm.scratch_bytes);
  merge->connections.add(comm.connection_bytes);
  merge->dropped = saturatingAdd(merge->dropped, comm.dropped);
  for (const RunLogCall& call : comm.calls) {
    CallMerge& m = merge->calls[{call.op, static_cast<int>(call.type), call.reason}];
    m.calls.add(call.calls);
    m.asked.add(call.bytes_asked);
    m.ring.add(call.bytes_ring);
    m.sent.add(call.bytes_sent);
    m.launches = saturatingAdd(m.launches, call.launches);
    m.host_ns = saturatingAdd(m.host_ns, call.host_ns);
    m.in_place = saturatingAdd(m.in_place, call.in_place);
  }
  mergeShadows(comm, merge);
}

std::string callWords(Reason reason, const CallMerge& m) {
  if (reason != Reason::kCompressed) return fmt::format("exact: {}", reasonText(reason));
  const double calls = static_cast<double>(std::max<uint64_t>(m.calls.sum, 1));
  std::string text =
      fmt::format("compressed, {:.1f} launches and {:.0f} us of host time a call",
                  static_cast<double>(m.launches) / calls, static_cast<double>(m.host_ns) / calls / 1e3);
  if (m.in_place != 0) text += fmt::format(", {} in place", m.in_place);
  return text;
}

void appendRows(const std::vector<std::vector<std::string>>& rows, std::string* out) {
  // The last column is words and stays unpadded; the first two are left-aligned.
  std::vector<size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  for (const auto& row : rows) {
    *out += ' ';
    for (size_t i = 0; i < row.size(); ++i) {
      if (i + 1 == row.size()) {
        *out += "  " + row[i];
      } else if (i < 2) {
        *out += fmt::format(" {:<{}}", row[i], width[i]);
      } else {
        *out += fmt::format("  {:>{}}", row[i], width[i]);
      }
    }
    while (!out->empty() && out->back() == ' ') out->pop_back();
    *out += '\n';
  }
}

void appendShadows(const CommMerge& merge, std::string* out) {
  if (merge.shadows.empty()) return;
  *out += "  In the shadow, samples compressed beside the exact calls:\n";
  std::vector<std::vector<std::string>> rows = {{"call", "type", "size", "samples", "error", "SNR dB",
                                                 "cosine", "to zero", "worst block", "exact ms",
                                                 "compressed ms", "gain", "format"}};
  uint64_t not_finite = 0;
  for (const auto& [kind, m] : merge.shadows) {
    const ErrorFigures f = errorFigures(m.sums);
    not_finite = saturatingAdd(not_finite, m.sums.not_finite);
    rows.push_back({opName(std::get<0>(kind)), dataTypeName(static_cast<ncclDataType_t>(std::get<1>(kind))),
                    formatBytes(std::get<2>(kind)), fmt::format("{}", m.samples),
                    fmt::format("{:.4f}", f.relative_rms), fmt::format("{:.1f}", f.snr_db),
                    fmt::format("{:.6f}", f.cosine), fmt::format("{:.3f} %", 100 * f.flushed_share),
                    fmt::format("{:.3f}", f.worst_block), fmt::format("{:.3f}", m.exact_us / 1e3),
                    fmt::format("{:.3f}", m.compressed_us / 1e3),
                    m.compressed_us > 0 ? fmt::format("{:.2f}", m.exact_us / m.compressed_us) : "-",
                    fmt::format("{}/{}/{}", elementFormatName(m.format.element), m.format.block,
                                scaleFormatName(m.format.scale))});
  }
  appendRows(rows, out);
  if (not_finite != 0) *out += fmt::format("  {} elements were not finite and are left out\n", not_finite);
  if (merge.dropped_shadows != 0)
    *out += fmt::format("  {} further samples ran and were not kept: no free row or record\n",
                        merge.dropped_shadows);
}

// What a communicator that is chosen does in its mode.
std::string activity(const CommMerge& merge) {
  for (const auto& [call, m] : merge.calls) {
    if (std::get<Reason>(call) == Reason::kShadow) return "exact, watched in the shadow";
    if (std::get<Reason>(call) == Reason::kNoise) return "exact, with noise";
  }
  return "compresses";
}

void appendCommunicator(const CommKey& key, const CommMerge& merge, std::string* out) {
  const uint64_t groups = (merge.members + key.first - 1) / key.first;
  *out += groups > 1 ? fmt::format("{} communicators of {} ranks", groups, key.first)
                     : fmt::format("Communicator {} of {} rank{}", key.second + 1, key.first,
                                   key.first == 1 ? "" : "s");
  std::string why;
  for (const auto& [reason, count] : merge.reasons) {
    if (!why.empty()) why += "; ";
    why += reason == Reason::kCompressed ? activity(merge) : fmt::format("exact: {}", reasonText(reason));
    if (merge.reasons.size() > 1) why += fmt::format(" ({} ranks)", count);
  }
  *out += ": " + why;
  if (merge.scratch.high != 0) *out += fmt::format("; scratch {} a rank", bytesCell(merge.scratch));
  if (merge.connections.high != 0)
    *out += fmt::format("; connections took {} a rank", bytesCell(merge.connections));
  *out += '\n';
  for (const std::string& note : merge.notes) *out += fmt::format("  note: {}\n", note);

  if (merge.calls.empty()) {
    *out += "  no calls\n";
    return;
  }
  std::vector<std::vector<std::string>> rows = {
      {"call", "type", "calls", "asked", "exact ring", "sent", "ratio", ""}};
  for (const auto& [call, m] : merge.calls) {
    const auto& [op, type, reason] = call;
    rows.push_back({opName(op), dataTypeName(static_cast<ncclDataType_t>(type)), numberCell(m.calls),
                    bytesCell(m.asked), bytesCell(m.ring), bytesCell(m.sent),
                    m.ring.sum == 0 ? std::string("-")
                                    : fmt::format("{:.3f}", static_cast<double>(m.sent.sum) /
                                                                static_cast<double>(m.ring.sum)),
                    callWords(reason, m)});
  }
  appendRows(rows, out);
  if (merge.dropped != 0)
    *out += fmt::format("  {} further calls are not in this table: the log had no free row\n", merge.dropped);
  appendShadows(merge, out);
}

std::string who(const RunLogRecord& r) {
  return r.rank >= 0 ? fmt::format("rank {}", r.rank) : fmt::format("process {}", r.pid);
}

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

// What every process reports alike is said once; where they differ each value is named with its ranks.
void appendShared(const char* what, const std::vector<RunLogRecord>& records,
                  std::string RunLogRecord::* field, std::string* out) {
  std::map<std::string, std::vector<std::string>> values;
  for (const RunLogRecord& r : records) values[r.*field].push_back(who(r));
  for (const auto& [value, holders] : values) {
    if (value.empty()) continue;
    if (values.size() == 1) {
      *out += fmt::format("{}: {}\n", what, value);
    } else if (holders.size() <= 8) {
      *out += fmt::format("{} ({}): {}\n", what, join(holders, ", "), value);
    } else {
      *out += fmt::format("{} ({} processes): {}\n", what, holders.size(), value);
    }
  }
}

constexpr const char* kStates[] = {"off", "on", "refused"};
constexpr const char* kSources[] = {"none", "marked", "detected", "range"};

nlohmann::ordered_json meterJson(const RunLogMeterRecord& m) {
  nlohmann::ordered_json steps = nlohmann::ordered_json::array();
  for (const RunLogStepRecord& s : m.steps) {
    steps.push_back(
        {{"number", s.number},
         {"begin_ns", s.begin_ns},
         {"duration_ns", s.duration_ns},
         {"calls", s.calls},
         {"bytes_asked", s.bytes_asked},
         {"bytes_exact_ring", s.bytes_ring},
         {"bytes_sent", s.bytes_sent},
         {"host_blocked_ns", s.host_blocked_ns},
         {"host_behind_ns", s.host_behind_ns},
         {"sampled", s.sampled},
         {"exposed_ns", s.measured ? nlohmann::ordered_json(s.exposed_ns) : nlohmann::ordered_json()},
         {"waits", s.waits},
         {"unmeasured", s.unmeasured}});
  }
  return {{"state", kStates[static_cast<size_t>(m.state)]},
          {"words", m.words},
          {"steps_from", kSources[static_cast<size_t>(m.source)]},
          {"range", m.range},
          {"every", m.every},
          {"warmup", m.warmup},
          {"collectives", m.collectives},
          {"event_calls", m.event_calls},
          {"steps_begun", m.steps_begun},
          {"checked", m.checked},
          {"predicted", m.predicted},
          {"waits", m.waits},
          {"unmeasured", m.unmeasured},
          {"captured", m.captured},
          {"lost_marks", m.lost_marks},
          {"blocking_streams", m.blocking},
          {"steps", std::move(steps)}};
}

// Takes fields out of a JSON object; the first that is missing or of another kind is remembered.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, Status* status) : object_(object), status_(status) {
    if (!object.is_object()) fail("an object");
  }
  template <class T>
  void number(const char* name, T* out, bool needed = true) {
    const auto* value = find(name, needed);
    if (value == nullptr) return;
    if (value->is_number_unsigned() &&
        value->get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<T>::max())) {
      *out = static_cast<T>(value->get<uint64_t>());
    } else if (std::is_signed_v<T> && value->is_number_integer() && value->get<int64_t>() < 0 &&
               value->get<int64_t>() >= static_cast<int64_t>(std::numeric_limits<T>::min())) {
      *out = static_cast<T>(value->get<int64_t>());
    } else {
      fail(name);
    }
  }
  void real(const char* name, double* out) {
    const auto* value = find(name, true);
    if (value == nullptr) return;
    if (!value->is_number() || !std::isfinite(value->get<double>())) return fail(name);
    *out = value->get<double>();
  }
  void boolean(const char* name, bool* out) {
    const auto* value = find(name, true);
    if (value == nullptr) return;
    if (!value->is_boolean()) return fail(name);
    *out = value->get<bool>();
  }
  void text(const char* name, std::string* out, bool needed = true) {
    const auto* value = find(name, needed);
    if (value == nullptr) return;
    if (!value->is_string()) return fail(name);
    *out = printable(value->get<std::string>());
  }
  // The index of the text among `words`.
  template <class T, class Name>
  void choice(const char* name, size_t count, Name&& word, T* out) {
    const auto* value = find(name, true);
    if (value == nullptr) return;
    for (size_t i = 0; value->is_string() && i < count; ++i) {
      if (value->get_ref<const std::string&>() != word(i)) continue;
      *out = static_cast<T>(i);
      return;
    }
    fail(name);
  }
  // An array's elements, at most `most`.
  template <class Each>
  void list(const char* name, size_t most, bool needed, Each&& each) {
    const auto* value = find(name, needed);
    if (value == nullptr) return;
    if (!value->is_array() || value->size() > most) return fail(name);
    for (const auto& element : *value) {
      if (status_->ok()) each(element);
    }
  }
  const nlohmann::json* find(const char* name, bool needed) {
    if (!status_->ok()) return nullptr;
    const auto found = object_.find(name);
    if (found != object_.end()) return &*found;
    if (needed) fail(name);
    return nullptr;
  }
  void fail(const char* name) {
    if (status_->ok()) *status_ = damaged(fmt::format("its field `{}`", name));
  }

 private:
  const nlohmann::json& object_;
  Status* status_;
};

const char* typeWord(size_t i) { return dataTypeName(static_cast<ncclDataType_t>(i)); }
const char* elementWord(size_t i) { return elementFormatName(static_cast<ElementFormat>(i)); }
const char* scaleWord(size_t i) { return scaleFormatName(static_cast<ScaleFormat>(i)); }
const char* opWord(size_t i) { return opName(static_cast<CollectiveOp>(i)); }
const char* reasonWord(size_t i) { return reasonText(static_cast<Reason>(i)); }

void readMeter(const nlohmann::json& json, Status* status, RunLogMeterRecord* m) {
  JsonFields f(json, status);
  f.choice("state", std::size(kStates), [](size_t i) { return kStates[i]; }, &m->state);
  f.choice("steps_from", std::size(kSources), [](size_t i) { return kSources[i]; }, &m->source);
  f.text("words", &m->words);
  f.text("range", &m->range, false);
  f.number("every", &m->every);
  f.number("warmup", &m->warmup);
  f.number("collectives", &m->collectives);
  f.number("event_calls", &m->event_calls);
  f.number("steps_begun", &m->steps_begun);
  f.number("checked", &m->checked);
  f.number("predicted", &m->predicted);
  f.number("waits", &m->waits);
  f.number("unmeasured", &m->unmeasured);
  f.number("captured", &m->captured);
  f.number("lost_marks", &m->lost_marks);
  f.number("blocking_streams", &m->blocking);
  f.list("steps", kRunLogSteps, true, [&](const nlohmann::json& step) {
    RunLogStepRecord s;
    JsonFields g(step, status);
    g.number("number", &s.number);
    g.number("begin_ns", &s.begin_ns);
    g.number("duration_ns", &s.duration_ns);
    g.number("calls", &s.calls);
    g.number("bytes_asked", &s.bytes_asked);
    g.number("bytes_exact_ring", &s.bytes_ring);
    g.number("bytes_sent", &s.bytes_sent);
    g.number("host_blocked_ns", &s.host_blocked_ns);
    g.number("host_behind_ns", &s.host_behind_ns);
    g.boolean("sampled", &s.sampled);
    const nlohmann::json* exposed = g.find("exposed_ns", true);
    s.measured = exposed != nullptr && !exposed->is_null();
    if (s.measured) g.number("exposed_ns", &s.exposed_ns);
    g.number("waits", &s.waits);
    g.number("unmeasured", &s.unmeasured);
    m->steps.push_back(s);
  });
}

void readCommunicator(const nlohmann::json& json, Status* status, RunLogComm* comm) {
  JsonFields f(json, status);
  f.number("index", &comm->slot);
  f.number("rank", &comm->rank);
  f.number("ranks", &comm->ranks);
  f.choice("reason", static_cast<size_t>(Reason::kCount), reasonWord, &comm->reason);
  f.text("note", &comm->note);
  f.number("scratch_bytes", &comm->scratch_bytes);
  f.number("connection_bytes", &comm->connection_bytes);
  f.number("calls_without_row", &comm->dropped);
  if (status->ok() && (comm->ranks == 0 || comm->ranks > kMostRanks || comm->rank >= comm->ranks))
    f.fail("rank");
  f.list("calls", kRunLogRows, true, [&](const nlohmann::json& call) {
    RunLogCall c;
    JsonFields g(call, status);
    g.choice("operation", static_cast<size_t>(CollectiveOp::kCount), opWord, &c.op);
    g.choice("type", ncclNumTypes + 1, typeWord, &c.type);
    g.choice("reason", static_cast<size_t>(Reason::kCount), reasonWord, &c.reason);
    g.number("calls", &c.calls);
    g.number("bytes_asked", &c.bytes_asked);
    g.number("bytes_exact_ring", &c.bytes_ring);
    g.number("bytes_sent", &c.bytes_sent);
    g.number("launches", &c.launches);
    g.number("host_ns", &c.host_ns);
    g.number("in_place", &c.in_place);
    comm->calls.push_back(c);
  });
  f.list("sizes", kRunLogSizes, false, [&](const nlohmann::json& size) {
    RunLogSized s;
    JsonFields g(size, status);
    g.choice("operation", static_cast<size_t>(CollectiveOp::kCount), opWord, &s.op);
    g.choice("type", ncclNumTypes + 1, typeWord, &s.type);
    g.number("size_bucket", &s.size_bucket);
    g.number("calls", &s.calls);
    g.number("bytes_asked", &s.bytes_asked);
    g.number("bytes_exact_ring", &s.bytes_ring);
    g.number("bytes_sent", &s.bytes_sent);
    g.number("sampled_calls", &s.sampled_calls);
    g.number("waits", &s.waits);
    g.number("exposed_ns", &s.exposed_ns);
    comm->sizes.push_back(s);
  });
  f.number("calls_without_size", &comm->dropped_sizes, false);
  f.list("shadow", kRunLogShadows, false, [&](const nlohmann::json& sample) {
    RunLogShadowed s;
    JsonFields g(sample, status);
    g.choice("operation", static_cast<size_t>(CollectiveOp::kCount), opWord, &s.op);
    g.choice("type", ncclNumTypes + 1, typeWord, &s.type);
    g.choice("element", kElementFormatCount, elementWord, &s.format.element);
    g.choice("scale", 2, scaleWord, &s.format.scale);
    g.number("block", &s.format.block);
    g.number("bytes", &s.bytes);
    g.number("samples", &s.samples);
    g.number("elements", &s.sums.elements);
    g.number("flushed", &s.sums.flushed);
    g.number("not_finite", &s.sums.not_finite);
    g.real("exact_squares", &s.sums.exact_squares);
    g.real("other_squares", &s.sums.other_squares);
    g.real("error_squares", &s.sums.error_squares);
    g.real("product", &s.sums.product);
    g.real("worst_block", &s.sums.worst_block);
    g.real("exact_us", &s.exact_us);
    g.real("compressed_us", &s.compressed_us);
    if (status->ok() && !soundSums(s.sums)) g.fail("error_squares");
    comm->shadows.push_back(s);
  });
  f.number("samples_without_row", &comm->dropped_shadows, false);
}

std::string versionText(int code) {
  if (code <= 0) return "";
  return code < 10000 ? fmt::format("{}.{}.{}", code / 1000, code / 100 % 10, code % 100)
                      : fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100);
}

}  // namespace

Result<RunLogRecord> parseRunLog(std::span<const std::byte> bytes) {
  if (bytes.size() < offsetof(RunLogFile, pid)) return damaged("too short");
  if (std::memcmp(bytes.data(), kRunLogMagic, sizeof kRunLogMagic) != 0)
    return damaged("it does not begin like one");
  uint32_t version = 0;
  std::memcpy(&version, bytes.data() + offsetof(RunLogFile, version), sizeof version);
  if (version != kRunLogVersion) {
    return damaged(fmt::format("version {}, this command reads version {}", version, kRunLogVersion));
  }
  uint32_t size = 0;
  std::memcpy(&size, bytes.data() + offsetof(RunLogFile, bytes), sizeof size);
  if (size != sizeof(RunLogFile) || bytes.size() != sizeof(RunLogFile)) {
    return damaged(fmt::format("{} bytes, expected {}", bytes.size(), sizeof(RunLogFile)));
  }
  // A copy in an object of the right type: the caller's bytes may be unaligned.
  const auto file = std::make_unique<RunLogFile>();
  std::memcpy(static_cast<void*>(file.get()), bytes.data(), sizeof(RunLogFile));

  RunLogRecord record;
  record.pid = file->pid;
  record.rank = file->rank;
  record.world = file->world;
  record.nccl_version = file->nccl_version;
  if (record.rank < -1 || record.world < 0 || static_cast<uint32_t>(record.world) > kMostRanks) {
    return damaged(fmt::format("it claims rank {} of {}", record.rank, record.world));
  }
  record.host = fieldText(file->host);
  record.engine = fieldText(file->engine);
  record.nccl_path = fieldText(file->nccl_path);
  record.settings = fieldText(file->settings);
  record.codec = fieldText(file->codec);
  record.error = fieldText(file->error);
  record.unknown_entry_points = splitNames(fieldText(file->unknown_entry_points));
  record.communicators_made = file->communicators.load(std::memory_order_relaxed);
  record.closed = file->closed.load(std::memory_order_relaxed) != 0;
  const uint32_t slots = std::min(record.communicators_made, kRunLogCommunicators);
  for (uint32_t i = 0; i < slots; ++i) {
    // 0: the process ended between taking the slot and filling it.
    if (file->communicator[i].used.load(std::memory_order_relaxed) == 0) continue;
    RunLogComm comm;
    comm.slot = i;
    if (Status status = parseCommunicator(file->communicator[i], &comm); !status.ok()) return status;
    parseSizes(file->communicator[i], &comm);
    parseShadows(file->communicator[i], &comm);
    record.communicators.push_back(std::move(comm));
  }
  if (Status status = parseMeter(*file, &record.meter); !status.ok()) return status;
  return record;
}

Result<RunLogRecord> parseRunLogJson(std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return damaged("it is no JSON object");
  Status status;
  RunLogRecord r;
  JsonFields f(json, &status);
  std::string format;
  int version = 0;
  f.text("format", &format);
  f.number("version", &version);
  if (status.ok() && format != "halfwire-run-log") return damaged("its format is another one");
  if (status.ok() && version != kRunLogJsonVersion) {
    return damaged(fmt::format("version {}, this command reads version {}", version, kRunLogJsonVersion));
  }
  f.number("pid", &r.pid);
  f.number("rank", &r.rank);
  f.number("world", &r.world);
  f.text("host", &r.host);
  f.text("engine", &r.engine);
  f.number("nccl_version", &r.nccl_version);
  f.text("nccl_path", &r.nccl_path);
  f.text("settings", &r.settings);
  f.text("codec", &r.codec);
  f.boolean("ended_normally", &r.closed);
  f.text("error", &r.error);
  f.number("communicators_made", &r.communicators_made);
  f.list("unknown_entry_points", 4096, true, [&](const nlohmann::json& name) {
    if (!name.is_string()) return f.fail("unknown_entry_points");
    r.unknown_entry_points.push_back(printable(name.get<std::string>()));
  });
  f.list("communicators", kRunLogCommunicators, true, [&](const nlohmann::json& comm) {
    readCommunicator(comm, &status, &r.communicators.emplace_back());
  });
  if (const auto* meter = f.find("meter", false)) readMeter(*meter, &status, &r.meter);
  if (status.ok() && (r.rank < -1 || r.world < 0 || static_cast<uint32_t>(r.world) > kMostRanks))
    f.fail("rank");
  if (!status.ok()) return status;
  return r;
}

Result<RunLogRecord> readRunLog(const std::string& path) {
  const auto failed = [&](const char* what) {
    return Status(StatusCode::kInvalidData, fmt::format("cannot read {}: {}", path, what));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return failed(std::strerror(errno));
  std::vector<std::byte> bytes(sizeof(RunLogFile) + 1);
  struct stat info{};
  size_t have = 0;
  const char* problem = nullptr;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) problem = "not a regular file";
  while (problem == nullptr && have < bytes.size()) {
    const ssize_t n = read(fd, bytes.data() + have, bytes.size() - have);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) problem = std::strerror(errno);
    if (n <= 0) break;
    have += static_cast<size_t>(n);
  }
  close(fd);
  if (problem != nullptr) return failed(problem);
  auto record = parseRunLog(std::span(bytes).first(have));
  if (!record.ok())
    return Status(record.status().code(), fmt::format("{}: {}", path, record.status().message()));
  return record;
}

std::vector<RunLogRecord> readRunLogs(const std::string& directory, std::vector<std::string>* problems) {
  std::vector<RunLogRecord> records;
  DIR* dir = opendir(directory.c_str());
  if (dir == nullptr) {
    problems->push_back(fmt::format("cannot read {}: {}", directory, std::strerror(errno)));
    return records;
  }
  std::vector<std::string> names;
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (name.ends_with(".bin")) names.push_back(name);
  }
  closedir(dir);
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    auto record = readRunLog(directory + "/" + name);
    if (record.ok()) {
      records.push_back(std::move(record).value());
    } else {
      problems->push_back(record.status().message());
    }
  }
  std::stable_sort(records.begin(), records.end(), [](const RunLogRecord& a, const RunLogRecord& b) {
    return std::tuple(a.rank < 0, a.rank, a.pid) < std::tuple(b.rank < 0, b.rank, b.pid);
  });
  return records;
}

Result<RunLogRecord> readRunLogJson(const std::string& path) {
  constexpr size_t kMost = 64u << 20;
  const auto failed = [&](const char* what) {
    return Status(StatusCode::kInvalidData, fmt::format("cannot read {}: {}", path, what));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return failed(std::strerror(errno));
  std::string text;
  struct stat info{};
  const char* problem = nullptr;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) problem = "not a regular file";
  if (problem == nullptr && static_cast<uint64_t>(info.st_size) > kMost) problem = "larger than 64 MiB";
  char buffer[65536];
  while (problem == nullptr && text.size() <= kMost) {
    const ssize_t n = read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) problem = std::strerror(errno);
    if (n <= 0) break;
    text.append(buffer, static_cast<size_t>(n));
  }
  close(fd);
  if (problem != nullptr) return failed(problem);
  auto record = parseRunLogJson(text);
  if (!record.ok())
    return Status(record.status().code(), fmt::format("{}: {}", path, record.status().message()));
  return record;
}

std::string runLogJson(const RunLogRecord& record) {
  using nlohmann::ordered_json;
  ordered_json communicators = ordered_json::array();
  for (const RunLogComm& comm : record.communicators) {
    ordered_json calls = ordered_json::array();
    for (const RunLogCall& call : comm.calls) {
      calls.push_back({{"operation", opName(call.op)},
                       {"type", dataTypeName(call.type)},
                       {"compressed", call.reason == Reason::kCompressed},
                       {"reason", reasonText(call.reason)},
                       {"calls", call.calls},
                       {"bytes_asked", call.bytes_asked},
                       {"bytes_exact_ring", call.bytes_ring},
                       {"bytes_sent", call.bytes_sent},
                       {"launches", call.launches},
                       {"host_ns", call.host_ns},
                       {"in_place", call.in_place}});
    }
    ordered_json sizes = ordered_json::array();
    for (const RunLogSized& s : comm.sizes) {
      sizes.push_back({{"operation", opName(s.op)},
                       {"type", dataTypeName(s.type)},
                       {"size_bucket", s.size_bucket},
                       {"calls", s.calls},
                       {"bytes_asked", s.bytes_asked},
                       {"bytes_exact_ring", s.bytes_ring},
                       {"bytes_sent", s.bytes_sent},
                       {"sampled_calls", s.sampled_calls},
                       {"waits", s.waits},
                       {"exposed_ns", s.exposed_ns}});
    }
    ordered_json shadows = ordered_json::array();
    for (const RunLogShadowed& s : comm.shadows) {
      const ErrorFigures figures = errorFigures(s.sums);
      shadows.push_back(
          {{"operation", opName(s.op)},
           {"type", dataTypeName(s.type)},
           {"element", elementFormatName(s.format.element)},
           {"block", s.format.block},
           {"scale", scaleFormatName(s.format.scale)},
           {"bytes", s.bytes},
           {"samples", s.samples},
           {"relative_rms", figures.relative_rms},
           {"snr_db", std::isfinite(figures.snr_db) ? ordered_json(figures.snr_db) : ordered_json()},
           {"cosine", figures.cosine},
           {"elements", s.sums.elements},
           {"flushed", s.sums.flushed},
           {"not_finite", s.sums.not_finite},
           {"exact_squares", s.sums.exact_squares},
           {"other_squares", s.sums.other_squares},
           {"error_squares", s.sums.error_squares},
           {"product", s.sums.product},
           {"worst_block", s.sums.worst_block},
           {"exact_us", s.exact_us},
           {"compressed_us", s.compressed_us}});
    }
    communicators.push_back({{"index", comm.slot},
                             {"rank", comm.rank},
                             {"ranks", comm.ranks},
                             {"compressed", comm.reason == Reason::kCompressed},
                             {"reason", reasonText(comm.reason)},
                             {"note", comm.note},
                             {"scratch_bytes", comm.scratch_bytes},
                             {"connection_bytes", comm.connection_bytes},
                             {"calls_without_row", comm.dropped},
                             {"calls", std::move(calls)},
                             {"sizes", std::move(sizes)},
                             {"calls_without_size", comm.dropped_sizes},
                             {"shadow", std::move(shadows)},
                             {"samples_without_row", comm.dropped_shadows}});
  }
  const ordered_json json = {{"format", "halfwire-run-log"},
                             {"version", kRunLogJsonVersion},
                             {"pid", record.pid},
                             {"rank", record.rank},
                             {"world", record.world},
                             {"host", record.host},
                             {"engine", record.engine},
                             {"nccl_version", record.nccl_version},
                             {"nccl_path", record.nccl_path},
                             {"settings", record.settings},
                             {"codec", record.codec},
                             {"ended_normally", record.closed},
                             {"error", record.error},
                             {"unknown_entry_points", record.unknown_entry_points},
                             {"communicators_made", record.communicators_made},
                             {"communicators", std::move(communicators)},
                             {"meter", meterJson(record.meter)}};
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string runLogTable(const std::vector<RunLogRecord>& records) {
  std::string out;
  std::set<std::string> engines, codecs;
  std::map<CommKey, CommMerge> merged;
  std::vector<std::string> killed;
  uint64_t without_slot = 0;
  for (const RunLogRecord& r : records) {
    if (!r.engine.empty()) {
      const std::string version = r.engine == "nccl" ? versionText(r.nccl_version) : "";
      engines.insert(r.engine == "host" ? "host engine" : version.empty() ? r.engine : "NCCL " + version);
    }
    if (!r.codec.empty()) codecs.insert(r.codec);
    if (!r.closed) killed.push_back(who(r));
    const std::vector<CommKey> keys = commKeys(r);
    for (size_t i = 0; i < keys.size(); ++i) mergeCommunicator(r.communicators[i], &merged[keys[i]]);
    if (r.communicators_made > kRunLogCommunicators)
      without_slot += r.communicators_made - kRunLogCommunicators;
  }
  out += fmt::format("Halfwire: {} process{}", records.size(), records.size() == 1 ? "" : "es");
  for (const std::string& engine : engines) out += ", " + engine;
  for (const std::string& codec : codecs) out += ", codec " + codec;
  out += '\n';
  appendShared("settings", records, &RunLogRecord::settings, &out);
  for (const auto& [key, merge] : merged) appendCommunicator(key, merge, &out);
  out +=
      "Bytes are one rank's. \"exact ring\" is what it would have sent with exact ring collectives; the "
      "ratio is sent over "
      "that.\n";
  if (without_slot != 0)
    out += fmt::format("{} further communicators found no room in the logs\n", without_slot);
  if (!killed.empty() && killed.size() <= 8) {
    out += fmt::format(
        "ended without closing the log (killed, or left by _exit): {}; counts are up to that moment\n",
        join(killed, ", "));
  } else if (!killed.empty()) {
    out += fmt::format("{} processes ended without closing the log; counts are up to that moment\n",
                       killed.size());
  }
  appendShared("error", records, &RunLogRecord::error, &out);
  std::set<std::string> unknown;
  for (const RunLogRecord& r : records)
    unknown.insert(r.unknown_entry_points.begin(), r.unknown_entry_points.end());
  if (!unknown.empty()) {
    out += fmt::format(
        "functions of the loaded NCCL that this version does not know, calls to them are neither counted nor "
        "compressed: {}\n",
        join({unknown.begin(), unknown.end()}, ", "));
  }
  return out;
}

std::string nothingIntercepted() {
  return "Nothing was intercepted: no process made an NCCL communicator that Halfwire saw. Likely causes:\n"
         "  - the program never made one (one GPU, another backend such as gloo, or it ended before)\n"
         "  - NCCL is linked statically into the program: use a build that loads libnccl.so\n"
         "  - the program takes NCCL from a handle that was left alone: an error above says why, "
         "HALFWIRE_HANDLES=off asks for it, and dlmopen and RTLD_DEEPBIND pass every preload by\n"
         "  - a launcher started the workers elsewhere (ssh, Ray, containers) without LD_PRELOAD and "
         "HALFWIRE_*: pass them on, "
         "or run `halfwire run` around each worker\n";
}

}  // namespace halfwire
