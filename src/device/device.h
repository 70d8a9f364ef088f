// What compressed collectives need from the machine that runs them: memory, the three jobs of the wire on a
// stream, and events. Two implementations: HostDevice (the host engine) and CudaDevice (the CUDA driver).
#pragma once

#include <cstddef>
#include <memory>

#include "abi/host_engine.h"
#include "base/status.h"
#include "device/allocator.h"
#include "wire/codec.h"
#include "wire/compare.h"
#include "wire/perturb.h"

namespace halfwire {

// A cudaStream_t of the program, passed through untouched.
using StreamHandle = void*;
using EventHandle = void*;

// One device of one process. Calls that enqueue return before the work is done. After construction nothing
// here allocates device memory, loads a module or synchronises with the host, except allocate and release.
// Thread-safe unless said otherwise.
class Device {
 public:
  virtual ~Device() = default;

  // Device memory, aligned to at least 256 bytes; the program's own where it lends an allocator.
  virtual Status allocate(size_t bytes, void** out) = 0;
  virtual void release(void* pointer) = 0;

  virtual Status quantize(const QuantizeJob& job, StreamHandle stream) = 0;
  virtual Status dequantize(const DequantizeJob& job, StreamHandle stream) = 0;
  virtual Status reduce(const ReduceJob& job, StreamHandle stream) = 0;

  virtual Status perturb(const PerturbJob& job, StreamHandle stream) = 0;

  // For results looked at beside the program. copy takes device memory and what allocateHost gave; host
  // memory of that kind may be read by the host once an event behind the copy has happened.
  virtual Status compare(const CompareJob& job, StreamHandle stream) = 0;
  virtual Status copy(void* to, const void* from, size_t bytes, StreamHandle stream) = 0;
  virtual Status zero(void* pointer, size_t bytes, StreamHandle stream) = 0;
  virtual Status allocateHost(size_t bytes, void** out) = 0;
  virtual void releaseHost(void* pointer) = 0;
  // Destroyed by destroyEvent. `done` is false, and `ms` untouched, until both have happened.
  virtual Status createTimedEvent(EventHandle* out) = 0;
  virtual Status elapsed(EventHandle start, EventHandle end, float* ms, bool* done) = 0;

  virtual Status createEvent(EventHandle* out) = 0;
  virtual void destroyEvent(EventHandle event) = 0;
  virtual Status recordEvent(EventHandle event, StreamHandle stream) = 0;
  virtual Status waitEvent(StreamHandle stream, EventHandle event) = 0;
  // Blocks the host until the event's last record has completed.
  virtual Status synchronizeEvent(EventHandle event) = 0;

  // A stream of our own for work beside the program's streams, not ordered with the legacy default stream.
  // finishStream waits for its work, then ends it.
  virtual Status createStream(StreamHandle* out) = 0;
  virtual Status finishStream(StreamHandle stream) = 0;

  // Whether the NCCL of this device connects pairs of ranks at their first message, which takes memory and
  // blocks the host: then the connections are made with the communicator.
  virtual bool connectsLazily() const = 0;

  // Devices with one value that is not 0 reach each other over NVLink; 0: not known to. Meaningful between
  // processes and hosts.
  virtual uint64_t nvlinkDomain() const = 0;

  // Whether the codec takes long next to the links, so that a message's passes should overlap: the codec of
  // one with the transfer of another. Equal on all devices of a kind, as all ranks must cut a message alike.
  virtual bool overlapsPasses() const = 0;

  // The number of the capture that `stream` is in, 0 if it is not being captured into a graph (an invalidated
  // capture counts as one).
  virtual Status captureOf(StreamHandle stream, uint64_t* capture) = 0;

  // While `stream` is being captured: what the graph does each time it runs, on an event that is not of the
  // capture. A run waits for what was recorded before it was launched.
  virtual Status recordEventOutside(EventHandle event, StreamHandle stream) = 0;
  virtual Status waitEventOutside(StreamHandle stream, EventHandle event) = 0;

  // What the codec runs as: "AVX2", "hardware", ... Lives as long as the device.
  virtual const char* codecName() const = 0;

  // Bytes of device memory free now, for reporting what NCCL took; 0 if unknown.
  virtual size_t freeBytes() = 0;
};

// Device `ordinal` of the engine that `engine` describes.
Result<std::unique_ptr<Device>> makeHostDevice(const HalfwireHostEngine* engine, int ordinal,
                                               const AllocatorCalls& allocator = {});

// The primary context of CUDA device `ordinal`, which NCCL works in: finds the driver in this process, loads
// the embedded kernels and launches each once, without `stochastic` those of stochastic rounding left out.
// Must not be called while capturing.
Result<std::unique_ptr<Device>> makeCudaDevice(int ordinal, const AllocatorCalls& allocator = {},
                                               bool stochastic = true);

}  // namespace halfwire
