// Records a training run for `halfwire parity` from C++: one object for each rank, a few calls in each
// optimizer step. Needs the standard library and POSIX files, nothing else. The files are described in
// docs/parity-record.md, their use in docs/parity-recorder.md.
//
//   auto recorder = halfwire::parity::Recorder::open("runs/exact-1", header, tensors, &error);
//   for (...) {
//     recorder->batch(tokens.data(), tokens.size() * sizeof(int), samples_of_all_ranks);
//     recorder->loss(loss);
//     recorder->gradients();                // reduced and unscaled, before they are clipped
//     clip();
//     recorder->beforeUpdate({{rate}});
//     optimizer.step();
//     recorder->afterUpdate("float32");
//   }
//
// Nothing of the program's is written to. No call throws, prints or ends the process. An object is used by
// one thread at a time. After an error nothing more is recorded and error() says why; training goes on.
#ifndef HALFWIRE_PARITY_H_
#define HALFWIRE_PARITY_H_

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace halfwire::parity {

enum class Type : uint8_t { kFp32, kBf16, kFp16, kFp64 };

// One parameter tensor as this rank holds it: memory that stays where it is while the recorder lives.
struct Tensor {
  std::string name;  // the same on all ranks and in every run of the same model
  const void* values = nullptr;
  size_t elements = 0;
  Type type = Type::kFp32;
  const void* gradient = nullptr;  // as many elements; nullptr: it never has one
  Type gradient_type = Type::kFp32;
  uint32_t group = 0;  // parameter group, counted from 0 without gaps
};

// The record's header; what is not set is left out of it.
struct Header {
  int64_t rank = 0;
  int64_t world_size = 1;
  std::optional<int64_t> seed, accumulation, tied, resumed_from, warmup;
  std::optional<bool> sharded, reduced, tied_expected;
  std::optional<double> dropout;
  std::string precision;  // "fp32", "bf16", "fp16" or "mixed"; empty: from the tensors' types
  std::string program;
  std::map<std::string, std::string> versions;
  std::map<std::string, std::string> halfwire;  // settings of the library in this process
};

class Recorder {
 public:
  static constexpr size_t kMostSampleBytes = size_t{64} << 20;

  // Begins `rank<R>.jsonl` in `directory`, which is made if missing. A file that is there already is an
  // error, except that a run with resumed_from above 0 goes on with it. nullptr and one sentence in `*error`
  // if nothing can be recorded.
  static std::unique_ptr<Recorder> open(const std::string& directory, const Header& header,
                                        std::vector<Tensor> tensors, std::string* error,
                                        size_t sample_bytes = kMostSampleBytes) {
    std::unique_ptr<Recorder> r(new Recorder);
    *error = r->begin(directory, header, std::move(tensors), std::min(sample_bytes, kMostSampleBytes));
    return error->empty() ? std::move(r) : nullptr;
  }

  ~Recorder() {
    if (file_ >= 0) ::close(file_);
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // The bytes of one micro-batch of this rank, and how many samples all ranks together take in it.
  void batch(const void* data, size_t bytes, uint64_t samples) {
    batch_ = hash(data, bytes, batch_.value_or(0x51ED270B0F1A2C3Dull));
    samples_ += samples;
    counted_ = true;
  }
  // The mean loss of one micro-batch of this rank.
  void loss(double value) { losses_ += value, ++loss_count_; }
  // The scaler's factor in force at this step.
  void lossScale(double factor) { loss_scale_ = factor; }
  // The state of this rank's generator from which dropout draws, before the step.
  void randomState(const void* state, size_t bytes) { random_ = hash(state, bytes, 1); }
  // Of the header's tied pairs, how many no longer hold the same values.
  void tiedApart(int64_t pairs) { tied_apart_ = pairs; }

  // Looks at the gradients before they are clipped. Not needed where nothing clips.
  void gradients() { before_clip_ = norms(); }

  // Looks at gradients and parameters just before the update. `rates`: the learning rate of each group.
  void beforeUpdate(std::span<const double> rates) {
    if (file_ < 0) return;
    rates_.assign(rates.begin(), rates.end());
    rates_.resize(groups_.size(), std::numeric_limits<double>::quiet_NaN());
    clipped_ = norms();
    if (before_clip_.empty()) before_clip_ = clipped_;
    for (size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].grad_hash = 0;
      for (const Part& p : groups_[g].parts) {
        const Tensor& t = tensors_[p.tensor];
        if (t.gradient == nullptr) continue;
        groups_[g].grad_hash = hash(t.gradient, p.elements * width(t.gradient_type), groups_[g].grad_hash);
      }
    }
    for (const Group& group : groups_) {
      for (const Part& p : group.parts) {
        const Tensor& t = tensors_[p.tensor];
        std::memcpy(before_.data() + p.offset, t.values, p.elements * width(t.type));
      }
    }
  }
  void beforeUpdate(std::initializer_list<double> rates) {
    beforeUpdate(std::span<const double>(rates.begin(), rates.size()));
  }

  // Looks at the parameters after the update and writes the step. `state`: the lowest precision of the
  // optimizer's state ("float32", "bfloat16", ...), empty if there is none. False once recording has ended.
  bool afterUpdate(std::string_view state = {}) {
    if (file_ < 0) return false;
    std::string line = begun(false);
    for (size_t g = 0; g < groups_.size(); ++g) {
      line += g == 0 ? "{" : ",{";
      groupOf(g, &line);
      changes(g, &line);
      if (!state.empty()) line += ",\"state_dtype\":" + quoted(state);
      line += '}';
    }
    return ended(std::move(line));
  }

  // Instead of beforeUpdate and afterUpdate where the loss scaler skipped the update.
  bool skipped(std::span<const double> rates) {
    if (file_ < 0) return false;
    rates_.assign(rates.begin(), rates.end());
    rates_.resize(groups_.size(), std::numeric_limits<double>::quiet_NaN());
    clipped_ = norms();
    if (before_clip_.empty()) before_clip_ = clipped_;
    std::string line = begun(true);
    for (size_t g = 0; g < groups_.size(); ++g) {
      line += g == 0 ? "{" : ",{";
      groupOf(g, &line);
      line += '}';
    }
    return ended(std::move(line));
  }
  bool skipped(std::initializer_list<double> rates) {
    return skipped(std::span<const double>(rates.begin(), rates.size()));
  }

  const std::string& error() const { return error_; }

  // A hash of bytes that depends on their order: four lanes of multiplications, joined at the end.
  static uint64_t hash(const void* data, size_t bytes, uint64_t seed) {
    constexpr uint64_t kA = 0x9E3779B97F4A7C15ull, kB = 0xC2B2AE3D27D4EB4Full;
    std::array<uint64_t, 4> lane = {seed ^ kA, seed + kB, seed * kA + 1, ~seed};
    const auto* at = static_cast<const unsigned char*>(data);
    size_t left = bytes;
    for (; left >= 32; left -= 32, at += 32) {
      for (size_t i = 0; i < 4; ++i) {
        uint64_t word;
        std::memcpy(&word, at + 8 * i, 8);
        lane[i] = mixed(lane[i], word);
      }
    }
    if (left > 0) {
      std::array<uint64_t, 4> tail = {};
      std::memcpy(tail.data(), at, left);
      for (size_t i = 0; i < 4; ++i) lane[i] = mixed(lane[i], tail[i]);
    }
    uint64_t h = bytes * kB;
    for (const uint64_t l : lane) {
      h = (h ^ l) * kB;
      h ^= h >> 32;
    }
    return h;
  }

 private:
  struct Part {
    size_t tensor, elements, offset;
  };
  struct Group {
    std::vector<Part> parts;
    size_t sampled = 0;
    uint64_t grad_hash = 0;
  };
  struct Norm {
    double norm = 0;
    uint64_t nonfinite = 0;
  };

  Recorder() = default;

  // The word is spread over all bits before it meets the lane: a change of a top bit must not look like one
  // of a bit of the next word.
  static uint64_t mixed(uint64_t lane, uint64_t word) {
    word = (word ^ word >> 32) * 0xD6E8FEB86659FD93ull;
    return std::rotl((lane ^ word ^ word >> 32) * 0x9E3779B97F4A7C15ull, 29);
  }

  static size_t width(Type t) { return t == Type::kFp64 ? 8 : t == Type::kFp32 ? 4 : 2; }

  static float fromHalf(uint16_t h) {
    const int exponent = h >> 10 & 31;
    const uint32_t mantissa = h & 1023;
    const float sign = h >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) {
      return mantissa ? std::numeric_limits<float>::quiet_NaN()
                      : sign * std::numeric_limits<float>::infinity();
    }
    return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                 : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25));
  }

  static double value(const void* values, Type type, size_t i) {
    switch (type) {
      case Type::kFp64:
        return static_cast<const double*>(values)[i];
      case Type::kFp32:
        return static_cast<const float*>(values)[i];
      case Type::kBf16:
        return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(values)[i]) << 16);
      case Type::kFp16:
        return fromHalf(static_cast<const uint16_t*>(values)[i]);
    }
    return 0;
  }

  static uint64_t fnv1a(std::string_view s) {
    uint64_t h = 0xCBF29CE484222325ull;
    for (const char c : s) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
    return h;
  }

  static std::string number(double x) {
    if (std::isnan(x)) return "\"nan\"";
    if (std::isinf(x)) return x > 0 ? "\"inf\"" : "\"-inf\"";
    char text[40];
    return std::string(text, std::to_chars(text, text + sizeof text, x).ptr);
  }

  static std::string hex(uint64_t h) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string s = "\"0000000000000000\"";
    for (int i = 16; i > 0; --i, h >>= 4) s[i] = kDigits[h & 15];
    return s;
  }

  // Bytes beyond ASCII are taken for Latin-1, so that any string gives valid JSON.
  static std::string quoted(std::string_view s) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string q = "\"";
    for (const char c : s.substr(0, 4096)) {
      const auto u = static_cast<unsigned char>(c);
      if (u == '"' || u == '\\') {
        q += '\\', q += c;
      } else if (u < 0x20 || u >= 0x7F) {
        q += "\\u00", q += kDigits[u >> 4], q += kDigits[u & 15];
      } else {
        q += c;
      }
    }
    return q + '"';
  }

  static std::string object(const std::map<std::string, std::string>& m) {
    std::string s = "{";
    for (const auto& [name, text] : m) {
      if (s.size() > 1) s += ',';
      s += quoted(name);
      s += ':';
      s += quoted(text);
    }
    s += '}';
    return s;
  }

  std::string begin(const std::string& directory, const Header& h, std::vector<Tensor> tensors,
                    size_t limit) {
    if (h.world_size < 1 || h.rank < 0 || h.rank >= h.world_size) {
      return "rank " + std::to_string(h.rank) + " is not one of " + std::to_string(h.world_size) + " ranks";
    }
    tensors_ = std::move(tensors);
    size_t elements = 0;
    uint32_t most = 0;
    for (const Tensor& t : tensors_) {
      if (t.elements > 0 && t.values == nullptr) return "tensor '" + t.name + "' has elements and no memory";
      if (t.elements > std::numeric_limits<size_t>::max() / 8) return "tensor '" + t.name + "' is too large";
      if (t.group >= 1024)
        return "tensor '" + t.name + "' is in group " + std::to_string(t.group) + ": at most 1024";
      elements += t.elements;
      most = std::max(most, t.group);
    }
    if (elements == 0) return "there are no parameters to record";
    groups_.resize(most + 1);
    chooseSample(limit);
    step_ = h.resumed_from.value_or(0);
    total_samples_known_ = step_ == 0;
    if (std::string problem = openFile(directory, h); !problem.empty()) return problem;
    if (!write(headerLine(h, elements))) return error_;
    return "";
  }

  void chooseSample(size_t limit) {
    std::vector<size_t> order;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].elements > 0) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) {
      return std::pair(fnv1a(tensors_[a].name), a) < std::pair(fnv1a(tensors_[b].name), b);
    });
    size_t left = limit, offset = 0;
    const auto take = [&](size_t i, size_t count) {
      Group& g = groups_[tensors_[i].group];
      g.parts.push_back({i, count, offset});
      g.sampled += count;
      offset += count * width(tensors_[i].type);
    };
    for (const size_t i : order) {
      const size_t w = width(tensors_[i].type);
      size_t count = tensors_[i].elements;
      if (offset == 0) count = std::min(count, std::max<size_t>(limit / w, 1));
      if (count * w > left && offset != 0) continue;
      left -= std::min(left, count * w);
      take(i, count);
    }
    // A group none of whose tensors fitted: the beginning of its first.
    for (const size_t i : order) {
      if (groups_[tensors_[i].group].parts.empty()) {
        take(i, std::min(tensors_[i].elements, (size_t{1} << 20) / width(tensors_[i].type)));
      }
    }
    before_.resize(offset);
  }

  std::string openFile(const std::string& directory, const Header& h) {
    std::error_code code;
    std::filesystem::create_directories(directory, code);
    if (code) return "cannot make the directory " + directory + ": " + code.message();
    const std::string path =
        (std::filesystem::path(directory) / ("rank" + std::to_string(h.rank) + ".jsonl")).string();
    const bool goes_on = h.resumed_from.value_or(0) > 0;
    const int flags = O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | (goes_on ? 0 : O_EXCL);
    const int file = ::open(path.c_str(), flags, 0644);
    if (file < 0) {
      if (errno == EEXIST) return path + " exists: a run needs a directory of its own";
      return "cannot write " + path + ": " + std::generic_category().message(errno);
    }
    struct stat about = {};
    if (::fstat(file, &about) != 0 || !S_ISREG(about.st_mode)) {
      ::close(file);
      return path + " is not a plain file";
    }
    // A killed run may have left half a line.
    off_t end = about.st_size;
    char c = 0;
    while (end > 0 && ::pread(file, &c, 1, end - 1) == 1 && c != '\n') --end;
    if (end < about.st_size && ::ftruncate(file, end) != 0) {
      ::close(file);
      return "cannot go on with " + path + ": " + std::generic_category().message(errno);
    }
    file_ = file;
    return "";
  }

  std::string headerLine(const Header& h, size_t elements) const {
    std::string s = "{\"halfwire_parity\":1,\"rank\":" + std::to_string(h.rank) +
                    ",\"world_size\":" + std::to_string(h.world_size);
    const auto integer = [&s](const char* name, const std::optional<int64_t>& v) {
      if (v) s += std::string(",\"") + name + "\":" + std::to_string(*v);
    };
    const auto boolean = [&s](const char* name, const std::optional<bool>& v) {
      if (v) s += std::string(",\"") + name + (*v ? "\":true" : "\":false");
    };
    integer("seed", h.seed);
    if (!h.program.empty()) s += ",\"program\":" + quoted(h.program);
    if (!h.versions.empty()) s += ",\"versions\":" + object(h.versions);
    s += ",\"precision\":" + quoted(h.precision.empty() ? precision() : h.precision);
    if (!h.halfwire.empty()) s += ",\"halfwire\":" + object(h.halfwire);
    integer("accumulation", h.accumulation);
    boolean("sharded", h.sharded);
    boolean("reduced", h.reduced);
    size_t sampled = 0;
    for (const Group& g : groups_) sampled += g.sampled;
    s += ",\"elements\":" + std::to_string(elements) + ",\"sampled_elements\":" + std::to_string(sampled);
    if (h.dropout) s += ",\"dropout\":" + number(*h.dropout);
    integer("tied", h.tied);
    boolean("tied_expected", h.tied_expected);
    integer("resumed_from", h.resumed_from);
    integer("warmup", h.warmup);
    return s + "}\n";
  }

  std::string precision() const {
    const Type first = tensors_.front().type;
    for (const Tensor& t : tensors_) {
      if (t.type != first) return "mixed";
    }
    return first == Type::kFp32   ? "fp32"
           : first == Type::kBf16 ? "bf16"
           : first == Type::kFp16 ? "fp16"
                                  : "mixed";
  }

  // Of each group, over all gradients of this rank.
  std::vector<Norm> norms() const {
    std::vector<Norm> result(groups_.size());
    for (const Tensor& t : tensors_) {
      if (t.gradient == nullptr) continue;
      Norm& n = result[t.group];
      for (size_t i = 0; i < t.elements; ++i) {
        const double v = value(t.gradient, t.gradient_type, i);
        if (!std::isfinite(v)) ++n.nonfinite;
        n.norm += v * v;
      }
    }
    for (Norm& n : result) n.norm = std::sqrt(n.norm);
    return result;
  }

  std::string begun(bool skipped) {
    std::string s = "{\"step\":" + std::to_string(step_);
    total_samples_ += samples_;
    total_samples_known_ = total_samples_known_ && counted_;
    if (total_samples_known_) s += ",\"samples\":" + std::to_string(total_samples_);
    if (loss_count_ > 0) s += ",\"loss\":" + number(losses_ / static_cast<double>(loss_count_));
    if (loss_scale_) s += ",\"loss_scale\":" + number(*loss_scale_);
    if (loss_scale_ || skipped) s += skipped ? ",\"skipped\":true" : ",\"skipped\":false";
    if (batch_) s += ",\"batch_hash\":" + hex(*batch_);
    if (random_) s += ",\"rng_hash\":" + hex(*random_);
    if (tied_apart_) s += ",\"tied_apart\":" + std::to_string(*tied_apart_);
    return s + ",\"groups\":[";
  }

  void groupOf(size_t g, std::string* s) const {
    // An unknown rate is left out; the norms always follow, so that the comma is in place.
    if (!std::isnan(rates_[g])) *s += "\"lr\":" + number(rates_[g]) + ',';
    *s += "\"grad_norm\":" + number(before_clip_[g].norm) +
          ",\"grad_norm_clipped\":" + number(clipped_[g].norm) +
          ",\"nonfinite\":" + std::to_string(before_clip_[g].nonfinite);
  }

  void changes(size_t g, std::string* s) const {
    const Group& group = groups_[g];
    if (group.sampled == 0) return;
    double change = 0, norm = 0, sum = 0;
    size_t same = 0;
    uint64_t bits = 0;
    for (const Part& p : group.parts) {
      const Tensor& t = tensors_[p.tensor];
      const size_t w = width(t.type);
      const unsigned char* old = before_.data() + p.offset;
      const auto* now = static_cast<const unsigned char*>(t.values);
      for (size_t i = 0; i < p.elements; ++i) {
        uint64_t raw = 0;  // aligned for value()
        std::memcpy(&raw, old + i * w, w);
        const double a = value(&raw, t.type, 0), b = value(now, t.type, i);
        change += (b - a) * (b - a);
        norm += b * b;
        sum += b;
        if (std::memcmp(old + i * w, now + i * w, w) == 0 && t.gradient != nullptr &&
            value(t.gradient, t.gradient_type, i) != 0) {
          ++same;
        }
      }
      bits = hash(now, p.elements * w, bits);
    }
    *s += ",\"grad_hash\":" + hex(group.grad_hash) + ",\"update_norm\":" + number(std::sqrt(change)) +
          ",\"unchanged\":" + number(static_cast<double>(same) / static_cast<double>(group.sampled)) +
          ",\"param_norm\":" + number(std::sqrt(norm)) + ",\"param_sum\":" + number(sum) +
          ",\"param_hash\":" + hex(bits);
  }

  bool ended(std::string line) {
    line += "]}\n";
    ++step_;
    losses_ = 0, loss_count_ = 0, samples_ = 0, counted_ = false;
    batch_.reset(), random_.reset(), loss_scale_.reset(), tied_apart_.reset();
    before_clip_.clear(), clipped_.clear();
    return write(line);
  }

  // One call for a line: a killed process leaves whole lines.
  bool write(const std::string& line) {
    ssize_t done;
    do {
      done = ::write(file_, line.data(), line.size());
    } while (done < 0 && errno == EINTR);
    if (done == static_cast<ssize_t>(line.size())) return true;
    error_ = done < 0 ? "recording ended: " + std::generic_category().message(errno)
                      : "recording ended: the disk took " + std::to_string(done) + " of " +
                            std::to_string(line.size()) + " bytes";
    struct stat about = {};
    if (done > 0 && ::fstat(file_, &about) == 0 && ::ftruncate(file_, about.st_size - done) != 0) {
      error_ += ", and the last line is not whole";
    }
    ::close(file_);
    file_ = -1;
    return false;
  }

  int file_ = -1;
  std::string error_;
  std::vector<Tensor> tensors_;
  std::vector<Group> groups_;
  std::vector<unsigned char> before_;
  int64_t step_ = 0;
  uint64_t total_samples_ = 0, samples_ = 0;
  bool total_samples_known_ = true, counted_ = false;
  double losses_ = 0;
  size_t loss_count_ = 0;
  std::optional<double> loss_scale_;
  std::optional<uint64_t> batch_, random_;
  std::optional<int64_t> tied_apart_;
  std::vector<double> rates_;
  std::vector<Norm> before_clip_, clipped_;
};

}  // namespace halfwire::parity

#endif
