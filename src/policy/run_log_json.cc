#include "policy/run_log_json.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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

// A field's text up to its zero or its end, with '?' for every byte that a terminal or JSON could stumble
// over.
template <size_t N>
std::string fieldText(const char (&field)[N]) {
  std::string_view rest(field, strnlen(field, N));
  std::string text;
  while (!rest.empty()) {
    const size_t n = printableSequence(rest);
    text += n == 0 ? std::string_view("?") : rest.substr(0, n);
    rest.remove_prefix(n == 0 ? 1 : n);
  }
  return text;
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

// Communicators that are likely the same one seen from several ranks.
struct CommMerge {
  uint64_t members = 0;
  std::map<Reason, uint64_t> reasons;  // a communicator's ranks agree, unless they never met
  std::set<std::string> notes;
  Spread scratch, connections;
  uint64_t dropped = 0;
  std::map<std::tuple<CollectiveOp, int, Reason>, CallMerge> calls;
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

void appendCommunicator(const CommKey& key, const CommMerge& merge, std::string* out) {
  const uint64_t groups = (merge.members + key.first - 1) / key.first;
  *out += groups > 1 ? fmt::format("{} communicators of {} ranks", groups, key.first)
                     : fmt::format("Communicator {} of {} rank{}", key.second + 1, key.first,
                                   key.first == 1 ? "" : "s");
  std::string why;
  for (const auto& [reason, count] : merge.reasons) {
    if (!why.empty()) why += "; ";
    why += reason == Reason::kCompressed ? std::string("compresses")
                                         : fmt::format("exact: {}", reasonText(reason));
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
    record.communicators.push_back(std::move(comm));
  }
  return record;
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
    communicators.push_back({{"index", comm.slot},
                             {"rank", comm.rank},
                             {"ranks", comm.ranks},
                             {"compressed", comm.reason == Reason::kCompressed},
                             {"reason", reasonText(comm.reason)},
                             {"note", comm.note},
                             {"scratch_bytes", comm.scratch_bytes},
                             {"connection_bytes", comm.connection_bytes},
                             {"calls_without_row", comm.dropped},
                             {"calls", std::move(calls)}});
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
                             {"communicators", std::move(communicators)}};
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
         "  - the program takes NCCL's functions from a handle of its own dlopen: LD_PRELOAD does not reach "
         "it\n"
         "  - a launcher started the workers elsewhere (ssh, Ray, containers) without LD_PRELOAD and "
         "HALFWIRE_*: pass them on, "
         "or run `halfwire run` around each worker\n";
}

}  // namespace halfwire
