#include "collective/shadow.h"

#include <algorithm>

namespace halfwire {
namespace {

constexpr uint64_t kAlignment = 256;
// Samples that may wait to be read; a sample is read at a later call, by when it is long done.
constexpr size_t kRecords = 32;
constexpr uint64_t kMeetingBytes = 8;

ncclResult_t failed(const Status& status, std::string* error) {
  *error = status.message();
  return ncclUnhandledCudaError;
}

// With the format that needs the largest scratch.
Compressor::Config compressorConfig(const Shadow::Config& config) {
  Compressor::Config most = config.compressor;
  for (const WireFormat& format : config.formats) {
    Compressor::Config c = config.compressor;
    c.format = format;
    if (Compressor::scratchBytes(c) >= Compressor::scratchBytes(most)) most = c;
  }
  return most;
}

}  // namespace

uint64_t Shadow::scratchHeld() const {
  return compressor_->scratchHeld() + 3 * roundUp(config_.bytes, kAlignment) + kAlignment +
         config_.compressor.ranks * kMeetingBytes;
}

void Shadow::drop() {
  for (const Kept& kept : pending_) {
    if (kept.record != nullptr) free_.push_back(kept.record);
  }
  pending_.clear();
  input_used_ = output_used_ = 0;
}

Result<std::unique_ptr<Shadow>> Shadow::create(const NcclApi* api, Device* device, const Config& config) {
  std::unique_ptr<Shadow> s(new Shadow);
  s->api_ = api;
  s->device_ = device;
  s->config_ = config;
  auto compressor = Compressor::create(api, device, compressorConfig(config));
  if (!compressor.ok()) return compressor.status();
  s->compressor_ = std::move(compressor).value();
  for (char** buffer : {&s->input_, &s->exact_, &s->compressed_}) {
    void* memory = nullptr;
    if (Status status = device->allocate(roundUp(config.bytes, kAlignment), &memory); !status.ok())
      return status;
    *buffer = static_cast<char*>(memory);
  }
  void* sums = nullptr;
  if (Status status = device->allocate(sizeof(ErrorSums), &sums); !status.ok()) return status;
  s->sums_ = static_cast<ErrorSums*>(sums);
  void* meeting = nullptr;
  if (Status status = device->allocate(config.compressor.ranks * kMeetingBytes, &meeting); !status.ok())
    return status;
  s->meeting_ = static_cast<char*>(meeting);
  if (Status status = device->createStream(&s->stream_); !status.ok()) return status;
  for (EventHandle* event : {&s->kept_event_, &s->done_}) {
    if (Status status = device->createEvent(event); !status.ok()) return status;
  }
  for (size_t i = 0; i < kRecords; ++i) {
    auto record = std::make_unique<Record>();
    Record& r = *record;
    s->records_.push_back(std::move(record));
    for (EventHandle* event : {&r.exact[0], &r.exact[1], &r.compressed[0], &r.compressed[1], &r.read}) {
      if (Status status = device->createTimedEvent(event); !status.ok()) return status;
    }
    void* host = nullptr;
    if (Status status = device->allocateHost(sizeof(ErrorSums), &host); !status.ok()) return status;
    r.sums = static_cast<ErrorSums*>(host);
    s->free_.push_back(&r);
  }
  return s;
}

Shadow::~Shadow() {
  if (device_ == nullptr || parked_) return;
  if (stream_ != nullptr) (void)device_->finishStream(stream_);
  for (const auto& r : records_) {
    for (const EventHandle event : {r->exact[0], r->exact[1], r->compressed[0], r->compressed[1], r->read}) {
      if (event != nullptr) device_->destroyEvent(event);
    }
    if (r->sums != nullptr) device_->releaseHost(r->sums);
  }
  for (const EventHandle event : {kept_event_, done_}) {
    if (event != nullptr) device_->destroyEvent(event);
  }
  for (void* memory :
       {static_cast<void*>(input_), static_cast<void*>(exact_), static_cast<void*>(compressed_),
        static_cast<void*>(sums_), static_cast<void*>(meeting_)}) {
    if (memory != nullptr) device_->release(memory);
  }
}

void Shadow::park() {
  parked_ = true;
  if (compressor_ != nullptr) compressor_->park();
}

uint64_t Shadow::inputBytes(const CompressedCall& call) const {
  const uint64_t parts = call.op == CollectiveOp::kReduceScatter ? config_.compressor.ranks : 1;
  return call.count * parts * dataTypeBytes(call.type);
}

uint64_t Shadow::outputElements(const CompressedCall& call) const {
  return call.count * (call.op == CollectiveOp::kAllGather ? config_.compressor.ranks : 1);
}

bool Shadow::samples(const CompressedCall& call) {
  if (number_++ % config_.every != 0) return false;
  const uint64_t bytes = std::max(inputBytes(call), outputElements(call) * dataTypeBytes(call.type));
  return bytes > 0 && bytes <= config_.bytes;
}

Status Shadow::keep(const CompressedCall& call) {
  const uint64_t in = inputBytes(call);
  const uint64_t out = outputElements(call) * dataTypeBytes(call.type);
  if (input_used_ + in > roundUp(config_.bytes, kAlignment) ||
      output_used_ + out > roundUp(config_.bytes, kAlignment)) {
    return {StatusCode::kInvalidArgument,
            "the sampled calls of one group exceed the shadow's buffers: give a larger --shadow-bytes or "
            "sample fewer "
            "calls with --shadow-every"};
  }
  Kept kept{call, input_used_, output_used_,
            config_.formats[(splitMix64(0, sampled_++) >> 32) % config_.formats.size()], nullptr};
  if (free_.empty()) {
    ++unread_;
  } else {
    kept.record = free_.back();
    free_.pop_back();
    kept.record->sample = {call.op, call.type, call.count, kept.format, {}, 0, 0};
  }
  input_used_ += roundUp(in, kAlignment);
  output_used_ += roundUp(out, kAlignment);
  if (used_) {
    if (Status s = device_->waitEvent(call.stream, done_); !s.ok()) return s;
  }
  if (Status s = device_->copy(input_ + kept.in, call.send, in, call.stream); !s.ok()) return s;
  if (kept.record != nullptr) {
    if (Status s = device_->recordEvent(kept.record->exact[0], call.stream); !s.ok()) return s;
  }
  pending_.push_back(kept);
  return {};
}

// On the program's stream, behind the exact call: keeps its result and hands over to our stream.
Status Shadow::closeExact(Kept& kept) {
  const StreamHandle stream = kept.call.stream;
  if (kept.record != nullptr) {
    if (Status s = device_->recordEvent(kept.record->exact[1], stream); !s.ok()) return s;
  }
  const uint64_t bytes = outputElements(kept.call) * dataTypeBytes(kept.call.type);
  if (Status s = device_->copy(exact_ + kept.out, kept.call.recv, bytes, stream); !s.ok()) return s;
  if (Status s = device_->recordEvent(kept_event_, stream); !s.ok()) return s;
  return device_->waitEvent(stream_, kept_event_);
}

CompressedCall Shadow::copied(const Kept& kept) const {
  CompressedCall call = kept.call;
  call.send = input_ + kept.in;
  call.recv = compressed_ + kept.out;
  call.stream = stream_;
  return call;
}

// Ranks leave the exact call at different times: without a meeting of all of them a compressed run would be
// timed with the wait for the last.
ncclResult_t Shadow::meet() {
  const char* mine = meeting_ + config_.compressor.rank * kMeetingBytes;
  return api_->ncclAllGather(mine, meeting_, kMeetingBytes, ncclUint8, config_.compressor.comm,
                             static_cast<cudaStream_t>(stream_));
}

Status Shadow::openCompressed(Kept& kept) {
  compressor_->useFormat(kept.format);
  if (kept.record == nullptr) return {};
  return device_->recordEvent(kept.record->compressed[0], stream_);
}

Status Shadow::compareWith(Kept& kept) {
  if (kept.record == nullptr) return {};
  Record& r = *kept.record;
  if (Status s = device_->recordEvent(r.compressed[1], stream_); !s.ok()) return s;
  if (Status s = device_->zero(sums_, sizeof *sums_, stream_); !s.ok()) return s;
  const CompareJob job{kept.call.type, exact_ + kept.out, compressed_ + kept.out, outputElements(kept.call),
                       sums_};
  if (Status s = device_->compare(job, stream_); !s.ok()) return s;
  if (Status s = device_->copy(r.sums, sums_, sizeof *sums_, stream_); !s.ok()) return s;
  if (Status s = device_->recordEvent(r.read, stream_); !s.ok()) return s;
  outstanding_.push_back(&r);
  return {};
}

bool Shadow::read(Record& r) {
  float ms = 0;
  bool done = false;
  if (!device_->elapsed(r.compressed[1], r.read, &ms, &done).ok() || !done) return false;
  if (!device_->elapsed(r.compressed[0], r.compressed[1], &ms, &done).ok() || !done) return false;
  r.sample.compressed_ms = ms;
  if (!device_->elapsed(r.exact[0], r.exact[1], &ms, &done).ok() || !done) return false;
  r.sample.exact_ms = ms;
  r.sample.sums = *r.sums;
  return true;
}

std::vector<ShadowSample> Shadow::collect() {
  std::vector<ShadowSample> samples;
  size_t read_now = 0;
  while (read_now < outstanding_.size() && read(*outstanding_[read_now])) {
    samples.push_back(outstanding_[read_now]->sample);
    free_.push_back(outstanding_[read_now]);
    ++read_now;
  }
  outstanding_.erase(outstanding_.begin(), outstanding_.begin() + static_cast<ptrdiff_t>(read_now));
  return samples;
}

std::vector<ShadowSample> Shadow::finish() {
  if (parked_) return {};
  if (used_) (void)device_->synchronizeEvent(done_);
  return collect();
}

ncclResult_t runShadows(std::span<Shadow* const> members, CallGate& gate, std::string* error) {
  size_t most = 0;
  for (Shadow* s : members) {
    most = std::max(most, s->pending_.size());
    for (Shadow::Kept& kept : s->pending_) {
      if (Status status = s->closeExact(kept); !status.ok()) return failed(status, error);
    }
  }
  ncclResult_t result = ncclSuccess;
  for (size_t i = 0; i < most && result == ncclSuccess; ++i) {
    if (!gate.enter()) {
      *error = "the communicator was aborted while a sample was being enqueued";
      return ncclRemoteError;
    }
    const NcclApi* api = members.front()->api_;
    result = api->ncclGroupStart();
    for (Shadow* s : members) {
      if (result == ncclSuccess && i < s->pending_.size()) result = s->meet();
    }
    const ncclResult_t end = api->ncclGroupEnd();
    gate.leave();
    if (result == ncclSuccess) result = end;
    if (result != ncclSuccess) break;
    std::vector<CompressedCall> calls;
    calls.reserve(members.size());
    std::vector<CompressedTurn> turns;
    for (Shadow* s : members) {
      if (i >= s->pending_.size()) continue;
      if (Status status = s->openCompressed(s->pending_[i]); !status.ok()) return failed(status, error);
      calls.push_back(s->copied(s->pending_[i]));
      CompressedTurn turn;
      turn.compressor = s->compressor_.get();
      turn.calls = {&calls.back(), 1};
      turns.push_back(std::move(turn));
    }
    result = runCompressed(turns, gate, error);
    for (Shadow* s : members) {
      if (result != ncclSuccess || i >= s->pending_.size()) continue;
      if (Status status = s->compareWith(s->pending_[i]); !status.ok()) return failed(status, error);
    }
  }
  for (Shadow* s : members) {
    if (s->pending_.empty()) continue;
    s->pending_.clear();
    s->input_used_ = s->output_used_ = 0;
    if (Status status = s->device_->recordEvent(s->done_, s->stream_); !status.ok())
      return failed(status, error);
    s->used_ = true;
  }
  return result;
}

}  // namespace halfwire
