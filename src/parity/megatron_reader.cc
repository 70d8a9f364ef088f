// The lines that Megatron-LM prints for iterations:
//   iteration       10/     100 | consumed samples: 160 | learning rate: 1.0E-04 | lm loss: 1.0E+01 | grad
//   norm: 2.1 |
#include <fmt/format.h>

#include <charconv>

#include "parity/log_columns.h"
#include "parity/other_readers.h"

namespace halfwire::parity {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// The number of an iteration's line, and what follows the first bar.
std::optional<uint32_t> iterationOf(std::string_view line, std::string_view* rest) {
  const size_t bar = line.find('|');
  if (bar == std::string_view::npos) return std::nullopt;
  const size_t word = line.substr(0, bar).rfind("iteration");
  if (word == std::string_view::npos) return std::nullopt;
  std::string_view numbers = trimmed(line.substr(word + 9, bar - word - 9));
  uint32_t step = 0;
  const auto [end, error] = std::from_chars(numbers.data(), numbers.data() + numbers.size(), step);
  if (error != std::errc()) return std::nullopt;
  // "10/ 100", as Megatron writes it; "10" alone is taken too.
  const std::string_view after = trimmed({end, static_cast<size_t>(numbers.data() + numbers.size() - end)});
  if (!after.empty() && after.front() != '/') return std::nullopt;
  *rest = line.substr(bar + 1);
  return step;
}

}  // namespace

bool looksLikeMegatron(std::string_view start) {
  size_t at = 0;
  while (at < start.size()) {
    const size_t end = std::min(start.find('\n', at), start.size());
    std::string_view rest;
    if (iterationOf(start.substr(at, end - at), &rest) && rest.find(':') != std::string_view::npos)
      return true;
    at = end + 1;
  }
  return false;
}

Result<Run> readMegatronLog(const std::string& path, const Progress& progress) {
  auto source = trace::openFile(path);
  if (!source.ok()) return source.status();
  LineReader lines(source.value().get(), path, progress);
  LogBuilder builder;
  std::string_view line;
  while (true) {
    const Result<bool> more = lines.next(&line);
    if (!more.ok()) return more.status();
    if (!more.value()) break;
    std::string_view rest;
    const auto step = iterationOf(line, &rest);
    if (!step) continue;
    int best_loss = -1;
    std::optional<double> loss;
    while (!rest.empty()) {
      const size_t bar = std::min(rest.find('|'), rest.size());
      const std::string_view part = rest.substr(0, bar);
      rest.remove_prefix(std::min(bar + 1, rest.size()));
      const size_t colon = part.rfind(':');
      if (colon == std::string_view::npos) continue;
      const auto name = logName(trimmed(part.substr(0, colon)));
      // A line that was cut short, or interleaved with another rank's, loses that value only.
      const auto value = parseLogNumber(part.substr(colon + 1));
      if (!name || !value) continue;
      if (name->field != LogField::kLoss) {
        builder.add(*step, name->field, *value);
      } else if (best_loss < 0 || name->order < best_loss) {
        best_loss = name->order;
        loss = value;
      }
    }
    if (loss) builder.add(*step, LogField::kLoss, *loss);
    if (builder.tooMany())
      return Status(StatusCode::kInvalidData, fmt::format("{}: holds more values than fit in memory", path));
  }
  return builder.finish(path, Source::kMegatron, "has lines of iterations, and none of them an `lm loss`");
}

}  // namespace halfwire::parity
