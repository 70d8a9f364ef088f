#include "hostccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "hostccl/sigpipe_guard.h"
#include "hostrt/hostrt.h"

namespace halfwire::hostccl {
namespace {

constexpr auto kLeaveLimit = std::chrono::seconds(5);
constexpr uint64_t kSplitSlot = uint64_t{1} << 24;  // plus four per split

const HalfwireHostEngine& engine() { return *halfwire_hostrt_engine(); }

Outcome cudaOutcome(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const ncclResult_t code =
      error == cudaErrorInvalidResourceHandle ? ncclInvalidArgument : ncclUnhandledCudaError;
  return {code, std::string(what) + ": " + cudaGetErrorString(error)};
}

// One byte to and from everybody, on the calling thread.
bool barrier(Mesh& mesh, uint64_t slot) {
  const char out = 1;
  std::vector<char> in(static_cast<size_t>(mesh.size()));
  std::vector<std::unique_ptr<Message>> messages;
  for (int p = 0; p < mesh.size(); ++p) {
    if (p == mesh.rank()) continue;
    messages.push_back(mesh.receive(p, slot, &in[static_cast<size_t>(p)], 1));
    if (messages.back()) messages.push_back(mesh.send(p, slot, &out, 1));
    if (!messages.back()) return false;
  }
  return std::all_of(messages.begin(), messages.end(), [](const auto& m) { return m->wait(); });
}

Token deriveToken(const Token& parent, uint64_t split, int color) {
  Token token{};
  std::array<uint8_t, 13> text{};
  std::memcpy(text.data(), &split, 8);
  std::memcpy(text.data() + 8, &color, 4);
  for (int half = 0; half < 2; ++half) {
    text[12] = static_cast<uint8_t>(half);
    const Digest digest = keyedDigest(parent, 'D', text);
    std::copy(digest.begin(), digest.end(), token.begin() + half * 16);
  }
  return token;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  engine().getDevice(&old_);
  if (old_ != device) engine().setDevice(device);
}

DeviceGuard::~DeviceGuard() { engine().setDevice(old_); }

struct Communicator::Job {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Mesh> mesh;
  std::vector<CollectiveCall> collectives;
  std::vector<PointToPoint> messages;
};

Communicator::~Communicator() {
  if (tail_ != nullptr) engine().eventDestroy(tail_);
}

Outcome Communicator::connect(const Identity& identity) {
  if (Outcome o = Service::get(&service_); !o.ok()) return o;
  Link* link = nullptr;
  if (Outcome o = Link::ofDevice(device_, &link); !o.ok()) return o;
  halfwire_hostrt_set_rank(rank_);
  const uint64_t number = identity.number();
  service_->expect(number, identity.token, rank_, size_);
  Member self;
  self.rank = static_cast<uint32_t>(rank_);
  self.size = static_cast<uint32_t>(size_);
  self.device = static_cast<uint32_t>(device_);
  self.paced = link != nullptr ? 1 : 0;
  std::vector<Member> members;
  Outcome outcome = service_->join(identity, self, cancelled_, &members);
  if (outcome.ok()) outcome = meet(identity.token, number, members, cancelled_);
  service_->forget(number, rank_);
  return outcome;
}

// Connects with all members, once each of them expects visitors.
Outcome Communicator::meet(const Token& token, uint64_t number, const std::vector<Member>& members,
                           const Cancel& cancel) {
  for (size_t i = 0; i < members.size(); ++i) {
    if (members.size() != static_cast<size_t>(size_) || members[i].rank != i) {
      return {ncclSystemError, "the table of members is malformed: all ranks must run the same version"};
    }
    if (members[i].paced != members[0].paced) {
      return {ncclInvalidUsage, "HALFWIRE_HOST_LINK must be set on all ranks or on none"};
    }
  }
  for (const Member& a : members) {
    for (const Member& b : members) {
      if (a.rank < b.rank && a.process == b.process && a.device == b.device) {
        return {ncclInvalidUsage, "ranks " + std::to_string(a.rank) + " and " + std::to_string(b.rank) +
                                      " use the same device of one process: call cudaSetDevice before each "
                                      "ncclCommInitRank"};
      }
    }
  }
  Link* link = nullptr;
  if (Outcome o = Link::ofDevice(device_, &link); !o.ok()) return o;
  const SigpipeGuard guard;
  std::vector<int> fds;
  if (Outcome o = service_->connectAll(number, token, rank_, members, cancel, &fds); !o.ok()) return o;
  std::shared_ptr<Mesh> mesh;
  if (Outcome o = Mesh::create(service_, rank_, fds, link, &mesh); !o.ok()) return o;
  {
    std::lock_guard lock(mutex_);
    mesh_ = mesh;
  }
  // Whoever aborts from here on finds the mesh; who did before has found none.
  if (cancel) mesh->fail({ncclRemoteError, "the communicator was aborted"});
  if (!barrier(*mesh, kSplitSlot)) {
    // A rank that is through may already have used and left the communicator: that is not our failure to
    // report later.
    return mesh->error();
  }
  const DeviceGuard device(device_);
  std::lock_guard lock(mutex_);
  if (tail_ == nullptr) {
    if (Outcome o = cudaOutcome(engine().eventCreate(&tail_, cudaEventDisableTiming), "cannot make an event");
        !o.ok()) {
      return o;
    }
  }
  token_ = token;
  number_ = number;
  members_ = members;
  connected_ = true;
  return {};
}

Outcome Communicator::split(int color, int key, bool blocking, std::shared_ptr<Communicator>* child) {
  struct Wish {
    int32_t color, key;
  };
  std::shared_ptr<Mesh> mesh;
  uint64_t round = 0;
  {
    std::lock_guard lock(mutex_);
    mesh = mesh_;
    round = ++splits_;
  }
  if (Outcome o = mesh->error(); !o.ok()) return o;
  const SigpipeGuard guard;
  const uint64_t slot = kSplitSlot + round * 4;
  std::vector<Wish> wishes(static_cast<size_t>(size_));
  const Wish mine{color, key};
  wishes[static_cast<size_t>(rank_)] = mine;
  {
    std::vector<std::unique_ptr<Message>> messages;
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      messages.push_back(mesh->receive(p, slot, &wishes[static_cast<size_t>(p)], sizeof(Wish)));
      if (messages.back()) messages.push_back(mesh->send(p, slot, &mine, sizeof(Wish)));
      if (!messages.back()) return mesh->error();
    }
    for (const auto& message : messages) {
      if (!message->wait()) return mesh->error();
    }
  }
  // Ranks of the child: by key, then by rank here.
  std::vector<int> order;
  for (int p = 0; p < size_; ++p) {
    if (color >= 0 && wishes[static_cast<size_t>(p)].color == color) order.push_back(p);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return wishes[static_cast<size_t>(a)].key < wishes[static_cast<size_t>(b)].key;
  });
  const auto self = std::find(order.begin(), order.end(), rank_) - order.begin();
  const Token token = deriveToken(token_, round, color);
  Identity identity;
  identity.token = token;
  const uint64_t number = identity.number();
  if (color >= 0) service_->expect(number, token, static_cast<int>(self), static_cast<int>(order.size()));
  if (!barrier(*mesh, slot + 1)) {
    if (color >= 0) service_->forget(number, static_cast<int>(self));
    return mesh->error();
  }
  if (color < 0) return {};
  std::vector<Member> members;
  for (size_t i = 0; i < order.size(); ++i) {
    Member member = members_[static_cast<size_t>(order[i])];
    member.rank = static_cast<uint32_t>(i);
    member.size = static_cast<uint32_t>(order.size());
    members.push_back(member);
  }
  auto made = std::make_shared<Communicator>(static_cast<int>(self), static_cast<int>(order.size()), device_,
                                             blocking);
  made->service_ = service_;
  Outcome outcome = made->meet(token, number, members, cancelled_);
  service_->forget(number, static_cast<int>(self));
  if (outcome.ok()) *child = std::move(made);
  return outcome;
}

Outcome Communicator::launch(cudaStream_t stream, std::vector<CollectiveCall> collectives,
                             std::vector<PointToPoint> messages) {
  auto* job = new Job{shared_from_this(), nullptr, std::move(collectives), std::move(messages)};
  {
    std::lock_guard lock(mutex_);
    job->mesh = mesh_;
    for (CollectiveCall& call : job->collectives) call.sequence = ++sequence_;
    ++queued_;
  }
  const auto body = [](void* argument) {
    std::unique_ptr<Job> job(static_cast<Job*>(argument));
    // After an error queued work only drains.
    try {
      for (const CollectiveCall& call : job->collectives) {
        if (job->mesh->error().ok()) run(*job->mesh, call);
      }
      if (!job->messages.empty() && job->mesh->error().ok()) run(*job->mesh, job->messages);
    } catch (const std::exception& e) {
      job->mesh->fail({ncclSystemError, std::string("an operation failed: ") + e.what()});
    }
    Communicator& communicator = *job->communicator;
    Service* const service = communicator.service_;
    {
      std::lock_guard lock(communicator.mutex_);
      --communicator.queued_;
      communicator.idle_.notify_all();
    }
    // A communicator destroys its event, which a host function must not do: the last one to know it passes it
    // on.
    if (job->communicator.use_count() == 1) service->post([last = std::move(job->communicator)] {});
  };
  const cudaError_t error = engine().launchHostFunc(stream, body, job);
  if (error == cudaSuccess) return {};
  delete job;
  std::lock_guard lock(mutex_);
  --queued_;
  return cudaOutcome(error, "the stream does not take work");
}

Outcome Communicator::join(const Batch& batch) {
  const DeviceGuard guard(device_);
  const cudaStream_t first = batch.streams.front();
  if (Outcome o = cudaOutcome(engine().streamWaitEvent(first, tail_, 0), "stream"); !o.ok()) return o;
  for (size_t i = 1; i < batch.streams.size(); ++i) {
    cudaEvent_t event = nullptr;
    if (Outcome o = cudaOutcome(engine().eventCreate(&event, cudaEventDisableTiming), "event"); !o.ok())
      return o;
    cudaError_t error = engine().eventRecord(event, batch.streams[i]);
    if (error == cudaSuccess) error = engine().streamWaitEvent(first, event, 0);
    engine().eventDestroy(event);
    if (Outcome o = cudaOutcome(error, "stream"); !o.ok()) return o;
  }
  return {};
}

Outcome Communicator::launchCollectives(const Batch& batch) {
  if (batch.collectives.empty()) return {};
  const DeviceGuard guard(device_);
  return launch(batch.streams.front(), batch.collectives, {});
}

Outcome Communicator::launchMessages(const Batch& batch) {
  if (batch.messages.empty()) return {};
  const DeviceGuard guard(device_);
  return launch(batch.streams.front(), {}, batch.messages);
}

Outcome Communicator::fork(const Batch& batch) {
  const DeviceGuard guard(device_);
  cudaError_t error = engine().eventRecord(tail_, batch.streams.front());
  for (size_t i = 1; i < batch.streams.size() && error == cudaSuccess; ++i) {
    error = engine().streamWaitEvent(batch.streams[i], tail_, 0);
  }
  return cudaOutcome(error, "stream");
}

Outcome Communicator::createOperator(const Reduction& reduction, ncclDataType_t type, ncclRedOp_t* op) {
  std::lock_guard lock(mutex_);
  auto slot = std::find_if(operators_.begin(), operators_.end(), [](const Operator& o) { return !o.used; });
  if (slot == operators_.end()) slot = operators_.insert(operators_.end(), Operator{});
  *slot = {true, type, reduction};
  *op = static_cast<ncclRedOp_t>(ncclNumOps + (slot - operators_.begin()));
  return {};
}

Outcome Communicator::destroyOperator(ncclRedOp_t op) {
  std::lock_guard lock(mutex_);
  const auto index = static_cast<size_t>(op) - ncclNumOps;
  if (op < ncclNumOps || index >= operators_.size() || !operators_[index].used) {
    return {ncclInvalidArgument, "ncclRedOpDestroy: this communicator has no such operator"};
  }
  operators_[index].used = false;
  return {};
}

Outcome Communicator::findOperator(ncclRedOp_t op, ncclDataType_t type, Reduction* out) {
  using Op = halfwire::hostccl::Operator;
  const bool floating =
      type == ncclFloat16 || type == ncclFloat32 || type == ncclFloat64 || type == ncclBfloat16;
  switch (op) {
    case ncclSum:
      *out = {Op::kSum};
      return {};
    case ncclProd:
      *out = {Op::kProd};
      return {};
    case ncclMax:
      *out = {Op::kMax};
      return {};
    case ncclMin:
      *out = {Op::kMin};
      return {};
    case ncclAvg:
      *out = {Op::kSumDivide};
      // Equal on all ranks, so nobody needs to be told.
      if (floating) *out = {Op::kPreMulSum, averageFactor(type, size_), nullptr, true};
      return {};
    default:
      break;
  }
  std::lock_guard lock(mutex_);
  const auto index = static_cast<size_t>(op) - ncclNumOps;
  if (op < 0 || index >= operators_.size() || !operators_[index].used) {
    return {ncclInvalidArgument, "the reduction operator was destroyed or belongs to another communicator"};
  }
  if (operators_[index].type != type) {
    return {ncclInvalidArgument, "the reduction operator was made for another data type"};
  }
  *out = operators_[index].reduction;
  return {};
}

void Communicator::finalize() {
  if (finalized_.exchange(true)) return;
  std::shared_ptr<Mesh> mesh;
  {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return queued_ == 0; });
    mesh = mesh_;
  }
  if (mesh) mesh->leave(kLeaveLimit);
}

void Communicator::abort() {
  cancelled_ = true;
  finalized_ = true;
  std::shared_ptr<Mesh> mesh;
  {
    std::lock_guard lock(mutex_);
    mesh = mesh_;
  }
  if (mesh) mesh->fail({ncclRemoteError, "the communicator was aborted"});
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return in_progress_ == 0; });
}

void Communicator::begin() {
  std::lock_guard lock(mutex_);
  ++in_progress_;
}

void Communicator::finish(const Outcome& outcome) {
  std::lock_guard lock(mutex_);
  --in_progress_;
  if (!outcome.ok() && failure_.ok()) failure_ = outcome;
  idle_.notify_all();
}

Outcome Communicator::asyncError() {
  std::shared_ptr<Mesh> mesh;
  {
    std::lock_guard lock(mutex_);
    if (in_progress_ > 0) return {ncclInProgress, "a call on the communicator is still in progress"};
    if (!failure_.ok()) return failure_;
    mesh = mesh_;
  }
  return mesh ? mesh->error() : Outcome{};
}

}  // namespace halfwire::hostccl
