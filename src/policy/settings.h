// What the user asked for: read from HALFWIRE_* variables by the library and written to them by `halfwire
// run`.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "wire/format.h"

namespace halfwire {

enum class Mode : uint8_t {
  kOff = 0,
  kWire = 1,   // what the policy chooses goes as FP8
  kNoise = 2,  // what it chooses of the reductions stays exact and gets noise of one ulp of bf16
  kShadow =
      3,  // everything stays exact; samples of what it chooses run a second time, compressed, to be compared
};

// The operations that may be compressed, as bits of Settings::ops.
enum class OpBit : uint32_t {
  kAllReduce = 1u << 0,
  kReduceScatter = 1u << 1,
  kAllGather = 1u << 2,  // bf16 and fp16
  // fp32 too: what moves data without summing it rounds parameters of full precision, or carries integers in
  // floats, so each of these has a name of its own.
  kAllGatherFp32 = 1u << 3,
  kReduce = 1u << 4,
  kBroadcast = 1u << 5,
  kBroadcastFp32 = 1u << 6,
  kAlltoAll = 1u << 7,
  kAlltoAllFp32 = 1u << 8,
  kGather = 1u << 9,
  kGatherFp32 = 1u << 10,
  kScatter = 1u << 11,
  kScatterFp32 = 1u << 12,
  kSendRecv = 1u << 13,
  kSendRecvFp32 = 1u << 14,
};

enum class CommScope : uint8_t {
  kWorld = 0,  // communicators that span the whole job
  kAll = 1,
  kSize = 2,  // communicators of Settings::comm_size ranks
};

// Whether the passes of a message overlap: the codec of one with the transfers of another.
enum class Overlap : uint8_t {
  kAuto = 0,  // where the codec takes long next to the links: on the host engine
  kOn = 1,
  kOff = 2,
};

struct Settings {
  Mode mode = Mode::kOff;
  WireFormat format;
  uint32_t ops = static_cast<uint32_t>(OpBit::kAllReduce) | static_cast<uint32_t>(OpBit::kReduceScatter);
  CommScope comms = CommScope::kWorld;
  int32_t comm_size = 0;
  int32_t world_size = 0;             // ranks of the job, 0 if the launcher did not say
  std::optional<uint64_t> min_bytes;  // nothing: by the link between the ranks, policy.h's linkDefaults
  // Bytes of the user's buffer that the scratch holds at a time; nothing: by the link.
  std::optional<uint64_t> chunk_bytes;
  Overlap overlap = Overlap::kAuto;
  bool stochastic = false;                 // rounding; else to nearest even
  uint64_t seed = 1;                       // of the noise and of stochastic rounding
  std::vector<WireFormat> shadow_formats;  // that the shadow's samples take in turn
  uint32_t shadow_every = 61;           // one call in so many: prime, so that no bucket of a step is left out
  uint64_t shadow_bytes = 64ull << 20;  // larger messages are not sampled
  bool meter = false;                   // measure exposed time: no decision depends on it
  uint32_t meter_every = 16;            // in one step of so many
  std::string log_dir;  // HALFWIRE_LOG_DIR: where this process writes its counters; empty for nowhere
  std::string address = "127.0.0.1";  // HALFWIRE_ADDRESS: IPv4 address on which ranks of a communicator meet
  std::string nccl_path;              // HALFWIRE_NCCL: the real NCCL, where it cannot be found by itself
  uint32_t meeting_timeout_s = 30;
};

// Reads the variables through `getenv`-like `lookup`. Every value is checked; the error names the variable
// and what it may hold. Variables: HALFWIRE_MODE off|meter|wire|noise (meter: off with HALFWIRE_METER on),
// HALFWIRE_SEED, HALFWIRE_SHADOW_FORMATS (element formats), HALFWIRE_SHADOW_EVERY, HALFWIRE_SHADOW_BYTES,
// HALFWIRE_FORMAT e4m3|e3m4|e5m2|int8, HALFWIRE_BLOCK 32|64|128|256, HALFWIRE_SCALE fp32|e8m0, HALFWIRE_ROUNDING
// nearest|stochastic, HALFWIRE_OPS
// allreduce,reducescatter,reduce,allgather,broadcast,alltoall,gather,scatter,sendrecv and NAME-fp32,
// HALFWIRE_COMMS world|all|size:N, HALFWIRE_MIN_BYTES, HALFWIRE_CHUNK_BYTES, HALFWIRE_OVERLAP auto|on|off,
// HALFWIRE_METER on|off, HALFWIRE_METER_EVERY, HALFWIRE_HANDLES on|off, HALFWIRE_LOG_DIR, HALFWIRE_ADDRESS,
// HALFWIRE_NCCL, HALFWIRE_MEETING_TIMEOUT (seconds). The job's size comes from WORLD_SIZE,
// OMPI_COMM_WORLD_SIZE, PMI_SIZE or SLURM_NTASKS, the first that is set.
Result<Settings> readSettings(const std::function<const char*(const char*)>& lookup);

// Equal on two ranks exactly if they would take the same decisions: a digest of every field but the paths,
// the address and the time limit.
uint64_t settingsDigest(const Settings& settings);

// "wire e4m3/128/fp32, allreduce+reducescatter, comms world (4 ranks), from 4 MiB".
std::string describeSettings(const Settings& settings);

const char* scaleFormatName(ScaleFormat scale);

}  // namespace halfwire
