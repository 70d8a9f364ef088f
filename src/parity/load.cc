#include "parity/load.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <new>
#include <set>
#include <system_error>

#include "parity/other_readers.h"
#include "parity/record_reader.h"
#include "trace/byte_source.h"

namespace halfwire::parity {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostRuns = 4096;
constexpr size_t kMostFiles = 1 << 20;

Status invalid(std::string message) { return Status(StatusCode::kInvalidData, std::move(message)); }

// `rank<R>.jsonl`, plain or gzip.
std::optional<uint64_t> rankOfName(const std::string& name) {
  if (name.rfind("rank", 0) != 0) return std::nullopt;
  uint64_t rank = 0;
  const auto [end, error] = std::from_chars(name.data() + 4, name.data() + name.size(), rank);
  if (error != std::errc()) return std::nullopt;
  const std::string rest(end, name.data() + name.size());
  if (rest != ".jsonl" && rest != ".jsonl.gz") return std::nullopt;
  return rank;
}

// "run2" before "run10".
bool numbersInOrder(const std::string& a, const std::string& b) {
  size_t i = 0, j = 0;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  while (i < a.size() && j < b.size()) {
    if (digit(a[i]) && digit(b[j])) {
      size_t x = i, y = j;
      while (x < a.size() && digit(a[x])) ++x;
      while (y < b.size() && digit(b[y])) ++y;
      while (i + 1 < x && a[i] == '0') ++i;
      while (j + 1 < y && b[j] == '0') ++j;
      if (x - i != y - j) return x - i < y - j;
      const int order = a.compare(i, x - i, b, j, y - j);
      if (order != 0) return order < 0;
      i = x;
      j = y;
      continue;
    }
    if (a[i] != b[j]) return a[i] < b[j];
    ++i;
    ++j;
  }
  return a.size() - i < b.size() - j;
}

Result<Run> readRecord(const std::string& path, const std::vector<std::string>& files,
                       const Progress& progress) {
  Run run;
  run.path = path;
  std::set<int64_t> ranks;
  for (const std::string& file : files) {
    auto source = trace::openFile(file);
    if (!source.ok()) return source.status();
    Result<RankRecord> rank = readRankRecord(source.value().get(), file, progress);
    if (!rank.ok()) return rank.status();
    if (!ranks.insert(rank.value().header.rank).second) {
      return invalid(fmt::format("{}: rank {} is there twice; give each run a folder of its own", path,
                                 rank.value().header.rank));
    }
    run.ranks.push_back(std::move(rank).value());
  }
  std::sort(run.ranks.begin(), run.ranks.end(),
            [](const RankRecord& a, const RankRecord& b) { return a.header.rank < b.header.rank; });
  for (const RankRecord& rank : run.ranks) {
    if (rank.header.world_size != run.ranks.front().header.world_size) {
      return invalid(fmt::format(
          "{}: ranks {} and {} are of runs with {} and {} ranks; give each run a folder of its own", path,
          run.ranks.front().header.rank, rank.header.rank, run.ranks.front().header.world_size,
          rank.header.world_size));
    }
  }
  return run;
}

Result<std::string> startOf(const std::string& path) {
  auto source = trace::openFile(path);
  if (!source.ok()) return source.status();
  std::string start(64 << 10, '\0');
  const Result<size_t> got = source.value()->read(start.data(), start.size());
  if (!got.ok()) return got.status();
  start.resize(got.value());
  return start;
}

Result<Run> readFile(const std::string& path, const Progress& progress) {
  const Result<std::string> start = startOf(path);
  if (!start.ok()) return start.status();
  const std::string_view text = start.value();
  const std::string name = fs::path(path).filename().string();
  if (text.empty()) return invalid(fmt::format("{}: is empty", path));
  if (looksLikeTensorBoard(text, name)) return readTensorBoard({path}, progress);
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && text[first] == '{') {
    const size_t line = text.find('\n');
    if (text.substr(0, line).find("\"halfwire_parity\"") != std::string_view::npos)
      return readRecord(path, {path}, progress);
    return readTrainerState(path);
  }
  if (looksLikeMegatron(text)) return readMegatronLog(path, progress);
  return readCsv(path, progress);
}

// What a folder holds that can be read as one run; nothing where it holds no such thing.
Result<std::optional<Run>> readFolder(const std::string& path, const Progress& progress) {
  std::vector<std::string> records, events;
  std::string state;
  std::error_code error;
  size_t seen = 0;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    if (++seen > kMostFiles) return invalid(fmt::format("{}: holds more files than a run has", path));
    const std::string name = it->path().filename().string();
    if (rankOfName(name)) records.push_back(it->path().string());
    if (name.find("tfevents") != std::string::npos) events.push_back(it->path().string());
    if (name == "trainer_state.json") state = it->path().string();
  }
  if (error) return invalid(fmt::format("{}: cannot be listed: {}", path, error.message()));
  std::sort(records.begin(), records.end(), numbersInOrder);
  std::sort(events.begin(), events.end(), numbersInOrder);
  Result<Run> run = Status(StatusCode::kInternal, "");
  if (!records.empty()) {
    run = readRecord(path, records, progress);
  } else if (!events.empty()) {
    run = readTensorBoard(events, progress);
  } else if (!state.empty()) {
    run = readTrainerState(state);
  } else {
    return std::optional<Run>();
  }
  if (!run.ok()) return run.status();
  run.value().path = path;
  return std::optional<Run>(std::move(run).value());
}

Result<std::vector<Run>> load(const std::string& path, const Progress& progress) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  std::vector<Run> runs;
  if (!fs::exists(status)) return invalid(fmt::format("{}: does not exist", path));
  if (!fs::is_directory(status)) {
    Result<Run> run = readFile(path, progress);
    if (!run.ok()) return run.status();
    run.value().path = path;
    runs.push_back(std::move(run).value());
    return runs;
  }
  Result<std::optional<Run>> one = readFolder(path, progress);
  if (!one.ok()) return one.status();
  if (one.value()) {
    runs.push_back(*std::move(one).value());
    return runs;
  }
  std::vector<std::string> folders;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->is_directory(ignored)) folders.push_back(it->path().string());
    if (folders.size() > kMostRuns)
      return invalid(fmt::format("{}: holds more folders than there are runs", path));
  }
  std::sort(folders.begin(), folders.end(), numbersInOrder);
  for (const std::string& folder : folders) {
    Result<std::optional<Run>> inner = readFolder(folder, progress);
    if (!inner.ok()) return inner.status();
    if (inner.value()) runs.push_back(*std::move(inner).value());
  }
  if (runs.empty()) {
    return invalid(
        fmt::format("{}: holds no run: neither rank<R>.jsonl (halfwire's recorder), nor TensorBoard event "
                    "files, nor a trainer_state.json, nor "
                    "folders of these",
                    path));
  }
  return runs;
}

// "a+b": each part one run, joined rank by rank.
Result<std::vector<Run>> loadParts(const std::string& path, const Progress& progress) {
  std::vector<Run> whole;
  size_t at = 0;
  while (at <= path.size()) {
    const size_t plus = std::min(path.find('+', at), path.size());
    const std::string part = path.substr(at, plus - at);
    at = plus + 1;
    Result<std::vector<Run>> runs = load(part, progress);
    if (!runs.ok()) return runs.status();
    if (runs.value().size() != 1) return invalid(fmt::format("{}: {} is not one run", path, part));
    Run& more = runs.value().front();
    if (whole.empty()) {
      whole.push_back(std::move(more));
      whole.front().path = path;
      continue;
    }
    Run& run = whole.front();
    bool same = run.ranks.size() == more.ranks.size() && run.source == more.source;
    for (size_t r = 0; same && r < run.ranks.size(); ++r) {
      same = run.ranks[r].header.rank == more.ranks[r].header.rank &&
             more.ranks[r].step.front() > run.ranks[r].step.front();
    }
    if (!same) {
      return invalid(fmt::format(
          "{}: {} does not go on with what is before it (other ranks, or it starts earlier)", path, part));
    }
    for (size_t r = 0; r < run.ranks.size(); ++r) run.ranks[r].append(more.ranks[r]);
    run.notes.insert(run.notes.end(), more.notes.begin(), more.notes.end());
  }
  return whole;
}

}  // namespace

Result<std::vector<Run>> loadRuns(const std::string& path, const Progress& progress) {
  try {
    std::error_code error;
    if (path.find('+') != std::string::npos && !fs::exists(path, error)) return loadParts(path, progress);
    return load(path, progress);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, fmt::format("{}: is too large to be held in memory", path));
  }
}

}  // namespace halfwire::parity
