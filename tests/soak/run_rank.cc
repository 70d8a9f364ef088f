// One rank of a soak program. Buffers are filled and checked on the streams themselves, by host functions,
// and every stream uses the same memory for step after step: work that does not keep the stream's order meets
// garbage.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>

#include "abi/nccl_types.h"
#include "soak/oracle.h"
#include "soak/program.h"
#include "support/nccl_check.h"
#include "support/rank.h"

namespace halfwire::soak {
namespace {

using halfwire::testing::Rank;

constexpr size_t kGuard = 64;
constexpr uint8_t kGuardByte = 0xa5;

// What the checks of one rank found.
class Findings {
 public:
  void error(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (errors_.size() < 10) errors_.push_back(text);
    ++count_;
  }
  void hash(int op, uint64_t value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    hashes_ << op << " " << value << "\n";
  }
  std::string hashes() { return hashes_.str(); }
  std::string errors() {
    std::string text;
    for (const auto& e : errors_) text += e + "\n";
    if (count_ > errors_.size()) text += "... and " + std::to_string(count_ - errors_.size()) + " more\n";
    return text;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> errors_;
  size_t count_ = 0;
  std::ostringstream hashes_;
};

// One call of this rank: where its buffers lie, and what fills and checks them.
struct Task {
  const Program* program = nullptr;
  const Op* op = nullptr;
  Findings* findings = nullptr;
  int me = 0;  // in the operation's communicator
  bool sends = true;
  bool receives = true;
  bool against_library = true;  // the library is there: calls it should compress may be rounded
  char* region = nullptr;
  size_t region_bytes = 0;
  char* send = nullptr;
  char* recv = nullptr;
  char* scalar = nullptr;
  uint64_t source_hash = 0;

  size_t elementBytes() const { return ncclTypeBytes(op->type); }
  uint64_t sendCount() const { return sends ? sendElements(*program, *op, me) : 0; }
  uint64_t recvCount() const { return receives ? recvElements(*program, *op, me) : 0; }
  // Only the root of a Gather or Scatter has both buffers.
  bool inPlace() const {
    if ((op->kind == OpKind::kGather || op->kind == OpKind::kScatter) && me != op->root) return false;
    return op->placements[me].in_place;
  }
  int memberCount() const { return static_cast<int>(program->comms[op->comm].members.size()); }
  // The receive buffer is only NCCL's to write where NCCL says so.
  bool writesRecv() const { return receives && !(op->kind == OpKind::kReduce && me != op->root); }

  // Bytes of a region that holds both buffers wherever their offsets put them.
  size_t regionNeeded() const {
    const size_t slack = 3 * kGuard + 64 + 32 * elementBytes();
    return (sendCount() + recvCount()) * elementBytes() + slack;
  }

  void place(char* at, size_t bytes) {
    region = at;
    region_bytes = bytes;
    const Placement& p = op->placements[me];
    const size_t e = elementBytes();
    scalar = at + kGuard / 2;
    char* first = at + kGuard + p.send_offset * e;
    if (!inPlace()) {
      send = first;
      recv = at + 2 * kGuard + (sendCount() * e + 16 * e + 15) / 16 * 16 + p.recv_offset * e;
      return;
    }
    send = recv = first;
    const size_t own = static_cast<size_t>(me) * op->count * e;
    if (op->kind == OpKind::kReduceScatter || op->kind == OpKind::kScatter) recv = first + own;
    if (op->kind == OpKind::kAllGather || op->kind == OpKind::kGather) send = first + own;
  }

  void fill() {
    memset(region, kGuardByte, region_bytes);
    if (sends) {
      generate(op->profile, op->type, dataKey(*program, *op, me), sendCount(), send);
      source_hash = hashBytes(send, sendCount() * elementBytes());
    }
    if (!op->scalars.empty()) store(op->type, scalar, 0, op->scalars[me]);
  }

  void check() {
    const size_t e = elementBytes();
    const uint64_t written = writesRecv() ? recvCount() : 0;
    if (writesRecv()) findings->hash(op->id, hashBytes(recv, written * e));
    checkUntouched(written * e);
    checkSource();
    const std::string error = checkOutput();
    if (!error.empty()) complain(error);
    // The next step fills the region anew; whoever still reads this one must not find good data.
    memset(region, 0xee, region_bytes);
  }

 private:
  void complain(const std::string& text) { findings->error(describeOp(*program, *op) + ": " + text); }

  void checkUntouched(size_t written_bytes) {
    const size_t e = elementBytes();
    const char* send_end = send + sendCount() * e;
    const char* recv_end = recv + written_bytes;
    const bool scalar_used = !op->scalars.empty();
    for (const char* at = region; at < region + region_bytes; ++at) {
      if (sends && at >= send && at < send_end) {
        at = send_end - 1;
        continue;
      }
      if (written_bytes > 0 && at >= recv && at < recv_end) {
        at = recv_end - 1;
        continue;
      }
      if (scalar_used && at >= scalar && at < scalar + e) continue;
      if (static_cast<uint8_t>(*at) == kGuardByte) continue;
      complain("wrote outside its buffer, " + std::to_string(at - recv) +
               " bytes from the start of the receive buffer, " + std::to_string(at - recv_end) +
               " from its end");
      return;
    }
  }

  void checkSource() {
    if (!sends || sendCount() == 0) return;
    const size_t e = elementBytes();
    if (!inPlace() || (op->kind == OpKind::kReduce && me != op->root)) {
      if (hashBytes(send, sendCount() * e) != source_hash) complain("changed its source");
      return;
    }
    if (op->kind != OpKind::kReduceScatter && op->kind != OpKind::kScatter) return;
    // In place, they own their own part of the buffer and no other.
    std::vector<char> before(sendCount() * e);
    generate(op->profile, op->type, dataKey(*program, *op, me), sendCount(), before.data());
    const size_t part = op->count * e;
    for (int k = 0; k < memberCount(); ++k) {
      if (k != me && memcmp(send + k * part, before.data() + k * part, part) != 0)
        complain("changed part " + std::to_string(k) + " of its source");
    }
  }

  std::vector<char> inputOf(int rank) const {
    const uint64_t n = sendElements(*program, *op, rank);
    std::vector<char> bytes(n * elementBytes() + 8);
    generate(op->profile, op->type, dataKey(*program, *op, rank), n, bytes.data());
    return bytes;
  }

  std::string checkOutput() {
    if (!writesRecv() || op->count == 0) return {};
    // All ranks' results are compared by their hashes; one rank compares with the oracle.
    const bool checker = op->id % memberCount() == me;
    switch (op->kind) {
      case OpKind::kSendRecv:
        return checkPart(op->root, 0, 0);
      case OpKind::kBroadcast:
        return checker ? checkPart(op->root, 0, 0) : std::string();
      case OpKind::kAlltoAll: {
        std::string error;
        for (int k = 0; k < memberCount() && error.empty(); ++k) {
          error = checkPart(k, static_cast<uint64_t>(me) * op->count, static_cast<uint64_t>(k) * op->count);
        }
        return error;
      }
      case OpKind::kAllGather:
        return checker ? checkAllGather() : std::string();
      case OpKind::kGather:
        return checkAllGather();
      case OpKind::kScatter:
        return checkPart(op->root, static_cast<uint64_t>(me) * op->count, 0);
      case OpKind::kReduceScatter:
        return checkSum(static_cast<uint64_t>(me) * op->count);
      default:
        return checker || op->kind == OpKind::kReduce ? checkSum(0) : std::string();
    }
  }

  std::string compare(const std::vector<char>& input, uint64_t from, uint64_t to, uint64_t count) const {
    const size_t e = elementBytes();
    for (uint64_t i = 0; i < count; ++i) {
      if (memcmp(input.data() + (from + i) * e, recv + (to + i) * e, e) != 0)
        return "element " + std::to_string(to + i) + " is not what was sent";
    }
    return {};
  }

  bool compressed() const { return against_library && shouldCompress(*program, *op); }

  // One part that came from `rank`: elements from `from` of its input, to `to` of the output.
  std::string checkPart(int rank, uint64_t from, uint64_t to) {
    const std::vector<char> input = inputOf(rank);
    if (!compressed()) return compare(input, from, to, op->count);
    return evidence(checkGathered(op->type, wireFormat(*program), stochastic(*program),
                                  input.data() + from * elementBytes(), op->count,
                                  recv + to * elementBytes()));
  }

  std::string checkAllGather() {
    for (int k = 0; k < memberCount(); ++k) {
      const std::string error = checkPart(k, 0, static_cast<uint64_t>(k) * op->count);
      if (!error.empty()) return "part " + std::to_string(k) + ": " + error;
    }
    return {};
  }

  std::string checkSum(uint64_t first) {
    std::vector<std::vector<char>> inputs;
    Reduction r;
    for (int k = 0; k < memberCount(); ++k) inputs.push_back(inputOf(k));
    for (const auto& input : inputs) r.inputs.push_back(input.data());
    r.type = op->type;
    r.first = first;
    r.count = op->count;
    r.scalars = op->scalars;
    r.op = op->redop == RedOp::kAvg   ? Reduction::kAvg
           : op->redop == RedOp::kMax ? Reduction::kMax
           : op->redop == RedOp::kMin ? Reduction::kMin
                                      : Reduction::kSum;
    if (compressed()) {
      r.travel =
          op->kind == OpKind::kReduceScatter || memberCount() == 2 ? Travel::kOneShot : Travel::kTwoShot;
      r.format = wireFormat(*program);
      r.stochastic = stochastic(*program);
    }
    return evidence(checkReduction(r, recv));
  }

  // Enough ordinary numbers cannot all survive the wire unrounded: a call that should have been compressed
  // was.
  std::string evidence(const Verdict& verdict) const {
    if (!verdict.error.empty()) return verdict.error;
    const bool ordinary =
        op->profile == Profile::kNormal && op->scalars.empty() && verdict.finite_elements >= 512;
    if (compressed() && ordinary && verdict.rounded == 0)
      return "should have been compressed, but no element was rounded";
    return {};
  }
};

void runFill(void* task) {
  Rank::noteWork("filled for operation", static_cast<Task*>(task)->op->id);
  static_cast<Task*>(task)->fill();
}

void runCheck(void* task) {
  Rank::noteWork("checked operation", static_cast<Task*>(task)->op->id);
  static_cast<Task*>(task)->check();
}

// How the program is to end.
enum class Ending : uint8_t { kNone, kKill, kAbort };

class RankRun {
 public:
  RankRun(Rank& rank, Program program, Ending ending, bool against_library)
      : rank_(rank), program_(std::move(program)), ending_(ending), against_library_(against_library) {}

  void run() {
    createComms();
    made_ = true;
    createStreams();
    rank_.barrier();
    if (ending_ != Ending::kNone) {
      runUntilEnded();
      return;
    }
    for (size_t i = 0; i < program_.steps.size(); ++i) runStep(static_cast<int>(i));
    for (const cudaStream_t stream : streams_) CHECK_CUDA(cudaStreamSynchronize(stream));
    Rank::note("reporting");
    rank_.report("hashes", findings_.hashes());
    for (const ncclComm_t comm : comms_) {
      if (comm == nullptr) continue;
      ncclResult_t error = ncclSuccess;
      CHECK_NCCL(ncclCommGetAsyncError(comm, &error));
      if (error != ncclSuccess)
        RANK_FAIL("asynchronous error " + std::to_string(error) + ": " + ncclGetLastError(comm));
    }
    const std::string errors = findings_.errors();
    destroyComms();
    freeStreams();
    if (!errors.empty()) RANK_FAIL("\n" + errors);
  }

 private:
  using Clock = std::chrono::steady_clock;

  // In a program whose victim dies, a failing call is what we wait for; elsewhere it is a failure.
  bool failed(ncclResult_t result, const char* what) {
    if (result == ncclSuccess || result == ncclInProgress) return false;
    if (ending_ == Ending::kNone || !made_)
      RANK_FAIL(std::string(what) + " returned " + std::to_string(result) +
                ", last error: " + ncclGetLastError(nullptr));
    noteError(result, what);
    return true;
  }

  // The first error counts. After this rank's own abort any will do: its communicators are gone.
  void noteError(ncclResult_t result, const char* what) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (over_.exchange(true)) return;
    error_ = result;
    rank_.report("error", std::string(what) + " " + std::to_string(result));
  }

  bool blocking(ncclComm_t comm) const {
    const auto found = std::find(comms_.begin(), comms_.end(), comm);
    return program_.comms[static_cast<size_t>(found - comms_.begin())].blocking;
  }

  // Waits until a non-blocking call is over, as every program has to before the next. False at an error.
  bool settled(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    for (;;) {
      if (failed(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError")) return false;
      if (state != ncclInProgress) return !failed(state, "asynchronous error");
      usleep(50);
    }
  }

  // The result of a call on a communicator.
  bool wentWell(ncclResult_t result, const char* what, ncclComm_t comm) {
    if (failed(result, what)) return false;
    if (result != ncclInProgress) return true;
    if (blocking(comm)) RANK_FAIL(std::string(what) + " is in progress on a blocking communicator");
    return settled(comm);
  }

  static ncclConfig_t config(Config wanted) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = wanted == Config::kNonBlocking ? 0 : 1;
    return config;
  }

  void createComms() {
    Rank::note("creating communicators");
    comms_.assign(program_.comms.size(), nullptr);
    std::vector<ncclUniqueId> ids(program_.creations.size());
    for (size_t i = 0; i < program_.creations.size(); ++i) {
      const Creation& creation = program_.creations[i];
      if (creation.how == CommHow::kId)
        ids[i] = halfwire::testing::shareId(rank_, program_.comms[creation.comms[0]].members[0]);
    }
    if (program_.create_grouped) CHECK_NCCL(ncclGroupStart());
    for (size_t i = 0; i < program_.creations.size(); ++i) {
      const Creation& creation = program_.creations[i];
      Rank::note("creating communicators, creation", static_cast<long>(i));
      if (creation.how == CommHow::kSplit) {
        split(creation);
        continue;
      }
      const int comm = creation.comms[0];
      const int me = program_.rankIn(comm, rank_.rank());
      if (me < 0) continue;
      const int members = static_cast<int>(program_.comms[comm].members.size());
      ncclConfig_t wanted = config(creation.config);
      const ncclResult_t result = creation.config == Config::kNone
                                      ? ncclCommInitRank(&comms_[comm], members, ids[i], me)
                                      : ncclCommInitRankConfig(&comms_[comm], members, ids[i], me, &wanted);
      if (program_.create_grouped) {
        RANK_CHECK(!failed(result, "making a communicator in a group"));
      } else {
        RANK_CHECK(wentWell(result, "making a communicator", comms_[comm]));
      }
    }
    if (program_.create_grouped) {
      const ncclResult_t result = ncclGroupEnd();
      for (const ncclComm_t comm : comms_) {
        if (comm != nullptr) RANK_CHECK(wentWell(result, "the group that makes communicators", comm));
      }
    }
    for (size_t c = 0; c < comms_.size(); ++c) {
      const int me = program_.rankIn(static_cast<int>(c), rank_.rank());
      RANK_CHECK((me >= 0) == (comms_[c] != nullptr));
      if (me < 0) continue;
      int count = 0, user_rank = -1;
      CHECK_NCCL(ncclCommCount(comms_[c], &count));
      CHECK_NCCL(ncclCommUserRank(comms_[c], &user_rank));
      RANK_CHECK(count == static_cast<int>(program_.comms[c].members.size()) && user_rank == me);
    }
  }

  void split(const Creation& creation) {
    ncclComm_t made = nullptr;
    ncclConfig_t wanted = config(creation.config);
    const ncclResult_t result =
        ncclCommSplit(comms_[0], creation.color[rank_.rank()], creation.key[rank_.rank()], &made,
                      creation.config == Config::kNone ? nullptr : &wanted);
    RANK_CHECK(wentWell(result, "ncclCommSplit", comms_[0]));
    for (const int comm : creation.comms) {
      if (program_.rankIn(comm, rank_.rank()) >= 0) comms_[comm] = made;
    }
    RANK_CHECK((creation.color[rank_.rank()] == NCCL_SPLIT_NOCOLOR) == (made == nullptr));
  }

  void createStreams() {
    streams_.assign(program_.streams, nullptr);
    std::vector<size_t> needed(program_.streams, 64);
    for (const Step& step : program_.steps) {
      std::vector<size_t> bytes(program_.streams, 64);
      const RankStep& mine = step.ranks[rank_.rank()];
      for (size_t i = 0; i < mine.order.size(); ++i) {
        const Task task = makeTask(mine, i);
        bytes[task.op->placements[task.me].stream] += roundUp(task.regionNeeded(), 256);
      }
      for (int s = 0; s < program_.streams; ++s) needed[s] = std::max(needed[s], bytes[s]);
    }
    arenas_.assign(program_.streams, nullptr);
    for (int s = 0; s < program_.streams; ++s) {
      // Some programs use the legacy default stream.
      const bool legacy = s == 0 && program_.seed % 5 == 0;
      if (!legacy)
        CHECK_CUDA(cudaStreamCreateWithFlags(
            &streams_[s], program_.seed % 3 == 0 ? cudaStreamDefault : cudaStreamNonBlocking));
      void* memory = nullptr;
      CHECK_CUDA(cudaMalloc(&memory, needed[s]));
      arenas_[s] = static_cast<char*>(memory);
    }
  }

  Task makeTask(const RankStep& step, size_t position) {
    Task task;
    task.program = &program_;
    task.op = &program_.ops[step.order[position]];
    task.findings = &findings_;
    task.me = program_.rankIn(task.op->comm, rank_.rank());
    task.against_library = against_library_;
    if (task.op->kind == OpKind::kSendRecv) {
      task.sends = step.sends[position];
      task.receives = !task.sends;
    }
    const bool root = task.me == task.op->root;
    if (task.op->kind == OpKind::kBroadcast || task.op->kind == OpKind::kScatter) task.sends = root;
    if (task.op->kind == OpKind::kGather) task.receives = root;
    return task;
  }

  // False when an error has been seen.
  bool runStep(int number) {
    const RankStep& step = program_.steps[number].ranks[rank_.rank()];
    Rank::note("step", number);
    if (step.delay_us > 0) usleep(static_cast<useconds_t>(step.delay_us));
    std::vector<size_t> used(program_.streams, 0);
    std::vector<Task*> tasks;
    for (size_t i = 0; i < step.order.size(); ++i) {
      tasks_.push_back(std::make_unique<Task>(makeTask(step, i)));
      Task& task = *tasks_.back();
      const int stream = task.op->placements[task.me].stream;
      const size_t bytes = task.regionNeeded();
      task.place(arenas_[stream] + used[stream], bytes);
      used[stream] += roundUp(bytes, 256);
      tasks.push_back(&task);
    }
    const bool ok = step.grouped ? callGrouped(step, tasks) : callOneByOne(tasks);
    return ok && synchronise(step);
  }

  bool callOneByOne(const std::vector<Task*>& tasks) {
    for (Task* task : tasks) {
      fill(task);
      if (!call(*task)) return false;
      check(task);
    }
    return true;
  }

  bool callGrouped(const RankStep& step, const std::vector<Task*>& tasks) {
    for (Task* task : tasks) fill(task);
    for (int i = 0; i < step.nesting; ++i) {
      if (failed(ncclGroupStart(), "ncclGroupStart")) return false;
    }
    bool ok = true;
    for (size_t i = 0; i < tasks.size(); ++i) {
      const bool inner = static_cast<int>(i) == step.inner_at;
      if (inner) ok = !failed(ncclGroupStart(), "ncclGroupStart") && ok;
      ok = call(*tasks[i]) && ok;
      if (inner) ok = !failed(ncclGroupEnd(), "ncclGroupEnd (nested)") && ok;
    }
    ncclResult_t end = ncclSuccess;
    for (int i = 0; i < step.nesting; ++i) {
      end = ncclGroupEnd();
      ok = !failed(end, "ncclGroupEnd") && ok;
    }
    if (!ok) return false;
    // Only communicators of one kind share a group.
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (!wentWell(end, "ncclGroupEnd", comms_[tasks[i]->op->comm])) return false;
    }
    for (Task* task : tasks) check(task);
    return true;
  }

  cudaStream_t streamOf(const Task& task) { return streams_[task.op->placements[task.me].stream]; }

  void fill(Task* task) { CHECK_CUDA(cudaLaunchHostFunc(streamOf(*task), runFill, task)); }
  void check(Task* task) {
    if (ending_ == Ending::kNone) CHECK_CUDA(cudaLaunchHostFunc(streamOf(*task), runCheck, task));
  }

  bool call(Task& task) {
    const Op& op = *task.op;
    const ncclComm_t comm = comms_[op.comm];
    const cudaStream_t stream = streamOf(task);
    const Placement& p = op.placements[task.me];
    ncclRedOp_t redop = op.redop == RedOp::kSum   ? ncclSum
                        : op.redop == RedOp::kAvg ? ncclAvg
                        : op.redop == RedOp::kMax ? ncclMax
                                                  : ncclMin;
    char immediate[8] = {};
    if (op.redop == RedOp::kPreMul) {
      store(op.type, immediate, 0, op.scalars[task.me]);
      void* scalar = p.device_scalar ? static_cast<void*>(task.scalar) : immediate;
      if (failed(ncclRedOpCreatePreMulSum(&redop, scalar, op.type,
                                          p.device_scalar ? ncclScalarDevice : ncclScalarHostImmediate, comm),
                 "ncclRedOpCreatePreMulSum")) {
        return false;
      }
      memset(immediate, 0xff, sizeof immediate);
    }
    ncclResult_t result = ncclSuccess;
    switch (op.kind) {
      case OpKind::kAllReduce:
        result = ncclAllReduce(task.send, task.recv, op.count, op.type, redop, comm, stream);
        break;
      case OpKind::kReduceScatter:
        result = ncclReduceScatter(task.send, task.recv, op.count, op.type, redop, comm, stream);
        break;
      case OpKind::kAllGather:
        result = ncclAllGather(task.send, task.recv, op.count, op.type, comm, stream);
        break;
      case OpKind::kBroadcast:
        result = p.old_name ? ncclBcast(task.recv, op.count, op.type, op.root, comm, stream)
                            : ncclBroadcast(p.null_send ? nullptr : task.send, task.recv, op.count, op.type,
                                            op.root, comm, stream);
        break;
      case OpKind::kReduce:
        result = ncclReduce(task.send, p.null_recv ? nullptr : task.recv, op.count, op.type, redop, op.root,
                            comm, stream);
        break;
      case OpKind::kAlltoAll:
        result = ncclAlltoAll(task.send, task.recv, op.count, op.type, comm, stream);
        break;
      case OpKind::kGather:
        result = ncclGather(task.send, p.null_recv ? nullptr : task.recv, op.count, op.type, op.root, comm,
                            stream);
        break;
      case OpKind::kScatter:
        result = ncclScatter(p.null_send ? nullptr : task.send, task.recv, op.count, op.type, op.root, comm,
                             stream);
        break;
      case OpKind::kSendRecv:
        result = task.sends ? ncclSend(task.send, op.count, op.type, op.peer, comm, stream)
                            : ncclRecv(task.recv, op.count, op.type, op.root, comm, stream);
        break;
    }
    if (op.redop == RedOp::kPreMul) {
      const ncclResult_t destroyed = ncclRedOpDestroy(redop, comm);
      if (result == ncclSuccess && failed(destroyed, "ncclRedOpDestroy")) return false;
    }
    return wentWell(result, opKindName(op.kind), comm);
  }

  bool synchronise(const RankStep& step) {
    if (step.sync == 3) {
      cudaEvent_t event = nullptr;
      CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      CHECK_CUDA(cudaEventRecord(event, streams_[step.sync_stream]));
      CHECK_CUDA(cudaStreamWaitEvent(streams_[step.wait_stream], event, 0));
      CHECK_CUDA(cudaEventDestroy(event));
      return true;
    }
    for (int s = 0; s < program_.streams; ++s) {
      if (step.sync == 0 || (step.sync == 1 && s != step.sync_stream)) continue;
      if (ending_ != Ending::kNone && !hasWatchdog()) {
        if (!waitPolling(streams_[s])) return false;
      } else {
        CHECK_CUDA(cudaStreamSynchronize(streams_[s]));
      }
    }
    return true;
  }

  // Nobody blocks in the runtime while a communicator may have failed and nobody else looks for it.
  bool waitPolling(cudaStream_t stream) {
    for (;;) {
      if (asyncError()) return false;
      const cudaError_t state = cudaStreamQuery(stream);
      if (state == cudaSuccess) return true;
      if (state != cudaErrorNotReady) RANK_FAIL("cudaStreamQuery returned " + std::to_string(state));
      usleep(300);
    }
  }

  // True after an error, which is noted.
  bool asyncError() {
    for (const ncclComm_t comm : comms_) {
      if (comm == nullptr) continue;
      ncclResult_t error = ncclSuccess;
      if (failed(ncclCommGetAsyncError(comm, &error), "ncclCommGetAsyncError")) return true;
      if (failed(error, "asynchronous error")) return true;
    }
    return false;
  }

  bool isVictim() const { return rank_.rank() == program_.victim; }
  bool aborts() const { return ending_ == Ending::kAbort && isVictim(); }
  bool hasWatchdog() const { return aborts() || program_.has_watchdog[rank_.rank()]; }

  // Aborts everything, as a watchdog or its main thread does. It must not block, whatever the other threads
  // do.
  void abortAll() {
    for (const int i : program_.abort_order) {
      if (comms_[i] == nullptr) continue;
      const auto start = Clock::now();
      const ncclResult_t result = ncclCommAbort(comms_[i]);
      if (result != ncclSuccess) RANK_FAIL("ncclCommAbort returned " + std::to_string(result));
      if (seconds(start) > 5) RANK_FAIL("ncclCommAbort took " + std::to_string(seconds(start)) + " s");
    }
  }

  static double seconds(Clock::time_point since) {
    return std::chrono::duration<double>(Clock::now() - since).count();
  }

  // The second thread of the rank that aborts: does so while the first is wherever it is.
  void abortWhenDue() {
    const auto start = Clock::now();
    if (program_.end_timed) {
      usleep(static_cast<useconds_t>(program_.end_after_s * 1e6));
    } else {
      while (steps_begun_ <= program_.end_step && seconds(start) < 30) usleep(50);
      usleep(static_cast<useconds_t>(program_.abort_after_us));
    }
    {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      rank_.report("aborted", "");
      over_ = true;
    }
    abortAll();
  }

  // The second thread of the others, as PyTorch's watchdog: looks for errors and aborts.
  void watch() {
    while (!asyncError()) usleep(1000);
    abortAll();
  }

  // Runs the program again and again. The victim ends in it, or aborts; the others have to notice.
  void runUntilEnded() {
    rank_.report("ready", "");
    std::thread second;
    if (hasWatchdog()) second = std::thread([this] { aborts() ? abortWhenDue() : watch(); });
    const bool killed = ending_ == Ending::kKill && isVictim() && !program_.end_timed;
    int step = 0;
    while (!over_) {
      for (size_t i = 0; i < program_.steps.size() && !over_; ++i, ++step) {
        const bool mine = killed && step == program_.end_step;
        if (mine && !program_.end_after_call) raise(SIGKILL);
        if (!program_.end_after_call) steps_begun_ = step + 1;
        if (!runStep(static_cast<int>(i))) break;
        if (mine) raise(SIGKILL);
        steps_begun_ = step + 1;
        if (!hasWatchdog() && asyncError()) break;
      }
      for (const cudaStream_t stream : streams_) {
        if (over_) break;
        if (hasWatchdog()) {
          CHECK_CUDA(cudaStreamSynchronize(stream));
        } else {
          waitPolling(stream);
        }
      }
    }
    Rank::note("ending after error", error_);
    if (second.joinable()) {
      second.join();
    } else {
      abortAll();
    }
    if (!aborts() && error_ != ncclRemoteError)
      RANK_FAIL("the error is " + std::to_string(error_) + ", not ncclRemoteError");
    // Nothing is left on the streams that could wait for others.
    Rank::note("waiting for the streams");
    for (const cudaStream_t stream : streams_) CHECK_CUDA(cudaStreamSynchronize(stream));
    freeStreams();
    // That a process ends would tell the others too: it is the abort that has to.
    Rank::note("waiting for the others to abort");
    if (ending_ == Ending::kAbort) rank_.barrier();
    Rank::note("leaving");
  }

  void destroyComms() {
    Rank::note("destroying");
    const bool finalize = program_.seed % 2 == 0;
    for (size_t i = comms_.size(); i-- > 0;) {
      if (comms_[i] == nullptr) continue;
      if (finalize || !program_.comms[i].blocking)
        RANK_CHECK(wentWell(ncclCommFinalize(comms_[i]), "ncclCommFinalize", comms_[i]));
      CHECK_NCCL(ncclCommDestroy(comms_[i]));
    }
  }

  void freeStreams() {
    for (int s = 0; s < program_.streams; ++s) {
      CHECK_CUDA(cudaFree(arenas_[s]));
      if (streams_[s] != nullptr) CHECK_CUDA(cudaStreamDestroy(streams_[s]));
    }
  }

  Rank& rank_;
  const Program program_;
  const Ending ending_;
  const bool against_library_;
  std::vector<ncclComm_t> comms_;
  std::vector<cudaStream_t> streams_;
  std::vector<char*> arenas_;
  std::vector<std::unique_ptr<Task>> tasks_;
  Findings findings_;
  bool made_ = false;  // the communicators: nobody is killed or aborts before
  std::atomic<int> steps_begun_{0};
  std::mutex error_mutex_;         // guards the channel to the parent too
  std::atomic<bool> over_{false};  // an error was seen, or this rank has aborted
  ncclResult_t error_ = ncclSuccess;
};

// Arguments: seed, ranks as asked for (0 for any), "kill", "abort" or "run", "library" or "bare", "any" or
// "same" order.
RANK_PROGRAM(Soak) {
  GenerateOptions options;
  options.ranks = std::stoi(rank.args().at(1));
  options.any_order = rank.args().at(4) == "any";
  Program program = generateProgram(std::stoull(rank.args().at(0)), options);
  // What --set changed.
  for (auto& [name, value] : program.settings) {
    if (const char* set = std::getenv(name.c_str())) value = set;
  }
  const std::string& how = rank.args().at(2);
  const Ending ending = how == "kill" ? Ending::kKill : how == "abort" ? Ending::kAbort : Ending::kNone;
  // Never freed: after an error, streams may still hold work that refers to it.
  static RankRun* run = new RankRun(rank, std::move(program), ending, rank.args().at(3) == "library");
  run->run();
}

}  // namespace
}  // namespace halfwire::soak
