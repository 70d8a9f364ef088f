#include "policy/settings.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <string_view>

#include "base/units.h"

namespace halfwire {
namespace {

Status invalid(std::string_view variable, std::string_view value, std::string_view allowed) {
  return {StatusCode::kInvalidArgument,
          fmt::format("{}='{}' is not valid: use {}", variable, value, allowed)};
}

struct OpName {
  std::string_view name;
  OpBit bit;
  uint32_t implies = 0;  // full precision is a stronger wish than half
};
constexpr uint32_t bits(OpBit bit) { return static_cast<uint32_t>(bit); }
constexpr OpName kOpNames[] = {{"allreduce", OpBit::kAllReduce},
                               {"reducescatter", OpBit::kReduceScatter},
                               {"reduce", OpBit::kReduce},
                               {"allgather", OpBit::kAllGather},
                               {"allgather-fp32", OpBit::kAllGatherFp32, bits(OpBit::kAllGather)},
                               {"broadcast", OpBit::kBroadcast},
                               {"broadcast-fp32", OpBit::kBroadcastFp32, bits(OpBit::kBroadcast)},
                               {"alltoall", OpBit::kAlltoAll},
                               {"alltoall-fp32", OpBit::kAlltoAllFp32, bits(OpBit::kAlltoAll)},
                               {"gather", OpBit::kGather},
                               {"gather-fp32", OpBit::kGatherFp32, bits(OpBit::kGather)},
                               {"scatter", OpBit::kScatter},
                               {"scatter-fp32", OpBit::kScatterFp32, bits(OpBit::kScatter)},
                               {"sendrecv", OpBit::kSendRecv},
                               {"sendrecv-fp32", OpBit::kSendRecvFp32, bits(OpBit::kSendRecv)}};

Status parseOps(std::string_view text, uint32_t* ops) {
  *ops = 0;
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string_view name = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    bool known = false;
    for (const OpName& op : kOpNames) {
      if (op.name != name) continue;
      *ops |= bits(op.bit) | op.implies;
      known = true;
    }
    if (!known) {
      return invalid("HALFWIRE_OPS", text,
                     "a list of allreduce, reducescatter, reduce, allgather, broadcast, alltoall, gather, "
                     "scatter, sendrecv; NAME-fp32 for fp32 in the last six");
    }
  }
  return {};
}

Status parseComms(std::string_view text, Settings* s) {
  if (text == "world") {
    s->comms = CommScope::kWorld;
    return {};
  }
  if (text == "all") {
    s->comms = CommScope::kAll;
    return {};
  }
  if (text.starts_with("size:")) {
    const auto size = parseInteger(text.substr(5), 2, 1 << 20, "number of ranks");
    if (!size.ok()) return invalid("HALFWIRE_COMMS", text, "world, all or size:N with N of 2 and more");
    s->comms = CommScope::kSize;
    s->comm_size = static_cast<int32_t>(size.value());
    return {};
  }
  return invalid("HALFWIRE_COMMS", text, "world, all or size:N");
}

int32_t worldSize(const std::function<const char*(const char*)>& lookup) {
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) {
    const char* value = lookup(name);
    if (value == nullptr) continue;
    const auto size = parseInteger(value, 1, 1 << 24, "number of ranks");
    return size.ok() ? static_cast<int32_t>(size.value()) : 0;
  }
  return 0;
}

std::optional<ElementFormat> parseElement(std::string_view text) {
  for (const ElementFormat format : kElementFormats) {
    if (text == elementFormatName(format)) return format;
  }
  return std::nullopt;
}

uint64_t mix(uint64_t hash, uint64_t value) {
  // FNV-1a over the eight bytes.
  for (int i = 0; i < 8; ++i) hash = (hash ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3ull;
  return hash;
}

}  // namespace

Result<Settings> readSettings(const std::function<const char*(const char*)>& lookup) {
  Settings s;
  const auto text = [&](const char* name) -> std::string_view {
    const char* value = lookup(name);
    return value == nullptr ? std::string_view() : std::string_view(value);
  };

  const std::string_view mode = text("HALFWIRE_MODE");
  if (mode == "wire") {
    s.mode = Mode::kWire;
  } else if (mode == "noise") {
    s.mode = Mode::kNoise;
  } else if (mode == "shadow") {
    s.mode = Mode::kShadow;
  } else if (mode == "meter") {
    s.meter = true;
  } else if (!mode.empty() && mode != "off") {
    return invalid("HALFWIRE_MODE", mode, "off, meter, shadow, wire or noise");
  }
  if (const std::string_view seed = text("HALFWIRE_SEED"); !seed.empty()) {
    const auto number = parseInteger(seed, 0, INT64_MAX, "seed");
    if (!number.ok()) return invalid("HALFWIRE_SEED", seed, "an integer from 0 on");
    s.seed = static_cast<uint64_t>(number.value());
  }

  const std::string_view meter = text("HALFWIRE_METER");
  if (meter == "on") {
    s.meter = true;
  } else if (!meter.empty() && meter != "off") {
    return invalid("HALFWIRE_METER", meter, "on or off");
  }
  if (const std::string_view every = text("HALFWIRE_METER_EVERY"); !every.empty()) {
    const auto steps = parseInteger(every, 1, 1'000'000, "number of steps");
    if (!steps.ok()) return invalid("HALFWIRE_METER_EVERY", every, "a number of steps, 1 for all");
    s.meter_every = static_cast<uint32_t>(steps.value());
  }

  if (const std::string_view format = text("HALFWIRE_FORMAT"); !format.empty()) {
    const auto element = parseElement(format);
    if (!element) return invalid("HALFWIRE_FORMAT", format, "e4m3, e3m4, e5m2 or int8");
    s.format.element = *element;
  }

  const std::string_view block = text("HALFWIRE_BLOCK");
  if (!block.empty()) {
    if (block != "32" && block != "64" && block != "128" && block != "256") {
      return invalid("HALFWIRE_BLOCK", block, "32, 64, 128 or 256");
    }
    s.format.block = static_cast<uint16_t>(parseInteger(block, 32, 256, "block").value());
  }

  const std::string_view scale = text("HALFWIRE_SCALE");
  if (scale == "e8m0") {
    s.format.scale = ScaleFormat::kE8M0;
  } else if (!scale.empty() && scale != "fp32") {
    return invalid("HALFWIRE_SCALE", scale, "fp32 or e8m0");
  }

  const std::string_view rounding = text("HALFWIRE_ROUNDING");
  s.stochastic = rounding == "stochastic";
  if (!rounding.empty() && rounding != "nearest" && !s.stochastic)
    return invalid("HALFWIRE_ROUNDING", rounding, "nearest or stochastic");

  s.shadow_formats = {s.format};
  if (const std::string_view formats = text("HALFWIRE_SHADOW_FORMATS"); !formats.empty()) {
    s.shadow_formats.clear();
    for (std::string_view rest = formats; s.shadow_formats.size() < 8;) {
      const size_t comma = rest.find(',');
      const auto element = parseElement(rest.substr(0, comma));
      if (!element) return invalid("HALFWIRE_SHADOW_FORMATS", formats, "a list of e4m3, e3m4, e5m2 and int8");
      s.shadow_formats.push_back({*element, s.format.scale, s.format.block});
      if (comma == std::string_view::npos) break;
      rest.remove_prefix(comma + 1);
    }
  }
  if (const std::string_view every = text("HALFWIRE_SHADOW_EVERY"); !every.empty()) {
    const auto calls = parseInteger(every, 1, 1000000, "number of calls");
    if (!calls.ok()) return invalid("HALFWIRE_SHADOW_EVERY", every, "a number of calls, 1 for all");
    s.shadow_every = static_cast<uint32_t>(calls.value());
  }
  if (const std::string_view most = text("HALFWIRE_SHADOW_BYTES"); !most.empty()) {
    const auto bytes = parseBytes(most);
    if (!bytes.ok() || bytes.value() < 1024 || bytes.value() > (4ull << 30))
      return invalid("HALFWIRE_SHADOW_BYTES", most, "a size from 1KiB to 4GiB");
    s.shadow_bytes = bytes.value();
  }

  if (const std::string_view ops = text("HALFWIRE_OPS"); !ops.empty()) {
    if (Status status = parseOps(ops, &s.ops); !status.ok()) return status;
  }
  if (const std::string_view comms = text("HALFWIRE_COMMS"); !comms.empty()) {
    if (Status status = parseComms(comms, &s); !status.ok()) return status;
  }
  if (const std::string_view min = text("HALFWIRE_MIN_BYTES"); !min.empty()) {
    const auto bytes = parseBytes(min);
    if (!bytes.ok() && min != "auto") return invalid("HALFWIRE_MIN_BYTES", min, "auto or a size like 4MiB");
    if (bytes.ok()) s.min_bytes = bytes.value();
  }
  if (const std::string_view chunk = text("HALFWIRE_CHUNK_BYTES"); !chunk.empty()) {
    const auto bytes = parseBytes(chunk);
    if (chunk != "auto" && (!bytes.ok() || bytes.value() < 1024 || bytes.value() > (4ull << 30)))
      return invalid("HALFWIRE_CHUNK_BYTES", chunk, "auto or a size from 1KiB to 4GiB");
    if (bytes.ok()) s.chunk_bytes = bytes.value();
  }
  // Read where it acts, at every dlopen of NCCL (src/interpose/handles.cc), and checked here.
  if (const std::string_view handles = text("HALFWIRE_HANDLES");
      !handles.empty() && handles != "on" && handles != "off") {
    return invalid("HALFWIRE_HANDLES", handles, "on or off");
  }
  const std::string_view overlap = text("HALFWIRE_OVERLAP");
  if (overlap == "on") {
    s.overlap = Overlap::kOn;
  } else if (overlap == "off") {
    s.overlap = Overlap::kOff;
  } else if (!overlap.empty() && overlap != "auto") {
    return invalid("HALFWIRE_OVERLAP", overlap, "auto, on or off");
  }
  if (const std::string_view timeout = text("HALFWIRE_MEETING_TIMEOUT"); !timeout.empty()) {
    const auto seconds = parseInteger(timeout, 1, 3600, "number of seconds");
    if (!seconds.ok()) return invalid("HALFWIRE_MEETING_TIMEOUT", timeout, "seconds from 1 to 3600");
    s.meeting_timeout_s = static_cast<uint32_t>(seconds.value());
  }
  if (const std::string_view address = text("HALFWIRE_ADDRESS"); !address.empty()) {
    s.address = address;
    in_addr parsed{};
    if (inet_pton(AF_INET, s.address.c_str(), &parsed) != 1 || parsed.s_addr == htonl(INADDR_ANY)) {
      return invalid("HALFWIRE_ADDRESS", address,
                     "an IPv4 address of this machine that the other ranks can reach");
    }
  }
  s.log_dir = text("HALFWIRE_LOG_DIR");
  s.nccl_path = text("HALFWIRE_NCCL");
  s.world_size = worldSize(lookup);
  return s;
}

uint64_t settingsDigest(const Settings& s) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const uint64_t value :
       {static_cast<uint64_t>(s.mode), static_cast<uint64_t>(s.format.element),
        static_cast<uint64_t>(s.format.scale), static_cast<uint64_t>(s.format.block),
        static_cast<uint64_t>(s.ops), static_cast<uint64_t>(s.comms), static_cast<uint64_t>(s.comm_size),
        static_cast<uint64_t>(s.world_size), s.min_bytes.value_or(UINT64_MAX),
        s.chunk_bytes.value_or(UINT64_MAX), static_cast<uint64_t>(s.overlap), s.seed, uint64_t{s.stochastic},
        uint64_t{s.shadow_every}, s.shadow_bytes}) {
    hash = mix(hash, value);
  }
  for (const WireFormat& f : s.shadow_formats) hash = mix(hash, static_cast<uint64_t>(f.element) + 1);
  return hash;
}

std::string describeSettings(const Settings& s) {
  if (s.mode == Mode::kOff)
    return s.meter ? fmt::format("off, meter on in one step of {}", s.meter_every) : "off";
  std::string ops;
  for (const OpName& op : kOpNames) {
    if (!(s.ops & bits(op.bit))) continue;
    if (!ops.empty()) ops += '+';
    ops += op.name;
  }
  std::string comms = "all";
  if (s.comms == CommScope::kWorld)
    comms = s.world_size > 0 ? fmt::format("world ({} ranks)", s.world_size) : "world";
  if (s.comms == CommScope::kSize) comms = fmt::format("of {} ranks", s.comm_size);
  const std::string rounding = s.stochastic ? fmt::format(" rounded stochastically (seed {})", s.seed) : "";
  if (s.mode == Mode::kShadow) {
    std::string formats;
    for (const WireFormat& f : s.shadow_formats)
      formats += (formats.empty() ? "" : "+") + std::string(elementFormatName(f.element));
    return fmt::format("shadow of {}/{}/{}{}, one call in {}, {}, communicators {}, from {} to {}", formats,
                       s.format.block, scaleFormatName(s.format.scale), rounding, s.shadow_every, ops, comms,
                       s.min_bytes ? formatBytes(*s.min_bytes) : "auto", formatBytes(s.shadow_bytes));
  }
  if (s.mode == Mode::kNoise)
    return fmt::format("noise of one bf16 ulp, seed {}, {}, communicators {}, from {}", s.seed, ops, comms,
                       s.min_bytes ? formatBytes(*s.min_bytes) : "auto");
  return fmt::format("wire {}/{}/{}{}, {}, communicators {}, from {}, chunks of {}",
                     elementFormatName(s.format.element), s.format.block, scaleFormatName(s.format.scale),
                     rounding, ops, comms, s.min_bytes ? formatBytes(*s.min_bytes) : "auto",
                     s.chunk_bytes ? formatBytes(*s.chunk_bytes) : "auto");
}

const char* scaleFormatName(ScaleFormat scale) { return scale == ScaleFormat::kFp32 ? "fp32" : "e8m0"; }

}  // namespace halfwire
