#include "interpose/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/units.h"
#include "interpose/create.h"
#include "interpose/nvtx.h"

namespace halfwire {
namespace {

using Clock = std::chrono::steady_clock;

// Counts without read-modify-write: NCCL allows one thread at a time on a communicator, and the log has no
// other writer.
void bump(std::atomic<uint64_t>& counter, uint64_t by) {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

// The same call in the meter's rows, by size.
RunLogSize* countSize(Communicator& c, const QueuedCall& call, Reason reason) {
  const uint64_t asked = messageBytes(call.op, call.type, call.count, c.ranks);
  RunLogSize* row = RunLog::sizeRow(*c.log, call.op, call.type, asked);
  if (row == nullptr) {
    bump(c.log->dropped_sizes, 1);
    return nullptr;
  }
  bump(row->calls, 1);
  bump(row->bytes_asked, asked);
  const uint64_t ring = ringBytes(call.op, call.type, call.count, c.ranks);
  bump(row->bytes_ring, ring);
  if (reason != Reason::kCompressed) bump(row->bytes_sent, ring);
  return row;
}

// The rows of this kind of call with the call already counted; nulls if nothing is counted.
CountedRows count(Communicator& c, const QueuedCall& call, Reason reason) {
  if (c.log == nullptr || !Registry::get().counting()) return {};
  CountedRows rows;
  if (Registry::get().meter() != nullptr) rows.size = countSize(c, call, reason);
  // Most calls are of the kind of the one before.
  RunLogRow* row = c.last_row;
  if (row == nullptr ||
      row->key.load(std::memory_order_relaxed) != RunLog::rowKey(call.op, call.type, reason))
    row = RunLog::row(*c.log, call.op, call.type, reason);
  if (row == nullptr) {
    bump(c.log->dropped, 1);
    return rows;
  }
  c.last_row = row;
  rows.kind = row;
  bump(row->calls, 1);
  bump(row->bytes_asked, messageBytes(call.op, call.type, call.count, c.ranks));
  const uint64_t ring = ringBytes(call.op, call.type, call.count, c.ranks);
  bump(row->bytes_ring, ring);
  if (reason != Reason::kCompressed) bump(row->bytes_sent, ring);
  return rows;
}

// Tells the meter of calls about to be enqueued, and when they have been.
class Metered {
 public:
  explicit Metered(const std::vector<meter::MeterCall>& calls) : Metered(calls.data(), calls.size()) {}
  Metered(const meter::MeterCall* calls, size_t count)
      : hooks_(count > 0 ? Registry::get().meter() : nullptr) {
    if (hooks_ != nullptr) hooks_->begin(calls, count, &scope_);
  }
  ~Metered() {
    if (hooks_ != nullptr && scope_.count > 0) hooks_->end(&scope_);
  }
  Metered(const Metered&) = delete;
  Metered& operator=(const Metered&) = delete;

 private:
  const meter::MeterHooks* hooks_;
  meter::MeterScope scope_;
};

meter::MeterCall meterCall(const Communicator& c, const QueuedCall& call, const CountedRows& rows) {
  uint64_t kind = reinterpret_cast<uintptr_t>(c.log);
  for (const uint64_t part : {static_cast<uint64_t>(call.op), static_cast<uint64_t>(call.type),
                              static_cast<uint64_t>(call.count)}) {
    kind = (kind ^ part) * 0x9e3779b97f4a7c15ull;
    kind ^= kind >> 32;
  }
  return {call.stream, rows.size, kind};
}

// Lets runCompressed into the real NCCL unless one of the members is being aborted from another thread.
class TurnGate final : public CallGate {
 public:
  explicit TurnGate(std::vector<Communicator*> members) : members_(std::move(members)) {
    set(CallState::kOurs);
  }
  ~TurnGate() override { set(CallState::kIdle); }

  bool enter() override {
    if (aborted()) return false;
    set(CallState::kReal);
    // Abort sets its flag and then reads the state; this sets the state and then reads the flag: one of them
    // sees the other (both sequentially consistent).
    if (aborted()) {
      set(CallState::kOurs);
      return false;
    }
    ++threadState().inside_real;
    return true;
  }

  void leave() override {
    --threadState().inside_real;
    set(CallState::kOurs);
  }

 private:
  void set(CallState state) {
    for (Communicator* c : members_) c->state.store(state);
  }
  bool aborted() const {
    return std::any_of(members_.begin(), members_.end(), [](Communicator* c) { return c->aborted.load(); });
  }
  std::vector<Communicator*> members_;
};

RedOpKind redOpKind(Communicator& c, const QueuedCall& call, Factor* factor) {
  if (!reducesData(call.op)) return RedOpKind::kNone;
  if (call.redop == ncclSum) return RedOpKind::kSum;
  if (call.redop == ncclAvg) return RedOpKind::kAvg;
  if (call.redop < ncclNumOps) return RedOpKind::kOther;
  std::lock_guard lock(c.ops_mutex);
  for (const CreatedOp& op : c.ops) {
    if (op.op != call.redop || op.type != call.type) continue;
    *factor = op.factor;
    return RedOpKind::kPreMulSum;
  }
  return RedOpKind::kOther;
}

// Whether NCCL would accept these buffers: what it refuses is left to it, with its own words.
bool buffersPresent(const Communicator& c, const QueuedCall& call) {
  const bool root = static_cast<uint32_t>(call.peer) == c.rank;
  switch (call.op) {
    case CollectiveOp::kReduce:
    case CollectiveOp::kGather:
      return call.send != nullptr && (call.recv != nullptr || !root);
    case CollectiveOp::kBroadcast:
    case CollectiveOp::kScatter:
      return call.recv != nullptr && (call.send != nullptr || !root);
    case CollectiveOp::kSend:
      return call.send != nullptr;
    case CollectiveOp::kRecv:
      return call.recv != nullptr;
    default:
      return call.send != nullptr && call.recv != nullptr;
  }
}

// A root or peer that does not exist is NCCL's to refuse.
bool rankExists(const Communicator& c, const QueuedCall& call) {
  return call.peer >= 0 && static_cast<uint32_t>(call.peer) < c.ranks;
}

CompressedCall compressedCall(const QueuedCall& call, RedOpKind kind, const Factor& factor) {
  CompressedCall out;
  out.op = call.op;
  out.send = call.send;
  out.recv = call.recv;
  out.count = call.count;
  (void)wireDataType(call.type, &out.type);
  out.average = kind == RedOpKind::kAvg;
  out.factor = factor;
  out.stream = call.stream;
  out.root = static_cast<uint32_t>(call.peer);
  return out;
}

bool overwritesItsSource(const Communicator& c, const CompressedCall& call) {
  const size_t own = c.rank * call.count * dataTypeBytes(call.type);
  if (call.op == CollectiveOp::kBroadcast) return call.root == c.rank && call.send == call.recv;
  return call.op == CollectiveOp::kAllGather && call.send == static_cast<char*>(call.recv) + own;
}

// Runs the compressed calls of one clique and counts them.
ncclResult_t runMembers(std::vector<MemberTurn>& members) {
  std::vector<CompressedTurn> turns;
  std::vector<Communicator*> communicators;
  std::vector<std::vector<StreamHandle>> streams;
  streams.reserve(members.size());
  for (MemberTurn& m : members) {
    if (m.compressed.empty()) continue;
    communicators.push_back(m.communicator);
    streams.emplace_back();
    // NCCL joins all streams of a group before and after it.
    for (const QueuedCall& call : m.forwarded) streams.back().push_back(call.stream);
    for (const PointToPoint& p : m.p2p) streams.back().push_back(p.call.stream);
    CompressedTurn turn;
    turn.compressor = m.communicator->compressor.get();
    turn.calls = m.compressed;
    turn.streams = streams.back();
    turns.push_back(std::move(turn));
  }
  if (turns.empty()) return ncclSuccess;

  const auto start = Clock::now();
  std::string error;
  ncclResult_t result;
  {
    TurnGate gate(communicators);
    result = runCompressed(turns, gate, &error);
  }
  if (result != ncclSuccess && !error.empty()) return refuse(result, error);
  if (result != ncclSuccess) return result;

  const auto ns = static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
  size_t calls = 0;
  for (const CompressedTurn& t : turns) calls += t.calls.size();
  size_t index = 0;
  for (MemberTurn& m : members) {
    if (m.compressed.empty()) continue;
    const CompressedTurn& turn = turns[index++];
    for (size_t i = 0; i < m.compressed.size(); ++i) {
      if (m.rows[i].size != nullptr) bump(m.rows[i].size->bytes_sent, turn.stats[i].sent_bytes);
      RunLogRow* row = m.rows[i].kind;
      if (row == nullptr) continue;
      bump(row->bytes_sent, turn.stats[i].sent_bytes);
      bump(row->launches, turn.stats[i].launches);
      bump(row->host_ns, ns / calls);
      if (overwritesItsSource(*m.communicator, m.compressed[i])) bump(row->in_place, 1);
    }
  }
  return ncclSuccess;
}

// One real group of the calls that `pick` selects from each member; none if there are none.
template <class Pick>
ncclResult_t runForwarded(std::vector<MemberTurn>& members, Pick&& pick) {
  const bool any =
      std::any_of(members.begin(), members.end(), [&](MemberTurn& m) { return !pick(m).empty(); });
  if (!any) return ncclSuccess;
  std::vector<Communicator*> communicators;
  for (MemberTurn& m : members) communicators.push_back(m.communicator);
  const NcclApi& api = members.front().communicator->real->api;
  TurnGate gate(std::move(communicators));
  if (!gate.enter())
    return refuse(ncclRemoteError, "the communicator was aborted while its group was being launched");
  ncclResult_t result = api.ncclGroupStart();
  for (MemberTurn& m : members) {
    for (const QueuedCall& call : pick(m)) {
      if (result == ncclSuccess) result = issue(api, call);
    }
  }
  const ncclResult_t end = api.ncclGroupEnd();
  gate.leave();
  return result != ncclSuccess ? result : end;
}

// What a profiler shows: "AllReduce 25 MiB bf16 e4m3/128/fp32", "Broadcast 4 B fp32 exact". Empty without
// one.
std::string rangeText(const Communicator& c, const QueuedCall& call, bool compress) {
  const WireFormat& f = c.agreement.settings.format;
  return fmt::format(
      "{} {} {} {}", opName(call.op), formatBytes(messageBytes(call.op, call.type, call.count, c.ranks)),
      dataTypeName(call.type),
      compress ? fmt::format("{}/{}/{}", elementFormatName(f.element), f.block, scaleFormatName(f.scale))
               : "exact");
}

// The same for the compressed calls of a group's turn.
std::string rangeText(const std::vector<MemberTurn>& members) {
  size_t calls = 0;
  uint64_t bytes = 0;
  for (const MemberTurn& m : members) {
    calls += m.compressed.size();
    for (const CompressedCall& call : m.compressed) {
      bytes += messageBytes(call.op, ncclDataType(call.type), call.count, m.communicator->ranks);
    }
  }
  return calls == 0 ? std::string()
                    : fmt::format("group of {} compressed calls, {}", calls, formatBytes(bytes));
}

bool isMessage(CollectiveOp op) { return op == CollectiveOp::kSend || op == CollectiveOp::kRecv; }

// Runs what NCCL runs behind a group's collectives, in one real group: messages of which some are compressed,
// or all exact.
ncclResult_t runPointToPoint(std::vector<MemberTurn>& members) {
  const bool any = std::any_of(members.begin(), members.end(), [](const MemberTurn& m) {
    return std::any_of(m.p2p.begin(), m.p2p.end(), [](const PointToPoint& p) { return p.compressed; });
  });
  if (!any) {
    return runForwarded(members, [](const MemberTurn& m) {
      std::vector<QueuedCall> calls;
      for (const PointToPoint& p : m.p2p) calls.push_back(p.call);
      return calls;
    });
  }
  std::vector<Communicator*> communicators;
  std::vector<std::vector<Message>> messages;
  std::vector<std::vector<StreamHandle>> streams;
  std::vector<Messages::Turn> turns;
  messages.reserve(members.size());
  streams.reserve(members.size());
  for (MemberTurn& m : members) {
    communicators.push_back(m.communicator);
    const NcclApi& api = m.communicator->real->api;
    messages.emplace_back();
    streams.emplace_back();
    for (const QueuedCall& call : m.forwarded) streams.back().push_back(call.stream);
    for (const CompressedCall& call : m.compressed) streams.back().push_back(call.stream);
    for (const PointToPoint& p : m.p2p) {
      Message& message = messages.back().emplace_back();
      message.stream = p.call.stream;
      if (!p.compressed) {
        message.exact = [&api, &p] { return issue(api, p.call); };
        continue;
      }
      message.send = p.call.op == CollectiveOp::kSend;
      message.buffer = message.send ? const_cast<void*>(p.call.send) : p.call.recv;
      message.count = p.call.count;
      message.peer = p.call.peer;
      (void)wireDataType(p.call.type, &message.type);
    }
    turns.push_back({m.communicator->messages.get(), messages.back(), streams.back(), {}});
  }
  const auto start = Clock::now();
  std::string error;
  ncclResult_t result;
  {
    TurnGate gate(communicators);
    result = Messages::run(turns, gate, &error);
  }
  if (result != ncclSuccess) return error.empty() ? result : refuse(result, error);
  const auto ns = static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
  size_t calls = 0;
  for (const MemberTurn& m : members) calls += m.p2p.size();
  for (size_t k = 0; k < members.size(); ++k) {
    for (size_t i = 0; i < members[k].p2p.size(); ++i) {
      const PointToPoint& p = members[k].p2p[i];
      if (!p.compressed) continue;
      const CallStats& stats = turns[k].stats[i];
      if (p.rows.size != nullptr) bump(p.rows.size->bytes_sent, stats.sent_bytes);
      if (p.rows.kind == nullptr) continue;
      bump(p.rows.kind->bytes_sent, stats.sent_bytes);
      bump(p.rows.kind->launches, stats.launches);
      bump(p.rows.kind->host_ns, ns / calls);
    }
  }
  return ncclSuccess;
}

ncclResult_t runTurn(CliqueTurn& turn) {
  std::optional<nvtx::Range> range;
  if (nvtx::attached()) range.emplace(rangeText(turn.members));
  ncclResult_t result = runForwarded(turn.members, [](MemberTurn& m) -> auto& { return m.forwarded; });
  if (result == ncclSuccess) result = runMembers(turn.members);
  if (result == ncclSuccess) result = runPointToPoint(turn.members);
  return result;
}

MemberTurn& turnOf(GroupQueue& queue, Communicator& c) {
  const auto clique = std::find_if(queue.turns.begin(), queue.turns.end(),
                                   [&](CliqueTurn& t) { return t.clique == c.clique; });
  CliqueTurn& turn = clique != queue.turns.end() ? *clique : queue.turns.emplace_back();
  turn.clique = c.clique;
  const auto member = std::find_if(turn.members.begin(), turn.members.end(),
                                   [&](MemberTurn& m) { return m.communicator == &c; });
  if (member != turn.members.end()) return *member;
  turn.members.emplace_back().communicator = &c;
  return turn.members.back();
}

// Calls that NCCL runs behind a group's collectives: it makes AlltoAll, Gather and Scatter of sends and
// receives.
bool isPointToPoint(CollectiveOp op) {
  return op == CollectiveOp::kSend || op == CollectiveOp::kRecv || op == CollectiveOp::kAlltoAll ||
         op == CollectiveOp::kGather || op == CollectiveOp::kScatter;
}

// NCCL discards a collective without elements before it notes the communicator: such a call gives its
// communicator no place in the group's order. An empty message is a task like any other.
bool discardedByNccl(const QueuedCall& call) {
  return call.count == 0 && call.op != CollectiveOp::kSend && call.op != CollectiveOp::kRecv;
}

// Whether a call inside a group goes straight into the open real group. NCCL launches a group communicator by
// communicator in order of first call, so a communicator first called after one that compresses must wait for
// its turn.
bool passesAtOnce(GroupQueue& queue, Communicator& c) {
  if (c.compresses()) return false;
  const bool seen = std::find(queue.passed.begin(), queue.passed.end(), &c) != queue.passed.end();
  if (!seen && queue.turns.empty()) queue.passed.push_back(&c);
  return seen || queue.turns.empty();
}

ncclResult_t forward(const NcclApi& api, const QueuedCall& call) {
  const InsideReal inside;
  return issue(api, call);
}

void keepSamples(Communicator& c, const std::vector<ShadowSample>& samples) {
  if (c.log == nullptr || !Registry::get().counting()) return;
  const auto add = [](auto& to, auto by) {
    to.store(to.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  };
  for (const ShadowSample& s : samples) {
    const ncclDataType_t type = ncclDataType(s.type);
    RunLogShadow* row =
        RunLog::shadowRow(*c.log, s.op, type, messageBytes(s.op, type, s.count, c.ranks), s.format);
    if (row == nullptr) {
      bump(c.log->dropped_shadows, 1);
      continue;
    }
    const uint64_t slot = row->samples.load(std::memory_order_relaxed) % kRunLogShadowTimes;
    row->exact_us[slot].store(static_cast<float>(s.exact_ms * 1e3), std::memory_order_relaxed);
    row->compressed_us[slot].store(static_cast<float>(s.compressed_ms * 1e3), std::memory_order_relaxed);
    add(row->elements, s.sums.elements);
    add(row->flushed, s.sums.flushed);
    add(row->not_finite, s.sums.not_finite);
    add(row->exact_squares, s.sums.exact_squares);
    add(row->other_squares, s.sums.other_squares);
    add(row->error_squares, s.sums.error_squares);
    add(row->product, s.sums.product);
    row->worst_block.store(std::max(row->worst_block.load(std::memory_order_relaxed), s.sums.worst_block),
                           std::memory_order_relaxed);
    bump(row->samples, 1);
  }
}

// Notes what a sampled call needs before it goes to NCCL; whether it is sampled, in `taken`.
ncclResult_t shadowBefore(Communicator& c, const CompressedCall& call, bool* taken) {
  keepSamples(c, c.shadow->collect());
  *taken = c.shadow->samples(call);
  if (!*taken) return ncclSuccess;
  const uint64_t unread = c.shadow->unread();
  const Status kept = c.shadow->keep(call);
  if (!kept.ok())
    return refuse(kept.code() == StatusCode::kInvalidArgument ? ncclInvalidUsage : ncclUnhandledCudaError,
                  kept.message());
  if (c.log != nullptr && Registry::get().counting())
    bump(c.log->dropped_shadows, c.shadow->unread() - unread);
  return ncclSuccess;
}

// Runs the samples of communicators behind their exact calls, members of one clique together.
ncclResult_t shadowAfter(std::vector<Communicator*> communicators) {
  while (!communicators.empty()) {
    const uint64_t clique = communicators.front()->clique;
    std::vector<Communicator*> members;
    std::vector<Shadow*> shadows;
    for (Communicator* c : communicators) {
      if (c->clique != clique) continue;
      members.push_back(c);
      shadows.push_back(c->shadow.get());
    }
    std::erase_if(communicators, [&](Communicator* c) { return c->clique == clique; });
    TurnGate gate(members);
    std::string error;
    const ncclResult_t result = runShadows(shadows, gate, &error);
    if (result != ncclSuccess) return error.empty() ? result : refuse(result, error);
  }
  return ncclSuccess;
}

void destroyDeferredOps(GroupQueue& queue) {
  const InsideReal inside;
  for (const DestroyedOp& d : queue.destroyed_ops) (void)d.real->api.ncclRedOpDestroy(d.op, d.comm);
  queue.destroyed_ops.clear();
}

}  // namespace

ncclResult_t dataCall(Communicator& c, const QueuedCall& call) {
  ThreadState& thread = threadState();

  const bool metered = Registry::get().meter() != nullptr;
  const bool profiled = nvtx::attached();
  // Off is off: what can neither compress nor is looked at is counted and gone.
  if (c.agreement.comm != Reason::kCompressed && thread.group_depth == 0 && !metered && !profiled) {
    (void)count(c, call, c.agreement.comm);
    return forward(c.real->api, call);
  }

  Factor factor;
  RedOpKind kind = RedOpKind::kNone;
  Reason reason = c.agreement.comm;
  if (reason == Reason::kCompressed) {
    kind = redOpKind(c, call, &factor);
    CallShape shape{call.op, call.type, kind, call.count, false};
    reason = decideCall(c.agreement, shape);
    // The capture state costs a call into the driver, so it is asked only where it can matter.
    if (reason == Reason::kCompressed && c.agreement.settings.mode != Mode::kWire) {
      uint64_t capture = 0;
      const Status status = c.device->captureOf(call.stream, &capture);
      if (!status.ok()) return refuse(ncclUnhandledCudaError, status.message());
      shape.capturing = capture != 0;
      reason = decideCall(c.agreement, shape);
    }
  }
  const bool noise = reason == Reason::kCompressed && c.agreement.settings.mode == Mode::kNoise;
  const bool shadow = reason == Reason::kCompressed && c.shadow != nullptr;
  const CountedRows row = count(c, call, noise ? Reason::kNoise : shadow ? Reason::kShadow : reason);
  const bool message = isMessage(call.op);
  const bool compress = reason == Reason::kCompressed && !shadow && rankExists(c, call) &&
                        buffersPresent(c, call) && (!message || c.messages != nullptr);
  bool sampled = false;
  if (shadow && buffersPresent(c, call)) {
    const ncclResult_t kept = shadowBefore(c, compressedCall(call, kind, factor), &sampled);
    if (kept != ncclSuccess) return kept;
  }

  if (thread.group_depth == 0) {
    const meter::MeterCall one = metered ? meterCall(c, call, row) : meter::MeterCall{};
    const Metered around(&one, metered ? 1 : 0);
    std::optional<nvtx::Range> range;
    if (profiled) range.emplace(rangeText(c, call, compress && !noise));
    if (!compress) {
      const ncclResult_t result = forward(c.real->api, call);
      if (!sampled) return result;
      if (result == ncclSuccess) return shadowAfter({&c});
      c.shadow->drop();
      return result;
    }
    std::vector<MemberTurn> members(1);
    members[0].communicator = &c;
    if (message) {
      members[0].p2p.push_back({call, true, row});
      return runPointToPoint(members);
    }
    members[0].compressed.push_back(compressedCall(call, kind, factor));
    members[0].rows.push_back(row);
    return runMembers(members);
  }

  GroupQueue& queue = threadQueue();
  if (metered) queue.metered.push_back(meterCall(c, call, row));
  if (sampled && std::find(queue.shadowed.begin(), queue.shadowed.end(), &c) == queue.shadowed.end())
    queue.shadowed.push_back(&c);
  if (discardedByNccl(call) || passesAtOnce(queue, c)) return forward(c.real->api, call);
  MemberTurn& turn = turnOf(queue, c);
  if (compress && !message) {
    turn.compressed.push_back(compressedCall(call, kind, factor));
    turn.rows.push_back(row);
  } else if (isPointToPoint(call.op)) {
    turn.p2p.push_back({call, compress, row});
  } else {
    turn.forwarded.push_back(call);
  }
  return ncclSuccess;
}

ncclResult_t groupStart(const RealNccl& real) {
  ThreadState& thread = threadState();
  // The real group opens at once, also where everything is queued: functions of a newer NCCL that are not
  // wrapped must find it open.
  ncclResult_t result;
  {
    const InsideReal inside;
    result = real.api.ncclGroupStart();
  }
  if (result == ncclSuccess && thread.group_depth++ == 0) thread.group_real = &real;
  return result;
}

ncclResult_t groupEnd(const RealNccl& real) {
  ThreadState& thread = threadState();
  const RealNccl& library = thread.group_real != nullptr ? *thread.group_real : real;
  std::vector<meter::MeterCall> metered;
  if (thread.group_depth == 1 && thread.queue != nullptr) std::swap(metered, thread.queue->metered);
  const Metered around(metered);
  ncclResult_t result;
  {
    const InsideReal inside;
    result = library.api.ncclGroupEnd();
  }
  if (thread.group_depth > 0) --thread.group_depth;
  if (thread.group_depth > 0 || thread.queue == nullptr) return result;
  thread.group_real = nullptr;

  // Moved out first: a turn must not see itself queued.
  GroupQueue queue;
  std::swap(queue, *thread.queue);
  if (!queue.inits.empty()) {
    const ncclResult_t met = finishCommunicators(queue.inits, result);
    if (result == ncclSuccess || result == ncclInProgress) result = met == ncclSuccess ? result : met;
  }
  // An error inside the group drops what it queued, as NCCL does.
  if (result == ncclSuccess) {
    for (CliqueTurn& turn : queue.turns) {
      result = runTurn(turn);
      if (result != ncclSuccess) break;
    }
  }
  if (result == ncclSuccess) {
    result = shadowAfter(queue.shadowed);
  } else {
    for (Communicator* c : queue.shadowed) c->shadow->drop();
  }
  destroyDeferredOps(queue);
  return result;
}

ncclResult_t groupSimulateEnd(const RealNccl& real, ncclSimInfo_t* info) {
  ThreadState& thread = threadState();
  const RealNccl& library = thread.group_real != nullptr ? *thread.group_real : real;
  ncclResult_t result;
  {
    const InsideReal inside;
    result = library.api.ncclGroupSimulateEnd != nullptr ? library.api.ncclGroupSimulateEnd(info)
                                                         : ncclInvalidUsage;
  }
  // It ends the group like GroupEnd and launches nothing.
  if (thread.group_depth > 0) --thread.group_depth;
  if (thread.group_depth > 0 || thread.queue == nullptr) return result;
  thread.group_real = nullptr;
  GroupQueue queue;
  std::swap(queue, *thread.queue);
  for (Communicator* c : queue.shadowed) c->shadow->drop();
  destroyDeferredOps(queue);
  return result;
}

void finishShadow(Communicator& c) {
  if (c.shadow != nullptr) keepSamples(c, c.shadow->finish());
}

}  // namespace halfwire
