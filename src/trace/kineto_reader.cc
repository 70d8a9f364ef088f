#include "trace/kineto_reader.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "trace/json_repair.h"
#include "trace/numbers.h"
#include "trace/timeline_builder.h"

namespace halfwire::trace {
namespace {

namespace ondemand = simdjson::ondemand;

enum class Category : uint8_t {
  kUnset,
  kIgnored,
  kKernel,
  kCopy,
  kSet,
  kRuntime,
  kOperator,
  kAnnotation,
  kSync
};

Category categoryOf(std::string_view cat) {
  if (cat == "kernel" || cat == "Kernel") return Category::kKernel;
  if (cat == "cpu_op" || cat == "Operator") return Category::kOperator;
  if (cat == "cuda_runtime" || cat == "cuda_driver" || cat == "Runtime" || cat == "hip_runtime" ||
      cat == "hip_driver") {
    return Category::kRuntime;
  }
  if (cat == "gpu_memcpy" || cat == "Memcpy") return Category::kCopy;
  if (cat == "gpu_memset" || cat == "Memset") return Category::kSet;
  if (cat == "user_annotation") return Category::kAnnotation;
  if (cat == "cuda_sync") return Category::kSync;
  return Category::kIgnored;
}

bool startsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// The fields of one event that matter, as raw tokens of the window.
struct Fields {
  std::string_view phase, name, ts, dur, pid, tid;
  Category category = Category::kUnset;
  bool escaped_name = false;
  std::string_view clean_name;  // unescaped, only when escaped_name

  int64_t correlation = -1;
  int64_t record_correlation = -1;
  std::string_view stream, device, wait_stream, sync_kind;
  std::string_view collective, element, group_name, group_ranks, input_type;
  int64_t in_elements = -1, out_elements = -1, group_size = 0, sequence = -1;
  int64_t input_elements = -1;  // product of "Input Dims"
};

class Reader {
 public:
  Reader(ByteSource& source, const std::string& file, const CommPatterns& patterns,
         const ReadOptions& options)
      : source_(source), patterns_(patterns), options_(options) {
    timeline_.file = file;
    timeline_.format = Format::kKineto;
  }

  Result<Timeline> run();

 private:
  enum class Part : uint8_t { kHead, kEvents, kTail };

  // What became of one window.
  struct Outcome {
    simdjson::error_code error = simdjson::SUCCESS;
    size_t consumed = 0;       // bytes of content that are done with
    bool array_ended = false;  // by the file's own bracket
    Status refused;            // not damage but a value that cannot be accepted
  };

  Status fill(bool* eof);
  Outcome parse(char* content, size_t size, bool final, const RepairedJson* repaired);
  simdjson::error_code events(ondemand::document& doc, ondemand::array array, const char* content,
                              size_t size, bool final, Outcome* outcome);
  simdjson::error_code event(ondemand::object object);
  simdjson::error_code arguments(ondemand::object object);
  simdjson::error_code dims(ondemand::value value, int depth, int64_t* product, bool* any);
  simdjson::error_code metadata(std::string_view key, ondemand::value value);
  Status accept(uint64_t offset);
  Status deviceEvent(uint64_t offset);
  bool times(uint64_t offset, int64_t* start, int64_t* end, Status* status);
  int32_t thread();
  int32_t stream(std::string_view stream_token, std::string_view device_token);
  int32_t streamIndex(int64_t device, int64_t number);
  CommInfo commInfo();
  std::string_view name() const { return f_.escaped_name ? f_.clean_name : f_.name; }
  uint64_t offsetOf(const char* p) const;
  Status damaged(uint64_t offset, std::string_view what) const {
    return {StatusCode::kInvalidData, fmt::format("{}: at byte {}: {}", timeline_.file, offset, what)};
  }
  Status cutShort(bool inside_string) const {
    return {StatusCode::kInvalidData,
            fmt::format("{}: the JSON ends at byte {} {}: the file was cut short; copy or record it again",
                        timeline_.file, base_ + size_,
                        inside_string ? "within a string" : "before its last bracket is closed")};
  }
  void mendings();

  static constexpr std::string_view kEventsPrefix = "{\"traceEvents\":[";
  static constexpr std::string_view kTailPrefix = "{\"traceEvents\":[]";
  static constexpr size_t kRoom = 32;  // before the content, for a prefix

  ByteSource& source_;
  const CommPatterns& patterns_;
  const ReadOptions& options_;
  Timeline timeline_;
  ondemand::parser parser_;

  std::vector<char> buffer_;  // kRoom, content, padding
  size_t window_ = 0;
  size_t size_ = 0;    // bytes of content in the buffer
  uint64_t base_ = 0;  // offset of the content in the data
  Part part_ = Part::kHead;
  bool array_form_ = false;
  bool found_events_ = false;

  const char* content_ = nullptr;  // of the window being parsed
  const RepairedJson* repaired_ = nullptr;

  Fields f_;
  std::unordered_map<uint64_t, int32_t> stream_ids_;
  uint64_t last_stream_key_ = 0;
  int32_t last_stream_ = kNone;
  std::unordered_map<uint64_t, int32_t> thread_ids_;
  uint64_t last_thread_key_ = 0;
  int32_t last_thread_ = kNone;
  std::vector<int8_t> call_kinds_;  // by name id: 0 unknown, else CallKind + 1

  uint64_t with_phase_ = 0, not_objects_ = 0, no_duration_ = 0, negative_ = 0, no_stream_ = 0;
  uint64_t mended_bytes_ = 0, mended_escapes_ = 0, mended_quotes_ = 0, mended_words_ = 0;
  uint64_t nccl_ops_ = 0;
};

Status Reader::fill(bool* eof) {
  buffer_.resize(kRoom + window_ + simdjson::SIMDJSON_PADDING + 16);
  Result<size_t> got = source_.read(buffer_.data() + kRoom + size_, window_ - size_);
  if (!got.ok()) return got.status();
  size_ += got.value();
  *eof = size_ < window_;
  if (options_.progress) options_.progress(source_.position(), source_.size());
  return {};
}

uint64_t Reader::offsetOf(const char* p) const {
  const auto in_window = static_cast<size_t>(std::max<std::ptrdiff_t>(0, p - content_));
  return base_ + (repaired_ != nullptr ? repaired_->original(in_window) : in_window);
}

// Where to cut an incomplete window: after the last "}" that a comma and an opening brace follow. Inside a
// string or a nested list such bytes mislead; parsing then fails there and the window is taken apart string
// by string instead.
size_t findCut(const char* data, size_t size) {
  const auto space = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
  for (size_t i = size; i-- > 1;) {
    if (data[i] != '{') continue;
    size_t k = i;
    while (k > 0 && space(data[k - 1])) --k;
    if (k == 0 || data[k - 1] != ',') continue;
    --k;
    while (k > 0 && space(data[k - 1])) --k;
    if (k > 0 && data[k - 1] == '}') return k;
    i = k + 1;
  }
  return 0;
}

Result<Timeline> Reader::run() {
  window_ = std::max<size_t>(options_.window_bytes, 256);
  bool eof = false;
  if (Status s = fill(&eof); !s.ok()) return s;
  if (size_ == 0) return damaged(0, "the file is empty");
  {
    const char* data = buffer_.data() + kRoom;
    size_t skip = 0;
    if (size_ >= 3 && std::memcmp(data, "\xEF\xBB\xBF", 3) == 0) skip = 3;
    while (skip < size_ &&
           (data[skip] == ' ' || data[skip] == '\n' || data[skip] == '\r' || data[skip] == '\t'))
      ++skip;
    if (skip == size_) return damaged(skip, "there is no JSON, only white space");
    if (data[skip] != '{' && data[skip] != '[') {
      return damaged(
          skip,
          "this is not JSON: a trace begins with '{' or '[' (Kineto JSON, its .gz, or an Nsight Systems "
          "SQLite export are read)");
    }
    array_form_ = data[skip] == '[';
    std::memmove(buffer_.data() + kRoom, data + skip, size_ - skip);
    size_ -= skip;
    base_ += skip;
    if (!eof) {
      if (Status s = fill(&eof); !s.ok()) return s;
    }
  }

  while (true) {
    char* content = buffer_.data() + kRoom;
    size_t take = size_;
    if (!eof) take = part_ == Part::kTail ? 0 : findCut(content, size_);
    Outcome outcome;
    if (take > 0) outcome = parse(content, take, eof, nullptr);
    if (!outcome.refused.ok()) return outcome.refused;
    if (take > 0 && outcome.error == simdjson::SUCCESS) {
      if (eof) break;
    } else if (outcome.consumed == 0) {
      // Nothing could be read from here: look at it string by string, and mend it if it is damaged.
      const int64_t event_depth = part_ == Part::kHead ? (array_form_ ? 1 : 2) : (array_form_ ? 0 : 0);
      RepairedJson mended = repairJson({content, size_}, event_depth, eof);
      const int64_t end_depth =
          part_ == Part::kHead ? 0 : (array_form_ ? -1 : (part_ == Part::kTail ? -1 : -2));
      if (eof && (mended.inside_string || mended.depth > end_depth)) return cutShort(mended.inside_string);
      Outcome second;
      if (eof || mended.found_event) {
        const size_t text_size = mended.text.size();
        std::string text(kRoom, ' ');
        text += mended.text;
        text.resize(kRoom + text_size + simdjson::SIMDJSON_PADDING + 16);
        second = parse(text.data() + kRoom, text_size, eof, &mended);
        if (!second.refused.ok()) return second.refused;
        mended_bytes_ += mended.bad_bytes;
        mended_escapes_ += mended.bad_escapes;
        mended_quotes_ += mended.bad_quotes;
        mended_words_ += mended.bare_words;
      }
      if (second.error == simdjson::SUCCESS && second.consumed > 0) {
        outcome = second;
        if (eof) break;
      } else if (second.consumed > 0) {
        outcome = second;
        outcome.consumed = mended.original(second.consumed);
      } else if (eof) {
        return damaged(base_ + mended.original(second.consumed),
                       fmt::format("the JSON cannot be read ({}) and could not be mended",
                                   simdjson::error_message(outcome.error)));
      } else {
        outcome = {};
      }
    }
    if (outcome.array_ended && !eof) part_ = Part::kTail;
    if (outcome.consumed == 0) {
      if (window_ >= options_.max_window_bytes) {
        return damaged(base_, part_ == Part::kHead ? "no list of trace events begins within the first 64 MiB"
                                                   : "one event is larger than 64 MiB");
      }
      window_ = std::min(window_ * 2, options_.max_window_bytes);
    } else {
      if (part_ == Part::kHead) part_ = Part::kEvents;
      size_t from = outcome.consumed;
      if (part_ == Part::kEvents) {  // the comma between two windows belongs to neither
        while (from < size_ && (content[from] == ' ' || content[from] == '\n' || content[from] == '\r' ||
                                content[from] == '\t' || content[from] == ',')) {
          ++from;
        }
      }
      std::memmove(content, content + from, size_ - from);
      size_ -= from;
      base_ += from;
    }
    if (eof && size_ == 0) return cutShort(false);
    if (!eof) {
      if (Status s = fill(&eof); !s.ok()) return s;
    }
  }

  if (!found_events_) {
    return Status(StatusCode::kInvalidData,
                  fmt::format("{}: the JSON has no field 'traceEvents': this is not a profiler's trace",
                              timeline_.file));
  }
  if (with_phase_ == 0 && timeline_.events + not_objects_ > 0) {
    return Status(StatusCode::kInvalidData,
                  fmt::format("{}: none of its {} events has the field 'ph': this is not a profiler's trace",
                              timeline_.file, timeline_.events + not_objects_));
  }
  timeline_.json_bytes = base_ + size_;
  mendings();
  if (Status s = finishTimeline(&timeline_, patterns_); !s.ok()) return s;
  return std::move(timeline_);
}

Reader::Outcome Reader::parse(char* content, size_t size, bool final, const RepairedJson* repaired) {
  Outcome outcome;
  content_ = content;
  repaired_ = repaired;
  const std::string_view prefix = part_ == Part::kHead ? std::string_view()
                                  : part_ == Part::kEvents
                                      ? (array_form_ ? std::string_view("[") : kEventsPrefix)
                                      : (array_form_ ? std::string_view("[") : kTailPrefix);
  const std::string_view suffix =
      final ? std::string_view() : (array_form_ ? std::string_view("]") : std::string_view("]}"));
  char* begin = content - prefix.size();
  prefix.copy(begin, prefix.size());
  char saved[2];
  std::memcpy(saved, content + size, suffix.size());
  suffix.copy(content + size, suffix.size());
  const size_t length = prefix.size() + size + suffix.size();

  const auto body = [&]() -> simdjson::error_code {
    ondemand::document doc;
    if (auto e = parser_.iterate(begin, length, length + simdjson::SIMDJSON_PADDING).get(doc)) return e;
    if (array_form_) {
      ondemand::array array;
      if (auto e = doc.get_array().get(array)) return e;
      found_events_ = true;
      if (auto e = events(doc, array, content, size, final, &outcome)) return e;
    } else {
      ondemand::object object;
      if (auto e = doc.get_object().get(object)) return e;
      bool done = false;
      for (auto field : object) {
        if (field.error() != simdjson::SUCCESS) return field.error();
        ondemand::raw_json_string key;
        if (auto e = field.key().get(key)) return e;
        ondemand::value value;
        if (auto e = field.value().get(value)) return e;
        if (std::memcmp(key.raw(), "traceEvents\"", 12) == 0) {
          ondemand::array array;
          if (auto e = value.get_array().get(array)) return e;
          found_events_ = true;
          if (auto e = events(doc, array, content, size, final, &outcome)) return e;
          done = true;
          if (outcome.array_ended && !final)
            return simdjson::SUCCESS;  // the rest is read with the file's end
        } else {
          const char* raw = key.raw();
          const char* quote = static_cast<const char*>(std::memchr(raw, '"', 64));
          const std::string_view text(raw, quote == nullptr ? 0 : static_cast<size_t>(quote - raw));
          if (auto e = metadata(text, value)) return e;
        }
      }
      if (!done && !final) return simdjson::NO_SUCH_FIELD;
    }
    if (final) {
      // Whatever follows the last bracket makes this another kind of file.
      const char* after = nullptr;
      if (doc.current_location().get(after) == simdjson::SUCCESS && after < content + size) {
        outcome.refused = damaged(offsetOf(after),
                                  "more JSON follows the trace (JSON lines, as some tools export, are not "
                                  "read; export Nsight Systems reports with: nsys export --type sqlite)");
      }
    }
    return simdjson::SUCCESS;
  };
  outcome.error = body();
  std::memcpy(content + size, saved, suffix.size());
  if (outcome.error == simdjson::SUCCESS && outcome.refused.ok() && !outcome.array_ended)
    outcome.consumed = size;
  if (outcome.error == simdjson::SUCCESS && final) outcome.consumed = size;
  if (outcome.error == simdjson::SUCCESS && repaired != nullptr && !final) {
    outcome.consumed = outcome.array_ended ? repaired->original(outcome.consumed) : repaired->end;
  }
  return outcome;
}

// Events up to the end of the array or the first damage. A window's events before the damage count as
// consumed.
simdjson::error_code Reader::events(ondemand::document& doc, ondemand::array array, const char* content,
                                    size_t size, bool final, Outcome* outcome) {
  // An event is taken in only when the next one begins (or the list ends): then all of it was there.
  for (auto item : array) {
    if (item.error() != simdjson::SUCCESS) return item.error();
    const char* start = nullptr;
    if (auto e = doc.current_location().get(start)) return e;
    if (part_ != Part::kHead)
      outcome->consumed = static_cast<size_t>(std::max<std::ptrdiff_t>(0, start - content));
    ondemand::object object;
    if (item.get_object().get(object) != simdjson::SUCCESS) {
      ++not_objects_;
      continue;
    }
    if (auto e = event(object)) return e;
    ++timeline_.events;
    if (outcome->refused = accept(offsetOf(start)); !outcome->refused.ok()) return simdjson::SUCCESS;
  }
  // The list ended with the file's own bracket if something of the window follows it, or if nothing follows
  // at all.
  const char* after = content + size;
  if (const char* location = nullptr; doc.current_location().get(location) == simdjson::SUCCESS) {
    after = std::min(after, location);
  }
  if (after < content + size || final) {
    const char* bracket = after;
    while (bracket > content && *--bracket != ']') {
    }
    outcome->array_ended = true;
    outcome->consumed = static_cast<size_t>(after - content);
    if (repaired_ == nullptr) timeline_.events_end = offsetOf(bracket);
  }
  return simdjson::SUCCESS;
}

simdjson::error_code Reader::event(ondemand::object object) {
  f_ = Fields();
  for (auto field : object) {
    if (field.error() != simdjson::SUCCESS) return field.error();
    ondemand::raw_json_string key;
    if (auto e = field.key().get(key)) return e;
    const char* k = key.raw();
    ondemand::value value;
    if (auto e = field.value().get(value)) return e;
    switch (k[0]) {
      case 'p':
        if (std::memcmp(k, "ph\"", 3) == 0) {
          f_.phase = unquoted(value.raw_json_token());
          ++with_phase_;
          // Everything kept is a complete event; flow arrows and the like are skipped as a whole.
          if (f_.phase != "X") return simdjson::SUCCESS;
        } else if (std::memcmp(k, "pid\"", 4) == 0) {
          f_.pid = value.raw_json_token();
        }
        break;
      case 'c':
        if (std::memcmp(k, "cat\"", 4) == 0) {
          f_.category = categoryOf(unquoted(value.raw_json_token()));
          if (f_.category == Category::kIgnored && !f_.phase.empty()) return simdjson::SUCCESS;
        }
        break;
      case 'n':
        if (std::memcmp(k, "name\"", 5) == 0) {
          f_.name = unquoted(value.raw_json_token());
          if (std::memchr(f_.name.data(), '\\', f_.name.size()) != nullptr) {
            // A bad escape leaves the name as it is written.
            f_.escaped_name = value.get_string().get(f_.clean_name) == simdjson::SUCCESS;
          }
        }
        break;
      case 't':
        if (std::memcmp(k, "ts\"", 3) == 0) {
          f_.ts = value.raw_json_token();
        } else if (std::memcmp(k, "tid\"", 4) == 0) {
          f_.tid = value.raw_json_token();
        }
        break;
      case 'd':
        if (std::memcmp(k, "dur\"", 4) == 0) f_.dur = value.raw_json_token();
        break;
      case 'a':
        if (std::memcmp(k, "args\"", 5) == 0) {
          bool wanted = true;
          if (f_.category == Category::kOperator || f_.category == Category::kAnnotation) {
            const std::string_view n = name();
            wanted = n.empty() || startsWith(n, "record_param_comms") || startsWith(n, "nccl:") ||
                     startsWith(n, "c10d::");
          }
          if (!wanted) break;
          ondemand::object args;
          if (value.get_object().get(args) != simdjson::SUCCESS) break;
          if (auto e = arguments(args)) return e;
        }
        break;
      default:
        break;
    }
  }
  return simdjson::SUCCESS;
}

simdjson::error_code Reader::arguments(ondemand::object object) {
  const auto integer = [](ondemand::value& value, int64_t* out) {
    int64_t number = 0;
    if (parseLooseInteger(value.raw_json_token(), &number)) *out = number;
  };
  for (auto field : object) {
    if (field.error() != simdjson::SUCCESS) return field.error();
    ondemand::raw_json_string key;
    if (auto e = field.key().get(key)) return e;
    const char* k = key.raw();
    ondemand::value value;
    if (auto e = field.value().get(value)) return e;
    switch (k[0]) {
      case 'c':
        if (std::memcmp(k, "correlation\"", 12) == 0) {
          integer(value, &f_.correlation);
        } else if (std::memcmp(k, "cuda_sync_kind\"", 15) == 0) {
          f_.sync_kind = unquoted(value.raw_json_token());
        }
        break;
      case 's':
        if (std::memcmp(k, "stream\"", 7) == 0) f_.stream = value.raw_json_token();
        break;
      case 'd':
        if (std::memcmp(k, "device\"", 7) == 0) {
          f_.device = value.raw_json_token();
        } else if (std::memcmp(k, "dtype\"", 6) == 0) {
          f_.element = unquoted(value.raw_json_token());
        }
        break;
      case 'w':
        if (std::memcmp(k, "wait_on_stream\"", 15) == 0) {
          f_.wait_stream = value.raw_json_token();
        } else if (std::memcmp(k, "wait_on_cuda_event_record_corr_id\"", 34) == 0) {
          integer(value, &f_.record_correlation);
        }
        break;
      case 'C':
        if (std::memcmp(k, "Collective name\"", 16) == 0) f_.collective = unquoted(value.raw_json_token());
        break;
      case 'I':
        if (std::memcmp(k, "In msg nelems\"", 14) == 0) {
          integer(value, &f_.in_elements);
        } else if (std::memcmp(k, "Input Dims\"", 11) == 0 || std::memcmp(k, "Input dims\"", 11) == 0) {
          int64_t product = 1;
          bool any = false;
          if (auto e = dims(value, 0, &product, &any)) return e;
          if (any) f_.input_elements = product;
        } else if (std::memcmp(k, "Input type\"", 11) == 0) {
          ondemand::array types;
          if (value.get_array().get(types) == simdjson::SUCCESS) {
            for (auto type : types) {
              if (type.error() != simdjson::SUCCESS) return type.error();
              std::string_view text;
              if (f_.input_type.empty() && type.get_string().get(text) == simdjson::SUCCESS)
                f_.input_type = text;
            }
          }
        }
        break;
      case 'O':
        if (std::memcmp(k, "Out msg nelems\"", 15) == 0) integer(value, &f_.out_elements);
        break;
      case 'G':
        if (std::memcmp(k, "Group size\"", 11) == 0) integer(value, &f_.group_size);
        break;
      case 'P':
        if (std::memcmp(k, "Process Group Name\"", 19) == 0) {
          f_.group_name = unquoted(value.raw_json_token());
        } else if (std::memcmp(k, "Process Group Ranks\"", 20) == 0) {
          f_.group_ranks = unquoted(value.raw_json_token());
        }
        break;
      case 'S':
        if (std::memcmp(k, "Seq\"", 4) == 0) integer(value, &f_.sequence);
        break;
      default:
        break;
    }
  }
  return simdjson::SUCCESS;
}

// The number of elements of the first tensor in "Input Dims", which nests differently for lists of tensors.
simdjson::error_code Reader::dims(ondemand::value value, int depth, int64_t* product, bool* any) {
  ondemand::array array;
  if (depth > 4 || value.get_array().get(array) != simdjson::SUCCESS) return simdjson::SUCCESS;
  bool first = true;
  for (auto item : array) {
    if (item.error() != simdjson::SUCCESS) return item.error();
    ondemand::value element;
    if (auto e = item.get(element)) return e;
    ondemand::json_type type;
    if (auto e = element.type().get(type)) return e;
    if (type == ondemand::json_type::array) {
      if (!first) continue;
      first = false;
      if (auto e = dims(element, depth + 1, product, any)) return e;
    } else if (type == ondemand::json_type::number && depth > 0) {
      int64_t n = 0;
      if (!parseLooseInteger(element.raw_json_token(), &n) || n < 0) continue;
      if (__builtin_mul_overflow(*product, n, product)) *product = 0;
      *any = true;
    }
  }
  return simdjson::SUCCESS;
}

simdjson::error_code Reader::metadata(std::string_view key, ondemand::value value) {
  if (key == "baseTimeNanoseconds") {
    int64_t base = 0;
    if (parseLooseInteger(value.raw_json_token(), &base) && base >= 0 && base <= kMaxTimeNs)
      timeline_.base_ns = base;
  } else if (key == "distributedInfo") {
    ondemand::object info;
    if (value.get_object().get(info) != simdjson::SUCCESS) return simdjson::SUCCESS;
    for (auto field : info) {
      if (field.error() != simdjson::SUCCESS) return field.error();
      ondemand::raw_json_string name;
      if (auto e = field.key().get(name)) return e;
      ondemand::value v;
      if (auto e = field.value().get(v)) return e;
      int64_t number = -1;
      if (std::memcmp(name.raw(), "rank\"", 5) == 0) {
        if (parseLooseInteger(v.raw_json_token(), &number) && number >= 0 && number < (1 << 30)) {
          timeline_.rank = static_cast<int32_t>(number);
        }
      } else if (std::memcmp(name.raw(), "world_size\"", 11) == 0) {
        if (parseLooseInteger(v.raw_json_token(), &number) && number > 0 && number < (1 << 30)) {
          timeline_.world_size = static_cast<int32_t>(number);
        }
      }
    }
  }
  return simdjson::SUCCESS;
}

int32_t Reader::streamIndex(int64_t device, int64_t number) {
  // Devices are small numbers; whatever else is written there is folded into 32 bits.
  const auto device32 = static_cast<int32_t>(device);
  const uint64_t key =
      static_cast<uint64_t>(number) * 0x9E3779B97F4A7C15ULL ^ static_cast<uint32_t>(device32);
  if (last_stream_ != kNone && key == last_stream_key_) return last_stream_;
  const auto [it, added] = stream_ids_.emplace(key, static_cast<int32_t>(timeline_.streams.size()));
  if (added) timeline_.streams.push_back({device32, number});
  last_stream_key_ = key;
  last_stream_ = it->second;
  return it->second;
}

int32_t Reader::stream(std::string_view stream_token, std::string_view device_token) {
  int64_t device = 0;
  int64_t number = 0;
  if (!parseLooseInteger(device_token, &device) && !parseLooseInteger(f_.pid, &device)) device = 0;
  if (!parseLooseInteger(stream_token, &number) && !parseLooseInteger(f_.tid, &number)) ++no_stream_;
  return streamIndex(device, number);
}

int32_t Reader::thread() {
  int64_t process = 0;
  int64_t number = 0;
  if (!parseLooseInteger(f_.pid, &process))
    process = static_cast<int64_t>(std::hash<std::string_view>()(f_.pid) >> 1);
  if (!parseLooseInteger(f_.tid, &number))
    number = static_cast<int64_t>(std::hash<std::string_view>()(f_.tid) >> 1);
  const uint64_t key = static_cast<uint64_t>(process) * 0x9E3779B97F4A7C15ULL ^ static_cast<uint64_t>(number);
  if (last_thread_ != kNone && key == last_thread_key_) return last_thread_;
  const auto [it, added] = thread_ids_.emplace(key, static_cast<int32_t>(timeline_.threads.size()));
  if (added) timeline_.threads.push_back({process, number, {}, {}});
  last_thread_key_ = key;
  last_thread_ = it->second;
  return it->second;
}

// False if the event has no usable times; `status` is set if they are beyond all reason.
bool Reader::times(uint64_t offset, int64_t* start, int64_t* end, Status* status) {
  int64_t duration = 0;
  const NumberError ts = parseMicroseconds(f_.ts, start);
  const NumberError dur = parseMicroseconds(f_.dur, &duration);
  if (ts == NumberError::kOutOfRange || dur == NumberError::kOutOfRange || duration > kMaxDurationNs) {
    const bool bad_ts = ts == NumberError::kOutOfRange;
    *status =
        damaged(offset, fmt::format("the event's field '{}' is {}, which is no {} in microseconds",
                                    bad_ts ? "ts" : "dur", unquoted(bad_ts ? f_.ts : f_.dur).substr(0, 40),
                                    bad_ts ? "time" : "duration"));
    return false;
  }
  if (ts != NumberError::kNone || dur != NumberError::kNone) return false;
  if (duration < 0) {
    ++negative_;
    duration = 0;
  }
  *end = *start + duration;
  return true;
}

CommInfo Reader::commInfo() {
  CommInfo info;
  info.type = collectiveFromText(f_.collective);
  info.element = elementFromText(f_.element);
  if (f_.in_elements >= 0 || f_.out_elements >= 0) {
    info.has_sizes = true;
    info.in_elements = std::max<int64_t>(0, f_.in_elements);
    info.out_elements = std::max<int64_t>(0, f_.out_elements);
  }
  if (f_.group_size > 0 && f_.group_size < (1 << 24)) info.group_size = static_cast<int32_t>(f_.group_size);
  if (!f_.group_name.empty()) info.group_name = static_cast<int32_t>(timeline_.names.intern(f_.group_name));
  if (!f_.group_ranks.empty())
    info.group_ranks = static_cast<int32_t>(timeline_.names.intern(f_.group_ranks));
  info.sequence = f_.sequence;
  return info;
}

Status Reader::deviceEvent(uint64_t offset) {
  Activity a;
  Status status;
  if (!times(offset, &a.start_ns, &a.end_ns, &status)) {
    if (status.ok()) ++no_duration_;
    return status;
  }
  a.correlation = f_.correlation;
  a.name = timeline_.names.intern(name());
  a.stream = stream(f_.stream, f_.device);
  a.kind = f_.category == Category::kKernel ? ActivityKind::kCompute
           : f_.category == Category::kCopy ? ActivityKind::kCopy
                                            : ActivityKind::kSet;
  if (!f_.collective.empty() && f_.category == Category::kKernel) {
    a.comm = static_cast<int32_t>(timeline_.comms.size());
    timeline_.comms.push_back(commInfo());
  }
  timeline_.activities.push_back(a);
  return {};
}

Status Reader::accept(uint64_t offset) {
  if (f_.phase != "X") return {};
  switch (f_.category) {
    case Category::kKernel:
    case Category::kCopy:
    case Category::kSet:
      return deviceEvent(offset);
    case Category::kRuntime: {
      HostCall call;
      Status status;
      if (!times(offset, &call.start_ns, &call.end_ns, &status)) return status;
      const uint32_t id = timeline_.names.intern(name());
      if (id >= call_kinds_.size()) call_kinds_.resize(id + 64, 0);
      if (call_kinds_[id] == 0)
        call_kinds_[id] = static_cast<int8_t>(static_cast<int>(classifyCall(name())) + 1);
      call.kind = static_cast<CallKind>(call_kinds_[id] - 1);
      call.thread = thread();
      addSpan(&timeline_.threads[call.thread].busy, {call.start_ns, call.end_ns});
      // Queries and the like fill traces and explain nothing, unless they block.
      if (call.kind == CallKind::kOther && call.end_ns - call.start_ns < 10'000) return {};
      call.name = id;
      call.correlation = f_.correlation;
      timeline_.calls.push_back(call);
      return {};
    }
    case Category::kOperator:
    case Category::kAnnotation: {
      Span span;
      Status status;
      if (!times(offset, &span.start_ns, &span.end_ns, &status)) return status;
      const std::string_view n = name();
      if (startsWith(n, "ProfilerStep")) {
        int64_t number = 0;
        const size_t hash = n.find('#');
        if (hash != std::string_view::npos) parseLooseInteger(n.substr(hash + 1), &number);
        timeline_.steps.push_back({number, span.start_ns, span.end_ns});
        return {};
      }
      const int32_t t = thread();
      if (f_.category == Category::kOperator) addSpan(&timeline_.threads[t].busy, span);
      if (n.find("DataLoader") != std::string_view::npos) addSpan(&timeline_.threads[t].loading, span);
      const bool nccl = startsWith(n, "nccl:");
      const bool on_host = startsWith(n, "gloo:") || startsWith(n, "mpi:");
      const bool params = startsWith(n, "record_param_comms");
      if (!nccl && !on_host && !params && !startsWith(n, "c10d::")) return {};
      CommOp op;
      op.start_ns = span.start_ns;
      op.end_ns = span.end_ns;
      op.thread = t;
      op.info = commInfo();
      op.on_host = on_host;
      if (nccl || on_host) {
        nccl_ops_ += nccl ? 1 : 0;
        op.info.type = collectiveFromText(n.substr(n.find(':') + 1));
      } else if (!params && op.info.type == Collective::kGeneric) {
        op.info.type = collectiveFromText(n.substr(6));
      }
      if (!op.info.has_sizes && f_.input_elements > 0) {
        op.info.has_sizes = true;
        op.info.in_elements = f_.input_elements;
        const ElementType element = elementFromText(f_.input_type);
        if (element != ElementType::kUnknown) op.info.element = element;
      }
      timeline_.comm_ops.push_back(op);
      return {};
    }
    case Category::kSync: {
      if (f_.sync_kind != "Stream Wait Event") return {};
      StreamWait wait;
      int64_t end = 0;
      Status status;
      if (!times(offset, &wait.time_ns, &end, &status)) return status;
      int64_t device = 0;
      int64_t source = -1;
      parseLooseInteger(f_.device.empty() ? f_.pid : f_.device, &device);
      wait.waiting_stream = stream(f_.stream, f_.device);
      if (parseLooseInteger(f_.wait_stream, &source) && source >= 0)
        wait.source_stream = streamIndex(device, source);
      wait.record_correlation = f_.record_correlation;
      wait.correlation = f_.correlation;
      timeline_.waits.push_back(wait);
      return {};
    }
    case Category::kUnset:
    case Category::kIgnored:
      break;
  }
  return {};
}

void Reader::mendings() {
  auto& w = timeline_.warnings;
  if (mended_bytes_ > 0)
    w.push_back(fmt::format("{} byte(s) that JSON forbids (not UTF-8, or control characters) were replaced",
                            mended_bytes_));
  if (mended_escapes_ > 0)
    w.push_back(fmt::format("{} bad escape(s) in strings were taken literally", mended_escapes_));
  if (mended_quotes_ > 0)
    w.push_back(fmt::format("{} quote(s) were missing or unescaped and were mended", mended_quotes_));
  if (mended_words_ > 0)
    w.push_back(fmt::format("{} bare word(s) where JSON wants a value were quoted", mended_words_));
  if (no_duration_ > 0)
    w.push_back(fmt::format("{} device event(s) have no numeric time and duration: left out", no_duration_));
  if (negative_ > 0) w.push_back(fmt::format("{} event(s) have a negative duration: taken as 0", negative_));
  if (no_stream_ > 0)
    w.push_back(fmt::format("{} device event(s) name no stream: taken as stream 0", no_stream_));
  if (not_objects_ > 0) w.push_back(fmt::format("{} entries of the event list are not events", not_objects_));
}

}  // namespace

Result<Timeline> readKineto(ByteSource& source, const std::string& file, const CommPatterns& patterns,
                            const ReadOptions& options) {
  return Reader(source, file, patterns, options).run();
}

}  // namespace halfwire::trace
