#include "collective/messages.h"

#include <algorithm>

#include "base/units.h"

namespace halfwire {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kLeastScratch = 1 << 20;

}  // namespace

Result<std::unique_ptr<Messages>> Messages::create(const NcclApi* api, Device* device, const Config& config) {
  std::unique_ptr<Messages> m(new Messages);
  auto order = ScratchOrder::create(device);
  if (!order.ok()) return order.status();
  m->order_ = std::move(order).value();
  m->api_ = api;
  m->device_ = device;
  m->config_ = config;
  return m;
}

Messages::~Messages() {
  if (device_ == nullptr || parked_) {
    order_.park();
    return;
  }
  order_.finish();
  if (scratch_ != nullptr) device_->release(scratch_);
  for (void* old : outgrown_) device_->release(old);
}

uint64_t Messages::packetsOf(const Message& m) const {
  return m.exact ? 0 : roundUp(packetBytes(config_.format, m.count), kAlignment);
}

// Turns that are still in flight keep the scratch they have: waiting for them could wait for a peer that
// waits for what comes next.
Status Messages::reserve(uint64_t bytes) {
  if (bytes <= size_) return {};
  if (bytes > config_.limit_bytes) {
    return {StatusCode::kInvalidArgument,
            "the messages of one group need " + formatBytes(bytes) +
                " of scratch for their packets, and the limit is " + formatBytes(config_.limit_bytes) +
                " (four times --chunk-bytes): give a larger --chunk-bytes, or leave sendrecv out of --ops"};
  }
  const uint64_t size = std::min(std::max({bytes, 2 * size_, kLeastScratch}), config_.limit_bytes);
  void* grown = nullptr;
  if (Status s = device_->allocate(size, &grown); !s.ok()) return s;
  if (scratch_ != nullptr) outgrown_.push_back(scratch_);
  scratch_ = static_cast<char*>(grown);
  size_ = size;
  held_ += size;
  return {};
}

ncclResult_t Messages::run(std::span<Turn> turns, CallGate& gate, std::string* error) {
  struct Run {
    Turn* turn;
    StreamHandle main;
    std::vector<StreamHandle> others;
    std::vector<char*> packets;  // of each call
  };
  std::vector<Run> runs;
  Status status;
  const auto failed = [&] {
    *error = status.message();
    return status.code() == StatusCode::kInvalidArgument ? ncclInvalidUsage : ncclUnhandledCudaError;
  };
  for (Turn& turn : turns) {
    if (turn.calls.empty()) continue;
    Messages& m = *turn.messages;
    turn.stats.assign(turn.calls.size(), {});
    Run run{&turn, turn.calls.front().stream, {}, {}};
    const auto add = [&](StreamHandle s) {
      if (s != run.main && std::find(run.others.begin(), run.others.end(), s) == run.others.end())
        run.others.push_back(s);
    };
    uint64_t bytes = 0;
    for (const Message& call : turn.calls) {
      add(call.stream);
      bytes += m.packetsOf(call);
    }
    for (const StreamHandle s : turn.streams) add(s);
    if (status = m.reserve(bytes); !status.ok()) return failed();
    char* at = m.scratch_;
    for (const Message& call : turn.calls) {
      run.packets.push_back(at);
      at += m.packetsOf(call);
    }
    runs.push_back(std::move(run));
  }
  if (runs.empty()) return ncclSuccess;

  const auto eachPacket = [&](bool sends, auto&& work) {
    for (Run& run : runs) {
      for (size_t i = 0; i < run.packets.size() && status.ok(); ++i) {
        const Message& call = run.turn->calls[i];
        if (call.exact || call.send != sends || call.count == 0) continue;
        status = work(*run.turn->messages, call, run.packets[i], run.main);
        ++run.turn->stats[i].launches;
      }
    }
  };
  for (Run& run : runs) {
    if (status.ok()) status = run.turn->messages->order_.begin(run.main, run.others);
  }
  eachPacket(true, [](Messages& m, const Message& call, char* packet, StreamHandle stream) {
    QuantizeJob job;
    if (m.config_.stochastic) {
      uint64_t capture = 0;
      if (Status s = m.device_->captureOf(stream, &capture); !s.ok()) return s;
      // The messages of a communicator are numbered apart from its collectives.
      if (capture == 0)
        job.rounding = {true, roundingKey(~m.config_.seed, m.config_.number, ++m.calls_, m.config_.rank, 0),
                        0};
    }
    job.format = m.config_.format;
    job.type = call.type;
    job.in = call.buffer;
    job.in_total = job.in_pitch = job.segment_elements = call.count;
    job.out = packet;
    job.out_pitch = packetBytes(job.format, call.count);
    return m.device_->quantize(job, stream);
  });
  if (!status.ok()) return failed();

  if (!gate.enter()) {
    *error = "the communicator was aborted while its messages were being enqueued";
    return ncclRemoteError;
  }
  const NcclApi* api = runs.front().turn->messages->api_;
  ncclResult_t result = api->ncclGroupStart();
  for (Run& run : runs) {
    const Messages& m = *run.turn->messages;
    for (size_t i = 0; i < run.packets.size() && result == ncclSuccess; ++i) {
      const Message& call = run.turn->calls[i];
      const uint64_t bytes = packetBytes(m.config_.format, call.count);
      const auto stream = static_cast<cudaStream_t>(run.main);
      if (call.exact) {
        result = call.exact();
      } else if (call.send) {
        result = api->ncclSend(run.packets[i], bytes, ncclUint8, call.peer, m.config_.comm, stream);
        run.turn->stats[i].sent_bytes = bytes;
      } else {
        result = api->ncclRecv(run.packets[i], bytes, ncclUint8, call.peer, m.config_.comm, stream);
      }
    }
  }
  // The group must be closed whatever happened inside it.
  const ncclResult_t end = api->ncclGroupEnd();
  gate.leave();
  if (result == ncclSuccess) result = end;
  if (result != ncclSuccess) return result;

  eachPacket(false, [](Messages& m, const Message& call, char* packet, StreamHandle stream) {
    DequantizeJob job;
    job.format = m.config_.format;
    job.type = call.type;
    job.in = packet;
    job.in_pitch = packetBytes(job.format, call.count);
    job.segment_elements = job.out_pitch = job.out_total = call.count;
    job.out = call.buffer;
    return m.device_->dequantize(job, stream);
  });
  for (Run& run : runs) {
    if (status.ok()) status = run.turn->messages->order_.end(run.main, run.others);
  }
  return status.ok() ? ncclSuccess : failed();
}

}  // namespace halfwire
