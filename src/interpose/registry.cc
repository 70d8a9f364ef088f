#include "interpose/registry.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>

#include "interpose/handles.h"
#include "interpose/process_log.h"
#include "wire/codec.h"

namespace halfwire {
namespace {

// Marks a slot whose communicator is gone, so that probing goes on past it.
ncclComm_t tombstone() { return reinterpret_cast<ncclComm_t>(uintptr_t{1}); }

}  // namespace

Registry& Registry::get() {
  // Leaked on purpose: other threads may still be inside NCCL when the process exits.
  static Registry* registry = new Registry;
  return *registry;
}

Registry::Registry() : settings_(readSettings(&::getenv)), slots_(new Slot[kSlots]) {
  pthread_atfork(nullptr, nullptr, [] { Registry::get().stopCounting(); });
}

const RealNccl* Registry::real(Status* status) {
  if (const RealNccl* ready = real_ready_.load(std::memory_order_acquire)) return ready;
  std::lock_guard lock(mutex_);
  if (!real_ || !real_->ok()) {
    real_.emplace(resolveNccl(settings_.ok() ? settings_.value().nccl_path : std::string()));
    if (real_->ok()) {
      if (Status one = checkHandles(real_->value()); !one.ok()) real_.emplace(one);
    }
  }
  if (!real_->ok()) {
    *status = real_->status();
    return nullptr;
  }
  real_ready_.store(&real_->value(), std::memory_order_release);
  return &real_->value();
}

const RealNccl* Registry::otherCopy(const void* caller) {
  std::string path;
  const void* base = ncclLibraryAt(caller, &path);
  if (base == nullptr) return nullptr;
  std::lock_guard lock(mutex_);
  const auto [entry, fresh] = other_copies_.try_emplace(base);
  if (!fresh) return entry->second.get();
  if (auto found = resolveNccl(path); found.ok())
    entry->second = std::make_unique<RealNccl>(std::move(found).value());
  return entry->second.get();
}

void Registry::settleMeetings() {
  MeetingPoint* point = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (meeting_pid_ == getpid()) point = meeting_.get();
  }
  if (point != nullptr) point->settle();
}

Result<Mark> Registry::invite() {
  std::lock_guard lock(mutex_);
  const Settings& s = settings_.value();
  if (s.mode == Mode::kOff) {
    Mark mark;
    mark.digest = settingsDigest(s);
    return mark;
  }
  if (meeting_ != nullptr && meeting_pid_ != getpid())
    (void)meeting_.release();  // its thread stayed in the parent
  if (meeting_ == nullptr) {
    auto opened = MeetingPoint::open(s.address, s.meeting_timeout_s);
    if (!opened.ok()) return opened.status();
    meeting_ = std::move(opened).value();
    meeting_pid_ = getpid();
  }
  return meeting_->invite(s.mode, settingsDigest(s));
}

size_t Registry::slotOf(ncclComm_t handle) {
  return (reinterpret_cast<uintptr_t>(handle) * 0x9e3779b97f4a7c15ull) >> 52;  // 12 bits
}

Communicator* Registry::find(ncclComm_t handle) const {
  if (handle == nullptr) return nullptr;
  for (size_t i = 0, slot = slotOf(handle); i < kSlots; ++i, slot = (slot + 1) % kSlots) {
    const ncclComm_t key = slots_[slot].key.load(std::memory_order_acquire);
    if (key == handle) return slots_[slot].value.load(std::memory_order_acquire);
    if (key == nullptr) return nullptr;
  }
  return nullptr;
}

RunLog* Registry::log() {
  if (log_tried_) return log_;
  log_tried_ = true;
  log_ = processLog(settings_.ok() ? settings_.value().log_dir : std::string());
  if (log_ == nullptr) return nullptr;
  RunLogFile& f = log_->file();
  if (settings_.ok()) {
    f.world = settings_.value().world_size;
    RunLog::setText(f.settings, describeSettings(settings_.value()));
  }
  if (settings_.ok() && settings_.value().meter) startMeter(f);
  return log_;
}

void Registry::startMeter(RunLogFile& f) {
  const auto find = reinterpret_cast<meter::MeterHooksFunction>(dlsym(RTLD_DEFAULT, HALFWIRE_METER_SYMBOL));
  const meter::MeterHooks* hooks = find != nullptr ? find() : nullptr;
  if (hooks == nullptr || hooks->version != 1 || hooks->bytes != sizeof(meter::MeterHooks)) {
    f.meter.state.store(static_cast<uint32_t>(MeterState::kRefused));
    RunLog::setText(
        f.meter.words,
        hooks == nullptr
            ? "libhalfwire-meter.so is not in this process: `halfwire run --mode meter` or `--meter on` "
              "preloads it, and LD_PRELOAD must reach the workers with both libraries"
            : "libhalfwire-meter.so is of another build than libhalfwire.so: install both together");
    return;
  }
  hooks->start(&f, settings_.value().meter_every);
  if (f.meter.state.load() == static_cast<uint32_t>(MeterState::kOn)) meter_.store(hooks);
}

void Registry::add(std::unique_ptr<Communicator> c, const std::string& note, uint64_t connection_bytes) {
  std::lock_guard lock(mutex_);
  if (RunLog* log = counting() ? this->log() : nullptr) {
    RunLogFile& f = log->file();
    if (c->real != nullptr) {
      f.nccl_version = c->real->version;
      RunLog::setText(f.nccl_path, c->real->path);
      RunLog::setText(f.engine, c->real->host_engine != nullptr ? "host" : "nccl");
      RunLog::setText(f.unknown_entry_points, c->real->unknown_entry_points);
    }
    if (c->compresses()) RunLog::setText(f.codec, c->device->codecName());
    if (RunLogCommunicator* slot = log->addCommunicator()) {
      slot->rank = c->rank;
      slot->ranks = c->ranks;
      slot->reason = static_cast<uint32_t>(c->agreement.comm);
      slot->scratch_bytes = c->compresses()        ? c->compressor->scratchHeld()
                            : c->shadow != nullptr ? c->shadow->scratchHeld()
                                                   : 0;
      slot->connection_bytes = connection_bytes;
      RunLog::setText(slot->note, note);
      slot->used.store(1, std::memory_order_release);
      c->log = slot;
    }
  }
  const ncclComm_t handle = c->handle;
  for (size_t i = 0, slot = slotOf(handle); i < kSlots; ++i, slot = (slot + 1) % kSlots) {
    const ncclComm_t key = slots_[slot].key.load(std::memory_order_relaxed);
    if (key != nullptr && key != tombstone() && key != handle) continue;
    slots_[slot].value.store(c.release(), std::memory_order_release);
    slots_[slot].key.store(handle, std::memory_order_release);
    return;
  }
  parked_.push_back(std::move(c));  // the table is full: calls on it pass through uncounted
}

std::unique_ptr<Communicator> Registry::remove(ncclComm_t handle) {
  std::lock_guard lock(mutex_);
  if (handle == nullptr) return nullptr;
  for (size_t i = 0, slot = slotOf(handle); i < kSlots; ++i, slot = (slot + 1) % kSlots) {
    const ncclComm_t key = slots_[slot].key.load(std::memory_order_relaxed);
    if (key == nullptr) return nullptr;
    if (key != handle) continue;
    slots_[slot].key.store(tombstone(), std::memory_order_release);
    return std::unique_ptr<Communicator>(slots_[slot].value.exchange(nullptr));
  }
  return nullptr;
}

void Registry::park(std::unique_ptr<Communicator> c) {
  if (c == nullptr) return;
  if (c->compressor != nullptr) c->compressor->park();
  if (c->shadow != nullptr) c->shadow->park();
  if (c->messages != nullptr) c->messages->park();
  std::lock_guard lock(mutex_);
  parked_.push_back(std::move(c));
}

Result<std::shared_ptr<Device>> Registry::device(const RealNccl& real, int ordinal) {
  std::lock_guard lock(devices_mutex_);
  std::weak_ptr<Device>& known = devices_[{&real, ordinal}];
  if (auto device = known.lock()) return device;
  auto made = real.host_engine != nullptr
                  ? makeHostDevice(real.host_engine, ordinal, allocator_)
                  : makeCudaDevice(ordinal, allocator_, settings().value().stochastic);
  if (!made.ok()) return made.status();
  std::shared_ptr<Device> device = std::move(made).value();
  known = device;
  return device;
}

bool Registry::setAllocator(const AllocatorCalls& calls) {
  std::lock_guard lock(devices_mutex_);
  if (!devices_.empty()) return false;
  allocator_ = calls;
  return true;
}

void Registry::noteError(const std::string& words) {
  std::lock_guard lock(mutex_);
  if (RunLog* log = counting() ? this->log() : nullptr) logError(*log, words);
}

}  // namespace halfwire
