// What logs of other tools call the quantities of a record, and a record built from such values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "parity/record.h"
#include "trace/byte_source.h"

namespace halfwire::parity {

enum class LogField : uint8_t { kStep, kLoss, kRate, kGradNorm, kLossScale, kSkipped, kSamples };

// The field of a column, tag or key, and how well its name fits it: of several that fit, the lowest counts.
struct LogName {
  LogField field = LogField::kLoss;
  int order = 0;
};
std::optional<LogName> logName(std::string_view name);

// Collects values in any order; of several of a step and field the last counts.
class LogBuilder {
 public:
  void add(uint32_t step, LogField field, double value);
  bool tooMany() const { return values_.size() > kMostValues; }
  // A run of one rank. Without a loss anywhere: kInvalidData, in the words of `what_is_needed`.
  Result<Run> finish(const std::string& path, Source source, const std::string& what_is_needed);

 private:
  static constexpr size_t kMostValues = 100'000'000;
  struct Value {
    uint32_t step;
    LogField field;
    double value;
  };
  std::vector<Value> values_;
};

// A number as tools write it, with white space around it; nan and inf too.
std::optional<double> parseLogNumber(std::string_view text);

// Lines of a file, of bounded length.
class LineReader {
 public:
  LineReader(trace::ByteSource* source, std::string name, Progress progress)
      : source_(source), name_(std::move(name)), progress_(std::move(progress)) {}
  // False at the end. The line lives until the next call and has no line end.
  Result<bool> next(std::string_view* line);
  uint64_t number() const { return number_; }

 private:
  static constexpr size_t kMostBytes = 1 << 20;
  trace::ByteSource* source_;
  std::string name_;
  Progress progress_;
  std::string buffer_;
  size_t from_ = 0;
  bool at_end_ = false;
  uint64_t number_ = 0;
};

}  // namespace halfwire::parity
