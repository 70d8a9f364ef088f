#include "trace/nsys_reader.h"

#include <fmt/format.h>
#include <sqlite3.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include "trace/numbers.h"
#include "trace/timeline_builder.h"

namespace halfwire::trace {
namespace {

struct CloseDb {
  void operator()(sqlite3* db) const { sqlite3_close(db); }
};
struct FinishStatement {
  void operator()(sqlite3_stmt* s) const { sqlite3_finalize(s); }
};

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

// "step 12", "ProfilerStep#12", "iteration_12": the names that training loops give their NVTX ranges.
bool stepNumber(std::string_view text, int64_t* number) {
  const std::string name = lower(text);
  for (std::string_view word :
       {"profilerstep", "train_step", "training_step", "step", "iteration", "iter", "batch"}) {
    if (std::string_view(name).substr(0, word.size()) != word) continue;
    std::string_view rest = std::string_view(name).substr(word.size());
    while (!rest.empty() && std::string_view(" #:_-=").find(rest.front()) != std::string_view::npos)
      rest.remove_prefix(1);
    return !rest.empty() && std::isdigit(static_cast<unsigned char>(rest.front())) &&
           parseLooseInteger(rest, number);
  }
  return false;
}

class Reader {
 public:
  Reader(const std::string& path, const CommPatterns& patterns, const ReadOptions& options)
      : path_(path), patterns_(patterns), options_(options) {}

  Result<Timeline> run() {
    if (Status s = open(); !s.ok()) return s;
    timeline_.file = path_;
    timeline_.format = Format::kNsys;
    if (Status s = tables(); !s.ok()) return s;
    const auto part = [&](int done) {
      if (options_.progress)
        options_.progress(timeline_.json_bytes * static_cast<uint64_t>(done) / 6, timeline_.json_bytes);
    };
    if (Status s = strings(); !s.ok()) return s;
    part(1);
    if (Status s = device("CUPTI_ACTIVITY_KIND_KERNEL", ActivityKind::kCompute); !s.ok()) return s;
    if (Status s = device("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ActivityKind::kCompute); !s.ok()) return s;
    part(2);
    if (Status s = device("CUPTI_ACTIVITY_KIND_MEMCPY", ActivityKind::kCopy); !s.ok()) return s;
    if (Status s = device("CUPTI_ACTIVITY_KIND_MEMSET", ActivityKind::kSet); !s.ok()) return s;
    part(3);
    if (Status s = runtime(); !s.ok()) return s;
    part(4);
    if (Status s = waits(); !s.ok()) return s;
    if (Status s = nvtx(); !s.ok()) return s;
    part(5);
    if (Status s = sessionStart(); !s.ok()) return s;
    if (bad_ > 0) {
      timeline_.warnings.push_back(fmt::format("{} row(s) have no start or end: left out", bad_));
    }
    if (whole_graphs_ > 0) {
      timeline_.warnings.push_back(
          fmt::format("{} CUDA graph launch(es) were recorded as one block, communication inside them counts "
                      "as compute: record with "
                      "--cuda-graph-trace=node",
                      whole_graphs_));
    }
    if (Status s = finishTimeline(&timeline_, patterns_); !s.ok()) return s;
    part(6);
    return std::move(timeline_);
  }

 private:
  using Statement = std::unique_ptr<sqlite3_stmt, FinishStatement>;

  Status bad(std::string_view what) const {
    return {StatusCode::kInvalidData, fmt::format("{}: {}", path_, what)};
  }
  Status sqliteError(std::string_view where) const {
    return bad(fmt::format("{} cannot be read: {}: export the report again with nsys export --type sqlite",
                           where, sqlite3_errmsg(db_.get())));
  }

  Status open() {
    struct stat info{};
    if (::stat(path_.c_str(), &info) != 0) return bad("cannot be opened");
    timeline_.json_bytes = static_cast<uint64_t>(info.st_size);
    std::string uri = "file:";
    for (const char c : path_) {
      const auto byte = static_cast<unsigned char>(c);
      if (std::isalnum(byte) != 0 || c == '/' || c == '.' || c == '_' || c == '-') {
        uri += c;
      } else {
        uri += fmt::format("%{:02x}", byte);
      }
    }
    // Immutable: no lock and no journal beside a file that may be on a read-only disk.
    uri += "?mode=ro&immutable=1";
    sqlite3* db = nullptr;
    const int code = sqlite3_open_v2(uri.c_str(), &db, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, nullptr);
    db_.reset(db);
    if (code != SQLITE_OK) return sqliteError("the SQLite file");
    // What a hostile schema could do with triggers and views is not needed here.
    sqlite3_db_config(db, SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
    sqlite3_db_config(db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, nullptr);
    sqlite3_limit(db, SQLITE_LIMIT_LENGTH, 64 << 20);
    return {};
  }

  Result<Statement> prepare(const std::string& sql, std::string_view where) {
    sqlite3_stmt* raw = nullptr;
    if (sqlite3_prepare_v2(db_.get(), sql.c_str(), -1, &raw, nullptr) != SQLITE_OK) return sqliteError(where);
    return Statement(raw);
  }

  // Runs a query; `row` is called for each row.
  template <class Row>
  Status query(const std::string& sql, std::string_view where, Row row) {
    Result<Statement> statement = prepare(sql, where);
    if (!statement.ok()) return statement.status();
    sqlite3_stmt* s = statement.value().get();
    while (true) {
      const int code = sqlite3_step(s);
      if (code == SQLITE_DONE) return {};
      if (code != SQLITE_ROW) return sqliteError(where);
      if (Status status = row(s); !status.ok()) return status;
    }
  }

  Status tables() {
    std::vector<std::string> names;
    Status status = query("SELECT name FROM sqlite_master WHERE type = 'table'", "the list of tables",
                          [&](sqlite3_stmt* s) {
                            if (const auto* text = sqlite3_column_text(s, 0))
                              names.emplace_back(reinterpret_cast<const char*>(text));
                            return Status();
                          });
    if (!status.ok()) return status;
    for (const std::string& name : names) {
      if (!std::all_of(name.begin(), name.end(),
                       [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; }))
        continue;
      std::set<std::string> columns;
      status = query(fmt::format("PRAGMA table_info({})", name), name, [&](sqlite3_stmt* s) {
        if (const auto* text = sqlite3_column_text(s, 1)) columns.insert(reinterpret_cast<const char*>(text));
        return Status();
      });
      if (!status.ok()) return status;
      columns_.emplace(name, std::move(columns));
    }
    const bool nsys = columns_.count("StringIds") > 0 || columns_.count("META_DATA_EXPORT") > 0;
    const bool cupti = std::any_of(columns_.begin(), columns_.end(), [](const auto& t) {
      return t.first.rfind("CUPTI_ACTIVITY_KIND_", 0) == 0;
    });
    if (!nsys && !cupti)
      return bad("this SQLite file is no Nsight Systems export: it has neither StringIds nor CUPTI tables");
    return {};
  }

  bool has(const std::string& table, const std::string& column) const {
    const auto it = columns_.find(table);
    return it != columns_.end() && it->second.count(column) > 0;
  }
  // A column where the version has it, else NULL.
  std::string maybe(const std::string& table, const std::string& column) const {
    return has(table, column) ? column : "NULL";
  }
  Status require(const std::string& table, const std::string& column) const {
    return has(table, column) ? Status() : bad(fmt::format("table {} has no column '{}'", table, column));
  }

  Status strings() {
    if (columns_.count("StringIds") == 0) return {};
    if (Status s = require("StringIds", "id"); !s.ok()) return s;
    if (Status s = require("StringIds", "value"); !s.ok()) return s;
    return query("SELECT id, value FROM StringIds", "table StringIds", [&](sqlite3_stmt* s) {
      const auto* text = sqlite3_column_text(s, 1);
      const int bytes = sqlite3_column_bytes(s, 1);
      if (text != nullptr) {
        string_ids_.emplace(sqlite3_column_int64(s, 0),
                            std::string(reinterpret_cast<const char*>(text), static_cast<size_t>(bytes)));
      }
      return Status();
    });
  }

  std::string text(sqlite3_stmt* s, int column) const {
    if (sqlite3_column_type(s, column) == SQLITE_INTEGER) {
      const auto it = string_ids_.find(sqlite3_column_int64(s, column));
      return it == string_ids_.end() ? std::string() : it->second;
    }
    const auto* raw = sqlite3_column_text(s, column);
    return raw == nullptr ? std::string() : std::string(reinterpret_cast<const char*>(raw));
  }

  // Process ids are the upper bits of global ids; correlation ids repeat between processes.
  int64_t correlation(sqlite3_stmt* s, int column, int64_t global) {
    if (sqlite3_column_type(s, column) == SQLITE_NULL) return -1;
    const int64_t id = sqlite3_column_int64(s, column);
    if (id <= 0 || id > 0xFFFFFFFFLL) return -1;
    const auto [it, added] =
        processes_.emplace(static_cast<uint64_t>(global) >> 24, static_cast<int64_t>(processes_.size()));
    return (it->second << 32) | id;
  }

  bool times(sqlite3_stmt* s, int64_t* start, int64_t* end, Status* status, const std::string& table) {
    if (sqlite3_column_type(s, 0) == SQLITE_NULL || sqlite3_column_type(s, 1) == SQLITE_NULL) {
      ++bad_;
      return false;
    }
    *start = sqlite3_column_int64(s, 0);
    *end = sqlite3_column_int64(s, 1);
    const auto reasonable = [](int64_t t) { return t > -kMaxTimeNs && t < kMaxTimeNs; };
    if (!reasonable(*start) || !reasonable(*end) || *end - *start > kMaxDurationNs) {
      *status =
          bad(fmt::format("table {} has a row from {} to {} ns, which is no time", table, *start, *end));
      return false;
    }
    *end = std::max(*start, *end);
    ++timeline_.events;
    return true;
  }

  int32_t stream(int64_t process, int64_t device, int64_t number) {
    (void)process;  // processes that share a device share its time
    const auto key = std::pair(static_cast<int32_t>(device), number);
    const auto [it, added] = streams_.emplace(key, static_cast<int32_t>(timeline_.streams.size()));
    if (added) timeline_.streams.push_back({key.first, number});
    return it->second;
  }

  int32_t thread(int64_t global) {
    const auto [it, added] = threads_.emplace(global, static_cast<int32_t>(timeline_.threads.size()));
    if (added) timeline_.threads.push_back({(global >> 24) & 0xFFFFFF, global & 0xFFFFFF, {}, {}});
    return it->second;
  }

  Status device(const std::string& table, ActivityKind kind) {
    if (columns_.count(table) == 0) return {};
    for (const char* column : {"start", "end", "deviceId", "streamId"}) {
      if (Status s = require(table, column); !s.ok()) return s;
    }
    const bool graph = table == "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
    const bool kernel = kind == ActivityKind::kCompute && !graph;
    std::string name = "NULL";
    if (kernel) {
      for (const char* column : {"demangledName", "shortName", "mangledName", "name"}) {
        if (name == "NULL" && has(table, column)) name = column;
      }
      if (name == "NULL") return bad(fmt::format("table {} has no column with kernel names", table));
    } else if (has(table, "copyKind")) {
      name = "copyKind";
    }
    const std::string sql = fmt::format("SELECT start, \"end\", deviceId, streamId, {}, {}, {}, {} FROM {}",
                                        maybe(table, "correlationId"), maybe(table, "globalPid"), name,
                                        maybe(table, "graphNodeId"), table);
    const uint32_t graph_name = timeline_.names.intern("CUDA graph");
    const uint32_t set_name = timeline_.names.intern("Memset (Device)");
    return query(sql, "table " + table, [&](sqlite3_stmt* s) {
      Activity a;
      Status status;
      if (!times(s, &a.start_ns, &a.end_ns, &status, table)) return status;
      const int64_t process = sqlite3_column_int64(s, 5);
      a.kind = kind;
      a.stream = stream(process, sqlite3_column_int64(s, 2), sqlite3_column_int64(s, 3));
      a.correlation = correlation(s, 4, process);
      a.in_graph = graph || sqlite3_column_type(s, 7) == SQLITE_INTEGER;
      if (kernel) {
        a.name = kernelName(s);
      } else if (graph) {
        a.name = graph_name;
        ++whole_graphs_;
      } else if (kind == ActivityKind::kSet) {
        a.name = set_name;
      } else {
        a.name = timeline_.names.intern(copyName(sqlite3_column_int64(s, 6)));
      }
      timeline_.activities.push_back(a);
      return Status();
    });
  }

  uint32_t kernelName(sqlite3_stmt* s) {
    if (sqlite3_column_type(s, 6) == SQLITE_INTEGER) {
      const int64_t id = sqlite3_column_int64(s, 6);
      const auto known = name_of_string_.find(id);
      if (known != name_of_string_.end()) return known->second;
      const uint32_t name = timeline_.names.intern(text(s, 6));
      name_of_string_.emplace(id, name);
      return name;
    }
    return timeline_.names.intern(text(s, 6));
  }

  static const char* copyName(int64_t kind) {
    switch (kind) {
      case 1:
        return "Memcpy HtoD";
      case 2:
        return "Memcpy DtoH";
      case 8:
        return "Memcpy DtoD";
      case 10:
        return "Memcpy PtoP";
      default:
        return "Memcpy";
    }
  }

  Status runtime() {
    const std::string table = "CUPTI_ACTIVITY_KIND_RUNTIME";
    if (columns_.count(table) == 0) return {};
    for (const char* column : {"start", "end", "nameId"}) {
      if (Status s = require(table, column); !s.ok()) return s;
    }
    const std::string sql = fmt::format("SELECT start, \"end\", nameId, {}, {} FROM {}",
                                        maybe(table, "correlationId"), maybe(table, "globalTid"), table);
    return query(sql, "table " + table, [&](sqlite3_stmt* s) {
      HostCall call;
      Status status;
      if (!times(s, &call.start_ns, &call.end_ns, &status, table)) return status;
      const int64_t global = sqlite3_column_int64(s, 4);
      const std::string name = text(s, 2);
      call.kind = classifyCall(name);
      call.thread = thread(global);
      addSpan(&timeline_.threads[call.thread].busy, {call.start_ns, call.end_ns});
      if (call.kind == CallKind::kOther && call.end_ns - call.start_ns < 10'000) return Status();
      call.name = timeline_.names.intern(name);
      call.correlation = correlation(s, 3, global);
      timeline_.calls.push_back(call);
      return Status();
    });
  }

  // Event waits, where the version records which event was waited for and where it was recorded.
  Status waits() {
    const std::string sync = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION";
    const std::string event = "CUPTI_ACTIVITY_KIND_CUDA_EVENT";
    if (!has(sync, "syncType") || !has(sync, "start") || !has(sync, "streamId") || !has(sync, "deviceId"))
      return {};
    struct Record {
      int64_t correlation = -1;
      int32_t stream = kNone;
    };
    std::map<std::pair<uint64_t, int64_t>, Record> records;
    const bool by_sync_id = has(sync, "eventSyncId") && has(event, "eventSyncId");
    if (by_sync_id && has(event, "streamId") && has(event, "correlationId") && has(event, "deviceId")) {
      const std::string sql = fmt::format("SELECT eventSyncId, correlationId, deviceId, streamId, {} FROM {}",
                                          maybe(event, "globalPid"), event);
      Status status = query(sql, "table " + event, [&](sqlite3_stmt* s) {
        const int64_t process = sqlite3_column_int64(s, 4);
        const auto key = std::pair(static_cast<uint64_t>(process) >> 24, sqlite3_column_int64(s, 0));
        records[key] = {correlation(s, 1, process),
                        stream(process, sqlite3_column_int64(s, 2), sqlite3_column_int64(s, 3))};
        return Status();
      });
      if (!status.ok()) return status;
    }
    const std::string sql = fmt::format(
        "SELECT start, start, deviceId, streamId, {}, {}, {} FROM {} WHERE syncType = 2",
        maybe(sync, "correlationId"), maybe(sync, "globalPid"), by_sync_id ? "eventSyncId" : "NULL", sync);
    return query(sql, "table " + sync, [&](sqlite3_stmt* s) {
      StreamWait wait;
      int64_t end = 0;
      Status status;
      if (!times(s, &wait.time_ns, &end, &status, sync)) return status;
      const int64_t process = sqlite3_column_int64(s, 5);
      wait.waiting_stream = stream(process, sqlite3_column_int64(s, 2), sqlite3_column_int64(s, 3));
      wait.correlation = correlation(s, 4, process);
      const auto found = records.find({static_cast<uint64_t>(process) >> 24, sqlite3_column_int64(s, 6)});
      if (found != records.end()) {
        wait.record_correlation = found->second.correlation;
        wait.source_stream = found->second.stream;
      }
      timeline_.waits.push_back(wait);
      return Status();
    });
  }

  Status nvtx() {
    const std::string table = "NVTX_EVENTS";
    if (!has(table, "start") || !has(table, "end") || !has(table, "globalTid")) return {};
    const std::string sql =
        fmt::format("SELECT start, \"end\", {}, {}, globalTid FROM {} WHERE \"end\" IS NOT NULL",
                    maybe(table, "text"), maybe(table, "textId"), table);
    return query(sql, "table " + table, [&](sqlite3_stmt* s) {
      Span span;
      Status status;
      if (!times(s, &span.start_ns, &span.end_ns, &status, table)) return status;
      std::string name = text(s, 2);
      if (name.empty()) name = text(s, 3);
      int64_t number = 0;
      if (stepNumber(name, &number)) {
        steps_[sqlite3_column_int64(s, 4)].push_back({number, span.start_ns, span.end_ns});
        return Status();
      }
      const std::string small = lower(name);
      const bool loading =
          small.find("dataloader") != std::string::npos || small.find("data_load") != std::string::npos;
      const bool nccl = small.rfind("nccl", 0) == 0 && small.size() < 64;
      if (!loading && !nccl) return Status();
      const int32_t t = thread(sqlite3_column_int64(s, 4));
      if (loading) addSpan(&timeline_.threads[t].loading, span);
      if (nccl) {
        CommOp op;
        op.start_ns = span.start_ns;
        op.end_ns = span.end_ns;
        op.thread = t;
        op.info.type = collectiveFromText(small.substr(4));
        timeline_.comm_ops.push_back(op);
      }
      return Status();
    });
  }

  Status sessionStart() {
    // Several threads mark the same steps; the one that marks most is the training loop.
    const std::vector<Step>* best = nullptr;
    for (const auto& [thread, list] : steps_) {
      if (best == nullptr || list.size() > best->size()) best = &list;
    }
    if (best != nullptr) timeline_.steps = *best;
    if (!has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")) return {};
    return query("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME LIMIT 1",
                 "table TARGET_INFO_SESSION_START_TIME", [&](sqlite3_stmt* s) {
                   const int64_t base = sqlite3_column_int64(s, 0);
                   if (base > 0 && base < kMaxTimeNs) timeline_.base_ns = base;
                   return Status();
                 });
  }

  std::string path_;
  const CommPatterns& patterns_;
  const ReadOptions& options_;
  std::unique_ptr<sqlite3, CloseDb> db_;
  std::map<std::string, std::set<std::string>> columns_;
  std::unordered_map<int64_t, std::string> string_ids_;
  std::unordered_map<int64_t, uint32_t> name_of_string_;
  std::map<uint64_t, int64_t> processes_;
  std::map<std::pair<int32_t, int64_t>, int32_t> streams_;
  std::map<int64_t, int32_t> threads_;
  std::map<int64_t, std::vector<Step>> steps_;
  uint64_t bad_ = 0;
  uint64_t whole_graphs_ = 0;
  Timeline timeline_;
};

}  // namespace

Result<Timeline> readNsys(const std::string& path, const CommPatterns& patterns, const ReadOptions& options) {
  return Reader(path, patterns, options).run();
}

}  // namespace halfwire::trace
