// A training run as recorded: columns of numbers by rank, whatever file they came from
// (docs/parity-record.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace halfwire::parity {

// Values that were not recorded. A recorded NaN is kept as infinity: to every reader of a column the two say
// the same, "not finite", and NaN is left to say "not recorded".
inline constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();
inline constexpr uint64_t kNoHash = 0;
inline constexpr uint32_t kNoCount = std::numeric_limits<uint32_t>::max();
inline constexpr int64_t kNoSamples = -1;
inline constexpr uint8_t kUnknown = 0xff;

// Present values of a column by row. A column nobody writes to takes no memory.
template <class T>
class Column {
 public:
  explicit Column(T absent) : absent_(absent) {}

  T operator[](size_t row) const { return row < values_.size() ? values_[row] : absent_; }
  bool empty() const { return values_.empty(); }
  bool has(size_t row) const {
    if (row >= values_.size()) return false;
    // NaN, the absent value of numbers, is unequal to itself.
    return absent_ == absent_ ? values_[row] != absent_ : values_[row] == values_[row];
  }
  // `rows` is what to make room for when the first value comes.
  void set(size_t row, T value, size_t rows) {
    if (values_.empty()) values_.reserve(rows);
    if (row >= values_.size()) values_.resize(row + 1, absent_);
    values_[row] = value;
  }
  void truncate(size_t rows) {
    if (values_.size() > rows) values_.resize(rows, absent_);
  }

 private:
  T absent_;
  std::vector<T> values_;
};

struct RealColumn : Column<double> {
  RealColumn() : Column(kAbsent) {}
};
// Norms and shares: 24 bits are plenty, and there are many of them.
struct ShortColumn : Column<float> {
  ShortColumn() : Column(std::numeric_limits<float>::quiet_NaN()) {}
};
struct HashColumn : Column<uint64_t> {
  HashColumn() : Column(kNoHash) {}
};
struct CountColumn : Column<uint32_t> {
  CountColumn() : Column(kNoCount) {}
};
struct SamplesColumn : Column<int64_t> {
  SamplesColumn() : Column(kNoSamples) {}
};
struct ByteColumn : Column<uint8_t> {
  ByteColumn() : Column(kUnknown) {}
};

// Lowest precision of the optimizer's state; ordered by bits.
enum class StateType : uint8_t { kInt8, kFloat8, kBfloat16, kFloat16, kFloat32, kFloat64 };

// One parameter group of one rank.
struct Group {
  RealColumn lr;
  ShortColumn grad_norm, grad_norm_clipped, update_norm, unchanged, param_norm;
  RealColumn param_sum;
  HashColumn grad_hash, param_hash;
  CountColumn nonfinite;
  ByteColumn state_dtype;  // StateType

  // Calls f(column of a, the same column of b) for every column.
  template <class A, class B, class F>
  static void forColumns(A& a, B& b, F f) {
    f(a.lr, b.lr);
    f(a.grad_norm, b.grad_norm);
    f(a.grad_norm_clipped, b.grad_norm_clipped);
    f(a.update_norm, b.update_norm);
    f(a.unchanged, b.unchanged);
    f(a.param_norm, b.param_norm);
    f(a.param_sum, b.param_sum);
    f(a.grad_hash, b.grad_hash);
    f(a.param_hash, b.param_hash);
    f(a.nonfinite, b.nonfinite);
    f(a.state_dtype, b.state_dtype);
  }
};

struct Header {
  int64_t rank = 0;
  int64_t world_size = 1;
  std::optional<int64_t> seed, accumulation, elements, sampled_elements, tied, resumed_from, warmup;
  std::optional<bool> sharded, reduced, tied_expected;
  std::optional<double> dropout;
  std::string precision, program;
  std::string halfwire;  // its `mode`, empty without the library
};

// Where a program went on from a checkpoint.
struct Resume {
  size_t row = 0;
  uint32_t step = 0;
  std::optional<int64_t> tied;  // pairs that share memory from here on
};

struct RankRecord {
  Header header;
  std::vector<uint32_t> step;  // strictly increasing
  RealColumn loss;
  ShortColumn loss_scale;
  SamplesColumn samples;
  ByteColumn skipped;
  HashColumn batch_hash, rng_hash;
  CountColumn tied_apart;
  std::vector<Group> groups;
  std::vector<Resume> resumes;
  bool cut_short = false;      // the last line was not whole
  uint64_t replaced_rows = 0;  // steps that a resumed run did again

  template <class A, class B, class F>
  static void forColumns(A& a, B& b, F f) {
    f(a.loss, b.loss);
    f(a.loss_scale, b.loss_scale);
    f(a.samples, b.samples);
    f(a.skipped, b.skipped);
    f(a.batch_hash, b.batch_hash);
    f(a.rng_hash, b.rng_hash);
    f(a.tied_apart, b.tied_apart);
  }
  // Keeps the first `rows` steps.
  void truncate(size_t rows);
  // Goes on with `part`, the record of the same rank after a resume: its steps replace those that both have.
  void append(const RankRecord& part);

  size_t rows() const { return step.size(); }
  // The row of a step, or nothing. Constant time where steps were recorded without gaps.
  std::optional<size_t> row(uint32_t wanted) const {
    if (step.empty() || wanted < step.front() || wanted > step.back()) return std::nullopt;
    const size_t guess = wanted - step.front();
    if (guess < step.size() && step[guess] == wanted) return guess;
    const auto at = std::lower_bound(step.begin(), step.end(), wanted);
    if (at == step.end() || *at != wanted) return std::nullopt;
    return static_cast<size_t>(at - step.begin());
  }
};

enum class Source { kRecord, kCsv, kTensorBoard, kTrainerState, kMegatron };

struct Run {
  std::string path;
  Source source = Source::kRecord;
  std::vector<RankRecord> ranks;  // by rank; at least one, each with at least one row
  std::vector<std::string> notes;

  // Rates of a recorder were read just before the update they are used in; those of other logs may be the
  // next step's.
  bool ratesAreExact() const { return source == Source::kRecord; }
};

// Called with the bytes read so far and the bytes there are.
using Progress = std::function<void(const std::string& file, uint64_t done, uint64_t total)>;

}  // namespace halfwire::parity
