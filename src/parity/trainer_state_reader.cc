// Hugging Face `trainer_state.json`: the array `log_history`.
#include <fmt/format.h>
#include <simdjson.h>

#include "parity/log_columns.h"
#include "parity/other_readers.h"

namespace halfwire::parity {
namespace {

namespace od = simdjson::ondemand;

// Python writes NaN and Infinity, which JSON does not have: as words in quotes.
std::string withQuotedWords(std::string_view text) {
  std::string out;
  out.reserve(text.size() + simdjson::SIMDJSON_PADDING);
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      out += c;
      if (c == '\\' && i + 1 < text.size()) out += text[++i];
      if (c == '"') quoted = false;
      continue;
    }
    if (c == '"') quoted = true;
    if (text.compare(i, 3, "NaN") == 0) {
      out += "\"nan\"";
      i += 2;
    } else if (text.compare(i, 8, "Infinity") == 0) {
      if (!out.empty() && out.back() == '-') out.pop_back();
      out += "\"inf\"";
      i += 7;
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

Result<Run> readTrainerState(const std::string& path) {
  constexpr size_t kMost = 512 << 20;
  const auto invalid = [&](std::string_view what) {
    return Status(StatusCode::kInvalidData, fmt::format("{}: {}", path, what));
  };
  auto source = trace::openFile(path);
  if (!source.ok()) return source.status();
  std::string text;
  while (true) {
    const size_t have = text.size();
    text.resize(have + (1 << 20));
    const Result<size_t> got = source.value()->read(text.data() + have, 1 << 20);
    if (!got.ok()) return got.status();
    text.resize(have + got.value());
    if (got.value() < (1 << 20)) break;
    if (text.size() > kMost) return invalid("is larger than 512 MiB; no trainer state is");
  }
  std::string quoted = withQuotedWords(text);
  quoted.reserve(quoted.size() + simdjson::SIMDJSON_PADDING);
  od::parser parser;
  od::document document;
  od::object top;
  if (parser.iterate(quoted).get(document) != simdjson::SUCCESS ||
      document.get_object().get(top) != simdjson::SUCCESS) {
    return invalid("is neither a record nor JSON");
  }
  od::array history;
  const auto found = top.find_field_unordered("log_history").get_array().get(history);
  if (found == simdjson::NO_SUCH_FIELD) {
    return invalid("has no `log_history`: neither a trainer_state.json nor a record of halfwire");
  }
  if (found != simdjson::SUCCESS) return invalid("`log_history` is not an array");
  LogBuilder builder;
  size_t number = 0;
  for (auto element : history) {
    ++number;
    od::object entry;
    if (element.get_object().get(entry) != simdjson::SUCCESS) {
      return invalid(
          fmt::format("entry {} of `log_history` is not an object (is the file cut short?)", number));
    }
    std::optional<double> values[7];
    for (auto field : entry) {
      std::string_view key;
      od::value value;
      if (field.unescaped_key().get(key) != simdjson::SUCCESS ||
          field.value().get(value) != simdjson::SUCCESS) {
        return invalid(fmt::format("entry {} of `log_history` is not JSON (is the file cut short?)", number));
      }
      // Exactly the trainer's words: `train_loss` is the mean over all steps.
      const bool known = key == "step" || key == "loss" || key == "learning_rate" || key == "grad_norm";
      if (!known) continue;
      const LogField which = logName(key)->field;
      od::json_type type;
      double number_value = 0;
      std::string_view word;
      if (value.type().get(type) == simdjson::SUCCESS && type == od::json_type::number &&
          value.get_double().get(number_value) == simdjson::SUCCESS) {
        values[static_cast<size_t>(which)] = number_value;
      } else if (type == od::json_type::string && value.get_string().get(word) == simdjson::SUCCESS &&
                 parseLogNumber(word)) {
        values[static_cast<size_t>(which)] = parseLogNumber(word);
      } else {
        return invalid(fmt::format("entry {} of `log_history`: `{}` is not a number", number,
                                   which == LogField::kStep ? "step" : "loss"));
      }
    }
    const auto& step = values[static_cast<size_t>(LogField::kStep)];
    if (!step) continue;
    if (!(*step >= 0) || *step > 4e9)
      return invalid(fmt::format("entry {} of `log_history`: the step is out of range", number));
    for (const LogField which : {LogField::kLoss, LogField::kRate, LogField::kGradNorm}) {
      if (const auto& value = values[static_cast<size_t>(which)])
        builder.add(static_cast<uint32_t>(*step), which, *value);
    }
  }
  return builder.finish(path, Source::kTrainerState, "`log_history` holds no loss; train with logging_steps");
}

}  // namespace halfwire::parity
