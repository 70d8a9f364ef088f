#include "parity/record_reader.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <charconv>
#include <cstring>
#include <string_view>

namespace halfwire::parity {
namespace {

namespace od = simdjson::ondemand;

// Why a value was refused; empty where it was not.
using Problem = const char*;
constexpr Problem kFine = nullptr;

// A number, or one of the words for what is not finite.
Problem readReal(od::value value, double* out) {
  od::json_type type;
  if (value.type().get(type) != simdjson::SUCCESS) return "is not JSON";
  if (type == od::json_type::number) {
    double number = 0;
    if (value.get_double().get(number) != simdjson::SUCCESS) return "is not a number that fits 64 bits";
    *out = number;
    return kFine;
  }
  if (type == od::json_type::string) {
    std::string_view word;
    if (value.get_string().get(word) != simdjson::SUCCESS) return "is not UTF-8";
    if (word != "nan" && word != "inf" && word != "-inf") return "is neither a number nor nan, inf or -inf";
    *out =
        word == "-inf" ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
    return kFine;
  }
  return "is not a number";
}

Problem readInteger(od::value value, int64_t least, int64_t most, int64_t* out) {
  od::json_type type;
  int64_t number = 0;
  if (value.type().get(type) != simdjson::SUCCESS || type != od::json_type::number ||
      value.get_int64().get(number) != simdjson::SUCCESS) {
    return "is not a whole number";
  }
  if (number < least || number > most) return "is out of range";
  *out = number;
  return kFine;
}

Problem readBool(od::value value, bool* out) {
  if (value.get_bool().get(*out) != simdjson::SUCCESS) return "is not true or false";
  return kFine;
}

Problem readHash(od::value value, uint64_t* out) {
  std::string_view text;
  if (value.get_string().get(text) != simdjson::SUCCESS || text.size() != 16) {
    return "is not a hash of 16 hexadecimal digits";
  }
  uint64_t hash = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), hash, 16);
  if (error != std::errc() || end != text.data() + text.size()) {
    return "is not a hash of 16 hexadecimal digits";
  }
  // 0 says "not recorded"; that a recorded 0 then equals a recorded 1 happens once in 2^64.
  *out = hash == kNoHash ? 1 : hash;
  return kFine;
}

Problem readStateType(od::value value, uint8_t* out) {
  std::string_view text;
  if (value.get_string().get(text) != simdjson::SUCCESS) return "is not a string";
  static constexpr std::pair<std::string_view, StateType> kNames[] = {
      {"float32", StateType::kFloat32}, {"bfloat16", StateType::kBfloat16}, {"float16", StateType::kFloat16},
      {"float8", StateType::kFloat8},   {"int8", StateType::kInt8},         {"float64", StateType::kFloat64},
      {"uint8", StateType::kInt8},
  };
  for (const auto& [name, type] : kNames) {
    // "float8_e4m3fn" is a float8.
    if (text == name || (name == "float8" && text.rfind("float8", 0) == 0)) *out = static_cast<uint8_t>(type);
  }
  return kFine;  // a type of the future is unknown, not an error
}

// To 24 bits; what is not zero and not infinite stays so.
float narrow(double value) {
  if (std::isinf(value)) return static_cast<float>(value);
  const float most = std::numeric_limits<float>::max();
  const double bounded = std::clamp(value, -static_cast<double>(most), static_cast<double>(most));
  const float result = static_cast<float>(bounded);
  if (result == 0 && value != 0) {
    return std::copysign(std::numeric_limits<float>::denorm_min(), static_cast<float>(value < 0 ? -1 : 1));
  }
  return result;
}

class Reader {
 public:
  Reader(trace::ByteSource* source, const std::string& name, const Progress& progress,
         const RecordLimits& limits)
      : source_(source), name_(name), progress_(progress), limits_(limits) {}

  Result<RankRecord> read() {
    std::vector<char> buffer(kWindow + simdjson::SIMDJSON_PADDING);
    size_t have = 0;
    bool at_end = false;
    while (!at_end) {
      if (buffer.size() - simdjson::SIMDJSON_PADDING - have < kWindow / 2) {
        buffer.resize(2 * buffer.size());
      }
      const size_t room = buffer.size() - simdjson::SIMDJSON_PADDING - have;
      Result<size_t> got = source_->read(buffer.data() + have, room);
      if (!got.ok()) return got.status();
      at_end = got.value() < room;
      have += got.value();
      if (progress_) progress_(name_, source_->position(), source_->size());
      size_t from = 0;
      while (true) {
        const void* newline = std::memchr(buffer.data() + from, '\n', have - from);
        if (newline == nullptr) break;
        const size_t length = static_cast<const char*>(newline) - (buffer.data() + from);
        Status status = line(buffer.data() + from, length, buffer.size() - from, true);
        if (!status.ok()) return status;
        from += length + 1;
      }
      if (have - from > limits_.line_bytes) return tooLong();
      std::memmove(buffer.data(), buffer.data() + from, have - from);
      have -= from;
    }
    if (have > 0) {
      Status status = line(buffer.data(), have, buffer.size(), false);
      if (!status.ok()) return status;
    }
    if (!has_header_) {
      return Status(
          StatusCode::kInvalidData,
          fmt::format("{}: has no header; a record begins with a line that has `halfwire_parity`", name_));
    }
    if (record_.step.empty()) {
      return Status(StatusCode::kInvalidData,
                    fmt::format("{}: has a header and no steps; nothing was trained, or the recorder was not "
                                "attached to the optimizer that steps",
                                name_));
    }
    return std::move(record_);
  }

 private:
  static constexpr size_t kWindow = 1 << 20;

  Status bad(std::string_view field, Problem problem) const {
    return Status(StatusCode::kInvalidData,
                  fmt::format("{}: line {}: `{}` {}", name_, lines_, field.substr(0, 40), problem));
  }
  Status badLine(std::string_view what) const {
    return Status(StatusCode::kInvalidData, fmt::format("{}: line {}: {}", name_, lines_, what));
  }
  Status tooLong() const {
    return badLine(fmt::format("is longer than {} bytes, which no recorder writes", limits_.line_bytes));
  }

  Status line(const char* text, size_t length, size_t capacity, bool whole) {
    ++lines_;
    if (length > 0 && text[length - 1] == '\r') --length;
    if (length == 0) return Status();
    if (length > limits_.line_bytes) return tooLong();
    const Status status = parse(text, length, capacity);
    if (status.ok() || whole) return status;
    if (!has_header_) return status;
    record_.cut_short = true;  // the last line of a program that was killed
    return Status();
  }

  Status parse(const char* text, size_t length, size_t capacity) {
    od::document document;
    const simdjson::padded_string_view padded(text, length, capacity);
    od::object object;
    if (parser_.iterate(padded).get(document) != simdjson::SUCCESS ||
        document.get_object().get(object) != simdjson::SUCCESS) {
      return badLine("is not a JSON object");
    }
    if (!has_header_) return header(object);
    // A header within a file is that of a program that went on with the same file.
    constexpr std::string_view kMark = "{\"halfwire_parity\"";
    if (std::string_view(text, length).substr(0, kMark.size()) == kMark) return header(object);
    return step(object, document, length);
  }

  Status header(od::object object) {
    Header h;
    bool versioned = false;
    for (auto entry : object) {
      std::string_view key;
      od::value value;
      if (entry.unescaped_key().get(key) != simdjson::SUCCESS ||
          entry.value().get(value) != simdjson::SUCCESS) {
        return badLine("is not a JSON object");
      }
      const std::string field(key);
      bool null = false;
      if (value.is_null().get(null) == simdjson::SUCCESS && null && field != "halfwire_parity") continue;
      Problem problem = kFine;
      const auto integer = [&](std::optional<int64_t>* to, int64_t least) {
        int64_t number = 0;
        const Problem p = readInteger(value, least, std::numeric_limits<int64_t>::max(), &number);
        if (p == kFine) *to = number;
        return p;
      };
      const auto boolean = [&](std::optional<bool>* to) {
        bool b = false;
        const Problem p = readBool(value, &b);
        if (p == kFine) *to = b;
        return p;
      };
      const auto words = [&](std::string* to) -> Problem {
        std::string_view text;
        if (value.get_string().get(text) != simdjson::SUCCESS) return "is not a string";
        *to = text;
        return kFine;
      };
      if (field == "halfwire_parity") {
        int64_t version = 0;
        problem = readInteger(value, 1, std::numeric_limits<int32_t>::max(), &version);
        if (problem == kFine && version != 1) {
          return badLine(
              fmt::format("is of version {} of the format and this program reads version 1; use the "
                          "halfwire that came with the recorder",
                          version));
        }
        versioned = true;
      } else if (field == "rank") {
        problem = readInteger(value, 0, limits_.ranks - 1, &h.rank);
      } else if (field == "world_size") {
        problem = readInteger(value, 1, limits_.ranks, &h.world_size);
      } else if (field == "seed") {
        problem = integer(&h.seed, std::numeric_limits<int64_t>::min());
      } else if (field == "accumulation") {
        problem = integer(&h.accumulation, 1);
      } else if (field == "elements") {
        problem = integer(&h.elements, 0);
      } else if (field == "sampled_elements") {
        problem = integer(&h.sampled_elements, 0);
      } else if (field == "tied") {
        problem = integer(&h.tied, 0);
      } else if (field == "resumed_from") {
        problem = integer(&h.resumed_from, 0);
      } else if (field == "warmup") {
        problem = integer(&h.warmup, 0);
      } else if (field == "sharded") {
        problem = boolean(&h.sharded);
      } else if (field == "reduced") {
        problem = boolean(&h.reduced);
      } else if (field == "tied_expected") {
        problem = boolean(&h.tied_expected);
      } else if (field == "dropout") {
        double p = 0;
        problem = readReal(value, &p);
        if (problem == kFine) h.dropout = p;
      } else if (field == "precision") {
        problem = words(&h.precision);
      } else if (field == "program") {
        problem = words(&h.program);
      } else if (field == "halfwire") {
        od::object inner;
        if (value.get_object().get(inner) == simdjson::SUCCESS) {
          h.halfwire = "on";
          for (auto part : inner) {
            std::string_view name, mode;
            od::value of;
            if (part.unescaped_key().get(name) != simdjson::SUCCESS ||
                part.value().get(of) != simdjson::SUCCESS) {
              return badLine("is not a JSON object");
            }
            const bool is_mode = name == "mode";
            if (is_mode && of.get_string().get(mode) == simdjson::SUCCESS) h.halfwire = mode;
          }
        }
      }
      if (problem != kFine) return bad(field, problem);
    }
    if (!versioned) {
      return badLine(
          "is not the header of a record: `halfwire_parity` is missing (is this another kind of file?)");
    }
    if (h.rank >= h.world_size) return bad("rank", "is not below `world_size`");
    if (has_header_) {
      if (h.rank != record_.header.rank) return bad("rank", "is another than at the top of the file");
      const int64_t at = h.resumed_from.value_or(0);
      if (at > kMostSteps) return bad("resumed_from", "is out of range");
      resume_pending_ = true;
      resumed_tied_ = h.tied;
      // What was said first holds, as do its optional fields where the later header lacks them.
      if (!record_.header.resumed_from && record_.step.empty()) record_.header.resumed_from = h.resumed_from;
      return Status();
    }
    has_header_ = true;
    record_.header = std::move(h);
    return Status();
  }

  Status step(od::object object, od::document& document, size_t length) {
    bool has_step = false;
    size_t groups = 0;
    int64_t integer = 0;
    uint64_t hash = 0;
    // The number of the step decides the row: values wait until it is known to be good.
    Pending now;
    for (auto entry : object) {
      std::string_view key;
      od::value value;
      if (entry.unescaped_key().get(key) != simdjson::SUCCESS ||
          entry.value().get(value) != simdjson::SUCCESS) {
        return badLine("is not a JSON object");
      }
      Problem problem = kFine;
      if (key == "step") {
        problem = readInteger(value, 0, kMostSteps, &integer);
        now.step = static_cast<uint32_t>(integer);
        has_step = true;
      } else if (key == "loss") {
        problem = readReal(value, &now.loss);
      } else if (key == "samples") {
        problem = readInteger(value, 0, std::numeric_limits<int64_t>::max(), &now.samples);
      } else if (key == "loss_scale") {
        problem = readReal(value, &now.loss_scale);
      } else if (key == "skipped") {
        bool b = false;
        problem = readBool(value, &b);
        now.skipped = b ? 1 : 0;
      } else if (key == "batch_hash") {
        problem = readHash(value, &now.batch_hash);
      } else if (key == "rng_hash") {
        problem = readHash(value, &now.rng_hash);
      } else if (key == "tied_apart") {
        problem = readInteger(value, 0, kNoCount - 1, &integer);
        now.tied_apart = static_cast<uint32_t>(integer);
      } else if (key == "groups") {
        od::array array;
        if (value.get_array().get(array) != simdjson::SUCCESS) return bad("groups", "is not an array");
        for (auto element : array) {
          if (groups >= limits_.groups)
            return bad("groups", "holds more parameter groups than any optimizer has");
          od::object group;
          if (element.get_object().get(group) != simdjson::SUCCESS) return bad("groups", "holds no objects");
          if (scratch_.size() <= groups) scratch_.emplace_back();
          PendingGroup& g = scratch_[groups++];
          g = PendingGroup{};
          for (auto part : group) {
            std::string_view name;
            od::value of;
            if (part.unescaped_key().get(name) != simdjson::SUCCESS ||
                part.value().get(of) != simdjson::SUCCESS) {
              return badLine("is not a JSON object");
            }
            const auto reading = [&](double* to) { return readReal(of, to); };
            Problem p = kFine;
            if (name == "lr") {
              p = reading(&g.lr);
            } else if (name == "grad_norm") {
              p = reading(&g.grad_norm);
            } else if (name == "grad_norm_clipped") {
              p = reading(&g.grad_norm_clipped);
            } else if (name == "update_norm") {
              p = reading(&g.update_norm);
            } else if (name == "unchanged") {
              p = reading(&g.unchanged);
            } else if (name == "param_norm") {
              p = reading(&g.param_norm);
            } else if (name == "param_sum") {
              p = reading(&g.param_sum);
            } else if (name == "grad_hash") {
              p = readHash(of, &hash);
              g.grad_hash = hash;
            } else if (name == "param_hash") {
              p = readHash(of, &hash);
              g.param_hash = hash;
            } else if (name == "nonfinite") {
              p = readInteger(of, 0, std::numeric_limits<int64_t>::max(), &integer);
              g.nonfinite = static_cast<uint32_t>(std::min<int64_t>(integer, kNoCount - 1));
            } else if (name == "state_dtype") {
              p = readStateType(of, &g.state_dtype);
            }
            if (p != kFine) return bad(std::string(name), p);
          }
        }
      }
      if (problem != kFine) return bad(std::string(key), problem);
    }
    const char* rest = nullptr;
    if (document.current_location().get(rest) == simdjson::SUCCESS)
      return badLine("holds more than one JSON object");
    if (!has_step) return bad("step", "is missing");
    return store(now, groups, length);
  }

  struct Pending {
    uint32_t step = 0;
    double loss = kAbsent, loss_scale = kAbsent;
    int64_t samples = kNoSamples;
    uint8_t skipped = kUnknown;
    uint64_t batch_hash = kNoHash, rng_hash = kNoHash;
    uint32_t tied_apart = kNoCount;
  };
  struct PendingGroup {
    double lr = kAbsent, grad_norm = kAbsent, grad_norm_clipped = kAbsent, update_norm = kAbsent,
           unchanged = kAbsent, param_norm = kAbsent, param_sum = kAbsent;
    uint64_t grad_hash = kNoHash, param_hash = kNoHash;
    uint32_t nonfinite = kNoCount;
    uint8_t state_dtype = kUnknown;
  };

  Status store(const Pending& now, size_t groups, size_t length) {
    RankRecord& r = record_;
    if (!r.step.empty() && now.step <= r.step.back()) {
      if (!resume_pending_) {
        return badLine(fmt::format("step {} comes after step {}, and no header says that the run was resumed",
                                   now.step, r.step.back()));
      }
      // A resumed run does the steps since its checkpoint again; its own count.
      const size_t keep = std::lower_bound(r.step.begin(), r.step.end(), now.step) - r.step.begin();
      r.replaced_rows += r.step.size() - keep;
      r.truncate(keep);
    }
    const size_t row = r.step.size();
    if (resume_pending_ || (row == 0 && r.header.resumed_from.value_or(0) > 0)) {
      r.resumes.push_back({row, now.step, resumed_tied_});
    }
    resume_pending_ = false;
    if (groups > r.groups.size()) r.groups.resize(groups);
    if ((row + 1) * (sizeof(Pending) + r.groups.size() * sizeof(PendingGroup)) > limits_.stored_bytes) {
      return badLine("the record is too large to be held in memory");
    }
    if (row == 0 && !source_->compressed()) {
      rows_ = std::min<uint64_t>(source_->size() / (length + 1) + source_->size() / (length + 1) / 16 + 16,
                                 kRowsAhead);
      r.step.reserve(rows_);
    }
    r.step.push_back(now.step);
    const auto real = [&](RealColumn& column, double v) {
      if (!std::isnan(v)) column.set(row, v, rows_);
    };
    const auto brief = [&](ShortColumn& column, double v) {
      if (!std::isnan(v)) column.set(row, narrow(v), rows_);
    };
    const auto hash = [&](HashColumn& column, uint64_t v) {
      if (v != kNoHash) column.set(row, v, rows_);
    };
    real(r.loss, now.loss);
    brief(r.loss_scale, now.loss_scale);
    if (now.samples != kNoSamples) r.samples.set(row, now.samples, rows_);
    if (now.skipped != kUnknown) r.skipped.set(row, now.skipped, rows_);
    hash(r.batch_hash, now.batch_hash);
    hash(r.rng_hash, now.rng_hash);
    if (now.tied_apart != kNoCount) r.tied_apart.set(row, now.tied_apart, rows_);
    for (size_t i = 0; i < groups; ++i) {
      const PendingGroup& from = scratch_[i];
      Group& g = r.groups[i];
      real(g.lr, from.lr);
      brief(g.grad_norm, from.grad_norm);
      brief(g.grad_norm_clipped, from.grad_norm_clipped);
      brief(g.update_norm, from.update_norm);
      brief(g.unchanged, from.unchanged);
      brief(g.param_norm, from.param_norm);
      real(g.param_sum, from.param_sum);
      hash(g.grad_hash, from.grad_hash);
      hash(g.param_hash, from.param_hash);
      if (from.nonfinite != kNoCount) g.nonfinite.set(row, from.nonfinite, rows_);
      if (from.state_dtype != kUnknown) g.state_dtype.set(row, from.state_dtype, rows_);
    }
    return Status();
  }

  static constexpr uint64_t kRowsAhead = 16 << 20;
  static constexpr int64_t kMostSteps = 4'000'000'000;

  trace::ByteSource* source_;
  const std::string& name_;
  const Progress& progress_;
  RecordLimits limits_;
  od::parser parser_;
  RankRecord record_;
  std::vector<PendingGroup> scratch_;
  uint64_t lines_ = 0;
  bool has_header_ = false;
  bool resume_pending_ = false;
  std::optional<int64_t> resumed_tied_;
  size_t rows_ = 0;  // to make room for
};

}  // namespace

Result<RankRecord> readRankRecord(trace::ByteSource* source, const std::string& name,
                                  const Progress& progress, const RecordLimits& limits) {
  return Reader(source, name, progress, limits).read();
}

}  // namespace halfwire::parity
