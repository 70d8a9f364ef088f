// TensorBoard event files: records of TFRecord (length, CRC-32C of it, data, CRC-32C of them) that hold
// `Event` messages of protocol buffers. Only what scalars need is decoded.
#include <fmt/format.h>

#include <array>
#include <cstring>
#include <map>

#include "parity/log_columns.h"
#include "parity/other_readers.h"

namespace halfwire::parity {
namespace {

constexpr uint64_t kMostRecord = 64 << 20;  // images are in them too

constexpr std::array<uint32_t, 256> crcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ (0x82f63b78U & (0U - (c & 1)));
    table[i] = c;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrc = crcTable();

// CRC-32C (Castagnoli), rotated and offset as TFRecord has it.
uint32_t maskedCrc(std::string_view bytes) {
  uint32_t c = ~0U;
  for (const char b : bytes) c = kCrc[(c ^ static_cast<unsigned char>(b)) & 0xff] ^ (c >> 8);
  c = ~c;
  return ((c >> 15) | (c << 17)) + 0xa282ead8U;
}

template <class T>
T little(const char* from) {
  T v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// The fields of a message, one after the other.
class Message {
 public:
  explicit Message(std::string_view bytes) : rest_(bytes) {}
  struct Field {
    uint64_t number = 0;
    int wire = 0;
    uint64_t value = 0;      // of varint and fixed fields
    std::string_view bytes;  // of length-delimited ones
  };
  // False at the end and where the bytes make no sense: see good().
  bool next(Field* f) {
    if (rest_.empty()) return false;
    uint64_t key = 0;
    if (!varint(&key)) return bad();
    f->number = key >> 3;
    f->wire = static_cast<int>(key & 7);
    f->bytes = {};
    switch (f->wire) {
      case 0:
        return varint(&f->value) || bad();
      case 1:
        return fixed<uint64_t>(&f->value) || bad();
      case 5:
        return fixed<uint32_t>(&f->value) || bad();
      case 2: {
        uint64_t length = 0;
        if (!varint(&length) || length > rest_.size()) return bad();
        f->bytes = rest_.substr(0, length);
        rest_.remove_prefix(length);
        return true;
      }
      default:
        return bad();
    }
  }
  bool good() const { return good_; }

 private:
  bool bad() {
    good_ = false;
    rest_ = {};
    return false;
  }
  bool varint(uint64_t* v) {
    *v = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) return false;
      const auto b = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      *v |= static_cast<uint64_t>(b & 0x7f) << shift;
      if (b < 0x80) return true;
    }
    return false;
  }
  template <class T>
  bool fixed(uint64_t* v) {
    if (rest_.size() < sizeof(T)) return false;
    *v = little<T>(rest_.data());
    rest_.remove_prefix(sizeof(T));
    return true;
  }
  std::string_view rest_;
  bool good_ = true;
};

double asFloat(uint64_t bits) {
  const auto b = static_cast<uint32_t>(bits);
  float f;
  std::memcpy(&f, &b, sizeof f);
  return f;
}
double asDouble(uint64_t bits) {
  double d;
  std::memcpy(&d, &bits, sizeof d);
  return d;
}

// A tensor of one float or double: TensorFlow 2 and recent writers keep scalars so.
std::optional<double> scalarOf(std::string_view tensor) {
  Message m(tensor);
  Message::Field f;
  uint64_t type = 0;
  std::string_view content;
  std::optional<double> value;
  while (m.next(&f)) {
    if (f.number == 1 && f.wire == 0) type = f.value;
    if (f.number == 4 && f.wire == 2) content = f.bytes;
    if (f.number == 5) {
      if (f.wire == 5) value = asFloat(f.value);
      if (f.wire == 2 && f.bytes.size() == 4) value = asFloat(little<uint32_t>(f.bytes.data()));
    }
    if (f.number == 6) {
      if (f.wire == 1) value = asDouble(f.value);
      if (f.wire == 2 && f.bytes.size() == 8) value = asDouble(little<uint64_t>(f.bytes.data()));
    }
  }
  if (!m.good()) return std::nullopt;
  if (!value && type == 1 && content.size() == 4) value = asFloat(little<uint32_t>(content.data()));
  if (!value && type == 2 && content.size() == 8) value = asDouble(little<uint64_t>(content.data()));
  return value;
}

struct Scalar {
  uint32_t step;
  LogField field;
  int order;
  double value;
};

// False where the bytes are no Event.
bool readEvent(std::string_view bytes, std::vector<Scalar>* out) {
  Message event(bytes);
  Message::Field f;
  uint64_t step = 0;
  std::vector<std::string_view> summaries;
  while (event.next(&f)) {
    if (f.number == 2 && f.wire == 0) step = f.value;
    if (f.number == 5 && f.wire == 2) summaries.push_back(f.bytes);
  }
  if (!event.good()) return false;
  if (step > 4'000'000'000) return true;  // negative or absurd: not a training step
  for (const std::string_view summary : summaries) {
    Message s(summary);
    while (s.next(&f)) {
      if (f.number != 1 || f.wire != 2) continue;
      Message value(f.bytes);
      Message::Field v;
      std::string_view tag;
      std::optional<double> number;
      while (value.next(&v)) {
        if (v.number == 1 && v.wire == 2) tag = v.bytes;
        if (v.number == 2 && v.wire == 5) number = asFloat(v.value);
        if (v.number == 8 && v.wire == 2) number = scalarOf(v.bytes);
      }
      if (!value.good()) return false;
      const auto name = logName(tag);
      if (!name || !number || name->field == LogField::kStep) continue;
      const double kept = std::isnan(*number) ? std::numeric_limits<double>::infinity() : *number;
      out->push_back({static_cast<uint32_t>(step), name->field, name->order, kept});
    }
    if (!s.good()) return false;
  }
  return true;
}

}  // namespace

bool looksLikeTensorBoard(std::string_view start, std::string_view name) {
  if (start.size() >= 12 && maskedCrc(start.substr(0, 8)) == little<uint32_t>(start.data() + 8)) return true;
  return name.find("tfevents") != std::string_view::npos;
}

Result<Run> readTensorBoard(const std::vector<std::string>& paths, const Progress& progress) {
  std::vector<Scalar> scalars;
  std::vector<std::string> notes;
  for (const std::string& path : paths) {
    auto source = trace::openFile(path);
    if (!source.ok()) return source.status();
    uint64_t offset = 0;
    const auto invalid = [&](std::string_view what) {
      return Status(StatusCode::kInvalidData, fmt::format("{}: byte {}: {}", path, offset, what));
    };
    std::string data;
    while (true) {
      char head[12];
      Result<size_t> got = source.value()->read(head, sizeof head);
      if (!got.ok()) return got.status();
      if (got.value() == 0) break;
      const auto length = little<uint64_t>(head);
      bool cut = got.value() < sizeof head;
      if (!cut) {
        if (maskedCrc({head, 8}) != little<uint32_t>(head + 8))
          return invalid("not a record of an event file (its length's checksum is wrong)");
        if (length > kMostRecord) return invalid("a record of more than 64 MiB; no event is that large");
        data.resize(length + 4);
        got = source.value()->read(data.data(), data.size());
        if (!got.ok()) return got.status();
        cut = got.value() < data.size();
      }
      if (cut) {
        // The writer was killed, or is still writing.
        notes.push_back("the last event is cut short and left out");
        break;
      }
      const std::string_view event(data.data(), length);
      if (maskedCrc(event) != little<uint32_t>(data.data() + length))
        return invalid("an event is damaged (its checksum is wrong)");
      if (!readEvent(event, &scalars)) return invalid("a record is no TensorBoard event");
      if (scalars.size() > 100'000'000) return invalid("holds more values than fit in memory");
      offset += 16 + length;
      if (progress) progress(path, source.value()->position(), source.value()->size());
    }
  }
  // Of several tags for one field, the one that fits best.
  std::map<LogField, int> best;
  for (const Scalar& s : scalars) {
    const auto [it, added] = best.emplace(s.field, s.order);
    if (!added) it->second = std::min(it->second, s.order);
  }
  LogBuilder builder;
  for (const Scalar& s : scalars) {
    if (s.order == best[s.field]) builder.add(s.step, s.field, s.value);
  }
  Result<Run> run = builder.finish(paths.front(), Source::kTensorBoard,
                                   "holds no scalar called loss (or train/loss, train_loss, lm loss)");
  if (run.ok()) run.value().notes = std::move(notes);
  return run;
}

}  // namespace halfwire::parity
