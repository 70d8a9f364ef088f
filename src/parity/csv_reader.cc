// Tables with named columns.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "parity/log_columns.h"
#include "parity/other_readers.h"

namespace halfwire::parity {
namespace {

constexpr size_t kMostColumns = 10'000;

// Cells of a line; a cell in quotes may hold separators and doubled quotes, but no line end.
std::vector<std::string> cellsOf(std::string_view line, char separator) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quoted) {
      if (c != '"') {
        cells.back() += c;
      } else if (i + 1 < line.size() && line[i + 1] == '"') {
        cells.back() += '"';
        ++i;
      } else {
        quoted = false;
      }
    } else if (c == '"' && cells.back().empty()) {
      quoted = true;
    } else if (c == separator) {
      if (cells.size() > kMostColumns) return cells;
      cells.emplace_back();
    } else {
      cells.back() += c;
    }
  }
  return cells;
}

}  // namespace

Result<Run> readCsv(const std::string& path, const Progress& progress) {
  auto source = trace::openFile(path);
  if (!source.ok()) return source.status();
  LineReader lines(source.value().get(), path, progress);
  std::string_view line;
  const auto invalid = [&](std::string what) {
    return Status(StatusCode::kInvalidData, fmt::format("{}: {}", path, what));
  };
  Result<bool> more = lines.next(&line);
  if (!more.ok()) return more.status();
  if (!more.value()) return invalid("is empty");
  if (line.substr(0, 3) == "\xef\xbb\xbf") line.remove_prefix(3);
  // Text of a program has no control characters; what has them is another kind of file.
  for (const char c : line) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\t')
      return invalid("is neither a record nor a log that is known; it is not text");
  }
  char separator = ',';
  for (const char c : {';', '\t'}) {
    if (std::count(line.begin(), line.end(), c) > std::count(line.begin(), line.end(), separator))
      separator = c;
  }
  const std::vector<std::string> names = cellsOf(line, separator);
  if (names.size() > kMostColumns) return invalid("has more columns than a log");
  struct Choice {
    std::optional<size_t> column;
    int order = 0;
  };
  std::array<Choice, 7> columns;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto name = logName(names[i]);
    if (!name) continue;
    Choice& choice = columns[static_cast<size_t>(name->field)];
    if (!choice.column || name->order < choice.order) choice = {i, name->order};
  }
  if (!columns[static_cast<size_t>(LogField::kLoss)].column) {
    return invalid(
        "is neither a record nor a log that is known, and no column is called loss (or train/loss, "
        "train_loss, lm loss)");
  }
  LogBuilder builder;
  uint32_t row = 0;
  while (true) {
    more = lines.next(&line);
    if (!more.ok()) return more.status();
    if (!more.value()) break;
    if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
    const std::vector<std::string> cells = cellsOf(line, separator);
    enum class Cell { kEmpty, kNumber, kOther };
    const auto cell = [&](LogField field, double* value) {
      const auto& column = columns[static_cast<size_t>(field)].column;
      if (!column || *column >= cells.size()) return Cell::kEmpty;
      const std::string& text = cells[*column];
      if (text.find_first_not_of(" \t") == std::string::npos) return Cell::kEmpty;
      if (field == LogField::kSkipped &&
          (text == "True" || text == "true" || text == "False" || text == "false")) {
        *value = text[0] == 'T' || text[0] == 't' ? 1 : 0;
        return Cell::kNumber;
      }
      const std::optional<double> number = parseLogNumber(text);
      *value = number.value_or(0);
      return number ? Cell::kNumber : Cell::kOther;
    };
    double value = 0;
    uint32_t step = row++;
    if (columns[0].column) {
      const Cell found = cell(LogField::kStep, &value);
      if (found == Cell::kEmpty) continue;
      if (found == Cell::kOther || !(value >= 0) || value > 4e9 || value != std::floor(value)) {
        return invalid(fmt::format("line {}: the step is not a whole number in range", lines.number()));
      }
      step = static_cast<uint32_t>(value);
    }
    for (const LogField field : {LogField::kLoss, LogField::kRate, LogField::kGradNorm, LogField::kLossScale,
                                 LogField::kSkipped, LogField::kSamples}) {
      const Cell found = cell(field, &value);
      if (found == Cell::kOther) {
        return invalid(fmt::format("line {}: column `{}` is not a number", lines.number(),
                                   names[*columns[static_cast<size_t>(field)].column].substr(0, 60)));
      }
      if (found == Cell::kNumber) builder.add(step, field, value);
    }
    if (builder.tooMany()) return invalid("holds more values than fit in memory");
  }
  return builder.finish(path, Source::kCsv, "holds no loss below its column names");
}

}  // namespace halfwire::parity
