#include "soak/program.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "abi/nccl_types.h"
#include "base/units.h"
#include "policy/policy.h"
#include "soak/random.h"

namespace halfwire::soak {
namespace {

constexpr uint64_t kLargest = 1u << 20;  // elements of one message
constexpr uint64_t kBudget = 6u << 20;   // elements of a program, all ranks' buffers together
constexpr ncclDataType_t kTypes[] = {ncclBfloat16, ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat16,
                                     ncclFloat32,  ncclFloat32,  ncclInt32,    ncclInt8,    ncclFloat64};

class Generator {
 public:
  Generator(uint64_t seed, const GenerateOptions& options) : options_(options), random_(mix(seed, 0x50a4)) {
    program_.seed = seed;
    program_.ranks = options.ranks > 0 ? options.ranks : static_cast<int>(random_.between(2, 5));
  }

  Program run() {
    makeSettings();
    makeCommunicators();
    const int steps = static_cast<int>(random_.between(5, 14));
    for (int i = 0; i < steps; ++i) makeStep();
    program_.victim = static_cast<int>(random_.between(0, program_.ranks - 1));
    program_.aborts = random_.chance(60);
    program_.end_step = static_cast<int>(random_.between(0, steps * 2 - 1));
    program_.end_after_call = random_.chance(60);
    program_.end_timed = random_.chance(50);
    program_.end_after_s = random_.uniform() * 0.6;
    program_.abort_after_us = random_.chance(40) ? 0 : static_cast<int>(random_.between(0, 5000));
    for (size_t i = 0; i < program_.comms.size(); ++i) program_.abort_order.push_back(static_cast<int>(i));
    random_.shuffle(&program_.abort_order);
    for (int i = 0; i < program_.ranks; ++i) program_.has_watchdog.push_back(random_.chance(65));
    return std::move(program_);
  }

 private:
  void makeSettings() {
    auto& s = program_.settings;
    s["HALFWIRE_MODE"] = "wire";
    s["HALFWIRE_COMMS"] = "all";
    s["HALFWIRE_FORMAT"] = random_.pick<std::string>({"e4m3", "e3m4", "e5m2", "int8"});
    s["HALFWIRE_BLOCK"] = random_.pick<std::string>({"32", "64", "128", "128", "256"});
    s["HALFWIRE_SCALE"] = random_.pick<std::string>({"fp32", "e8m0"});
    s["HALFWIRE_MIN_BYTES"] = random_.pick<std::string>({"0", "0", "0", "1KiB", "64KiB"});
    s["HALFWIRE_CHUNK_BYTES"] =
        random_.pick<std::string>({"1KiB", "4KiB", "16KiB", "64KiB", "1MiB", "32MiB"});
    s["HALFWIRE_OVERLAP"] = random_.pick<std::string>({"auto", "auto", "off"});
    s["HALFWIRE_ROUNDING"] = program_.seed % 4 == 3 ? "stochastic" : "nearest";
    s["HALFWIRE_OPS"] = pickOps();
    const std::string delay = random_.pick<std::string>({"", "", "100", "1000", "3000"});
    if (!delay.empty()) {
      s["HALFWIRE_HOST_DELAY_US"] = delay;
      s["HALFWIRE_HOST_SEED"] = std::to_string(random_.between(1, 1000));
    }
    program_.streams = random_.chance(40) ? 1 : static_cast<int>(random_.between(2, 3));
    // With one stream the order of all work is the program's own: any number of hardware queues has to do.
    if (program_.streams == 1 && random_.chance(50))
      s["HALFWIRE_HOST_HW_QUEUES"] = std::to_string(random_.between(1, 4));
  }

  // What users ask for, everything, or anything.
  std::string pickOps() {
    const int what = static_cast<int>(random_.between(0, 99));
    if (what < 35) {
      return random_.pick<std::string>({"allreduce,reducescatter", "allreduce,reducescatter,allgather",
                                        "allreduce,reducescatter,allgather-fp32", "reducescatter"});
    }
    std::string ops;
    for (const char* name : {"sendrecv", "allreduce", "reducescatter", "reduce", "allgather", "broadcast",
                             "alltoall", "gather", "scatter"}) {
      if (what < 65 && random_.chance(50)) continue;
      const bool sums = std::string(name).find("reduce") != std::string::npos;
      ops += (ops.empty() ? "" : ",") + std::string(name) + (!sums && random_.chance(60) ? "-fp32" : "");
    }
    return ops.empty() ? "alltoall" : ops;
  }

  void makeCommunicators() {
    std::vector<int> all(program_.ranks);
    for (int i = 0; i < program_.ranks; ++i) all[i] = i;
    std::vector<int> world = all;
    if (random_.chance(50)) random_.shuffle(&world);
    // No communicator is non-blocking, all are, or some.
    const int what = static_cast<int>(random_.between(0, 99));
    non_blocking_percent_ = what < 75 ? 0 : what < 90 ? 100 : 50;
    addById(world);
    if (random_.chance(35)) return;
    if (random_.chance(50)) {
      // A second id: everyone or a part of the job, in another order.
      random_.shuffle(&all);
      all.resize(static_cast<size_t>(random_.between(2, program_.ranks)));
      addById(all);
      program_.create_grouped =
          random_.chance(40) && program_.comms[0].blocking == program_.comms[1].blocking;
      return;
    }
    Creation split;
    split.how = CommHow::kSplit;
    split.config = random_.chance(40) ? Config::kNone : pickConfig();
    const bool blocking =
        split.config == Config::kNone ? program_.comms[0].blocking : split.config == Config::kBlocking;
    const int colors = static_cast<int>(random_.between(1, 2));
    std::vector<std::vector<std::pair<std::pair<int, int>, int>>> members(colors);
    for (int rank = 0; rank < program_.ranks; ++rank) {
      const bool out = random_.chance(12);
      split.color.push_back(out ? NCCL_SPLIT_NOCOLOR : static_cast<int>(random_.between(0, colors - 1)));
      split.key.push_back(static_cast<int>(random_.between(0, 3)));
      if (out) continue;
      members[split.color.back()].push_back({{split.key.back(), program_.rankIn(0, rank)}, rank});
    }
    for (auto& group : members) {
      if (group.empty()) continue;
      // Ranks follow the key, then the rank in the parent.
      std::sort(group.begin(), group.end());
      Comm comm;
      comm.creation = static_cast<int>(program_.creations.size());
      comm.blocking = blocking;
      for (const auto& member : group) comm.members.push_back(member.second);
      split.comms.push_back(static_cast<int>(program_.comms.size()));
      program_.comms.push_back(comm);
    }
    program_.creations.push_back(split);
  }

  void addById(const std::vector<int>& members) {
    Creation creation;
    creation.comms = {static_cast<int>(program_.comms.size())};
    creation.config = pickConfig();
    if (creation.config == Config::kBlocking && random_.chance(70)) creation.config = Config::kNone;
    program_.comms.push_back(
        {members, static_cast<int>(program_.creations.size()), creation.config != Config::kNonBlocking});
    program_.creations.push_back(creation);
  }

  Config pickConfig() {
    return random_.chance(non_blocking_percent_) ? Config::kNonBlocking : Config::kBlocking;
  }

  uint64_t pickCount(int ranks, uint64_t limit) {
    const uint64_t block = std::stoul(program_.settings.at("HALFWIRE_BLOCK"));
    const uint64_t w = static_cast<uint64_t>(ranks);
    uint64_t count = 0;
    const int what = static_cast<int>(random_.between(0, 99));
    if (what < 6) {
      count = 0;
    } else if (what < 22) {
      count = static_cast<uint64_t>(random_.between(1, 2 * ranks + 3));
    } else if (what < 50) {
      const std::vector<uint64_t> edges = {block, block * w, 2 * block * w, 512,
                                           1024,  4096,      65536,         block * 3 * w};
      count = random_.pick(edges) + static_cast<uint64_t>(random_.between(0, 4)) - 2;
    } else {
      count = static_cast<uint64_t>(std::exp2(random_.uniform() * 20.0));
    }
    if (random_.chance(3)) count = kLargest;
    return std::min(count, limit);
  }

  int addOp(int comm, bool point_to_point) {
    Op op;
    op.id = static_cast<int>(program_.ops.size());
    op.comm = comm;
    const int ranks = static_cast<int>(program_.comms[comm].members.size());
    if (point_to_point) {
      op.kind = OpKind::kSendRecv;
    } else {
      const int what = static_cast<int>(random_.between(0, 99));
      op.kind = what < 40   ? OpKind::kAllReduce
                : what < 60 ? OpKind::kReduceScatter
                : what < 75 ? OpKind::kAllGather
                : what < 81 ? OpKind::kBroadcast
                : what < 87 ? OpKind::kReduce
                : what < 92 ? OpKind::kAlltoAll
                : what < 96 ? OpKind::kGather
                            : OpKind::kScatter;
    }
    op.type = kTypes[random_.between(0, std::size(kTypes) - 1)];
    const bool parts =
        op.kind == OpKind::kReduceScatter || op.kind == OpKind::kAllGather || isExchange(op.kind);
    const uint64_t copies = static_cast<uint64_t>(ranks) * (parts ? static_cast<uint64_t>(ranks) : 1);
    const uint64_t left = kBudget > used_ ? (kBudget - used_) / copies : 64;
    op.count = pickCount(ranks, std::min(std::max<uint64_t>(left, 64),
                                         parts ? kLargest / static_cast<uint64_t>(ranks) : kLargest));
    op.count = std::min(op.count, passLimit(op.type));
    op.root = static_cast<int>(random_.between(0, ranks - 1));
    op.peer = static_cast<int>(random_.between(0, ranks - 1));
    while (point_to_point && shouldCompress(program_, op) && packetOf(op) > chunkBytes(program_) / 2)
      op.count = op.count * 3 / 4;
    used_ += op.count * copies;
    op.profile = random_.pick<Profile>(
        {Profile::kNormal, Profile::kNormal, Profile::kMixed, Profile::kWild, Profile::kSpecials});
    if (reduces(op.kind)) chooseRedOp(&op, ranks);
    for (int rank = 0; rank < ranks; ++rank) op.placements.push_back(place(op, rank));
    program_.ops.push_back(op);
    return op.id;
  }

  // Of a message's scratch. A group has at most four messages of a communicator, each with two ends, and
  // packets for four chunks.
  uint64_t packetOf(const Op& op) const {
    return (packetBytes(wireFormat(program_), op.count) + 255) / 256 * 256;
  }

  // Tiny chunks cut a message into passes that cost a group of messages each, and a random delay for every
  // queue entry: some dozens are enough. Where passes overlap, four of them share a chunk.
  uint64_t passLimit(ncclDataType_t type) const {
    const std::string& chunk = program_.settings.at("HALFWIRE_CHUNK_BYTES");
    if (chunk != "1KiB" && chunk != "4KiB") return kLargest;
    const uint64_t pass =
        (chunk == "1KiB" ? 1024 : 4096) / (program_.settings.at("HALFWIRE_OVERLAP") == "off" ? 1 : 4);
    return pass * 80 / ncclTypeBytes(type);
  }

  void chooseRedOp(Op* op, int ranks) {
    const int what = static_cast<int>(random_.between(0, 99));
    if (!isFloating(op->type)) {
      op->redop = random_.pick<RedOp>({RedOp::kSum, RedOp::kSum, RedOp::kMax, RedOp::kMin});
      return;
    }
    op->redop = what < 45   ? RedOp::kSum
                : what < 65 ? RedOp::kAvg
                : what < 88 ? RedOp::kPreMul
                : what < 94 ? RedOp::kMax
                            : RedOp::kMin;
    // What max and min make of NaN is NCCL's own affair.
    if ((op->redop == RedOp::kMax || op->redop == RedOp::kMin) && op->profile == Profile::kSpecials)
      op->profile = Profile::kMixed;
    if (op->redop != RedOp::kPreMul) return;
    for (int rank = 0; rank < ranks; ++rank) {
      double scalar = random_.pick<double>({1.0, 0.5, -1.25, 3.0, 0.0, 1.0 / ranks, -0.01, 7.3});
      // Exact in the type, so that everyone means the same number.
      char bytes[8];
      store(op->type, bytes, 0, scalar);
      op->scalars.push_back(load(op->type, bytes, 0));
    }
  }

  Placement place(const Op& op, int rank) {
    Placement p;
    p.stream = static_cast<int>(random_.between(0, program_.streams - 1));
    p.in_place = op.kind != OpKind::kAlltoAll && op.kind != OpKind::kSendRecv && random_.chance(35);
    p.send_offset = random_.chance(50) ? 0 : static_cast<uint32_t>(random_.between(1, 15));
    p.recv_offset = random_.chance(50) ? 0 : static_cast<uint32_t>(random_.between(1, 15));
    p.device_scalar = random_.chance(50);
    const bool other = rank != op.root && random_.chance(30);
    p.null_recv = (op.kind == OpKind::kReduce || op.kind == OpKind::kGather) && other && !p.in_place;
    p.null_send = (op.kind == OpKind::kBroadcast || op.kind == OpKind::kScatter) && other && !p.in_place;
    p.old_name = op.kind == OpKind::kBroadcast && p.in_place && random_.chance(50);
    return p;
  }

  void makeStep() {
    // The step's operations in canonical order: communicator by communicator; collectives, then everything
    // that is made of sends and receives.
    const bool wide = random_.chance(55);
    std::vector<int> comms(program_.comms.size());
    for (size_t i = 0; i < comms.size(); ++i) comms[i] = static_cast<int>(i);
    random_.shuffle(&comms);
    // Two communicators of one split have no member in common; all of them may take part.
    std::vector<int> canonical;
    for (const int comm : comms) {
      if (!wide && !canonical.empty()) break;
      // Blocking and non-blocking communicators share no group.
      if (program_.comms[comm].blocking != program_.comms[comms[0]].blocking) continue;
      if (wide && random_.chance(25) && comms.size() > 1) continue;
      const int collectives = wide ? static_cast<int>(random_.between(0, 4)) : random_.chance(85) ? 1 : 0;
      const int messages = wide ? (random_.chance(45) ? static_cast<int>(random_.between(1, 4)) : 0)
                           : collectives == 0 ? 1
                                              : 0;
      std::vector<int> ops;
      for (int i = 0; i < collectives; ++i) ops.push_back(addOp(comm, false));
      const auto exchanges =
          std::stable_partition(ops.begin(), ops.end(), [&](int id) { return !asMessage(program_.ops[id]); });
      std::vector<int> mixed(exchanges, ops.end());
      ops.erase(exchanges, ops.end());
      for (int i = 0; i < messages; ++i) mixed.push_back(addOp(comm, true));
      random_.shuffle(&mixed);
      ops.insert(ops.end(), mixed.begin(), mixed.end());
      canonical.insert(canonical.end(), ops.begin(), ops.end());
    }
    // NCCL sorts and aggregates the collectives that a group holds of one communicator, so where there are
    // several, either all members group them or none does. Everything else each rank groups as it likes.
    std::vector<int> collectives(program_.comms.size(), 0);
    for (const int id : canonical) {
      const Op& op = program_.ops[id];
      if (op.count > 0 && !asMessage(op)) ++collectives[op.comm];
    }
    const bool nobody = random_.chance(12);
    Step step;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      bool must = false;
      for (size_t c = 0; c < collectives.size(); ++c) {
        must = must || (collectives[c] > 1 && program_.rankIn(static_cast<int>(c), rank) >= 0);
      }
      const int percent = nobody ? 0 : must ? 100 : wide ? 60 : 15;
      step.ranks.push_back(makeRankStep(rank, canonical, percent));
    }
    program_.steps.push_back(step);
  }

  RankStep makeRankStep(int rank, const std::vector<int>& canonical, int group_percent) {
    RankStep step;
    for (const int id : canonical) {
      const Op& op = program_.ops[id];
      const int me = program_.rankIn(op.comm, rank);
      if (me < 0) continue;
      if (op.kind != OpKind::kSendRecv) {
        step.order.push_back(id);
        step.sends.push_back(false);
        continue;
      }
      // A message to oneself needs both ends in one group.
      if (op.root == op.peer && group_percent == 0) continue;
      for (const bool send : {true, false}) {
        if (me != (send ? op.root : op.peer)) continue;
        step.order.push_back(id);
        step.sends.push_back(send);
      }
    }
    bool to_self = false;
    for (size_t i = 0; i + 1 < step.order.size(); ++i)
      to_self = to_self || step.order[i] == step.order[i + 1];
    step.grouped = to_self || random_.chance(group_percent);
    if (step.grouped) {
      shuffleGroup(&step);
      step.nesting = random_.chance(20) ? static_cast<int>(random_.between(2, 3)) : 1;
      if (!step.order.empty() && random_.chance(20))
        step.inner_at = static_cast<int>(random_.between(0, static_cast<int64_t>(step.order.size()) - 1));
    }
    step.delay_us = random_.chance(20) ? static_cast<int>(random_.between(0, 4000)) : 0;
    step.sync = random_.chance(30) ? static_cast<int>(random_.between(1, 3)) : 0;
    step.sync_stream = static_cast<int>(random_.between(0, program_.streams - 1));
    step.wait_stream = static_cast<int>(random_.between(0, program_.streams - 1));
    return step;
  }

  // Random swaps of neighbours that keep what has to be kept: the order of collectives of a communicator, of
  // messages between two ranks, and of the communicators' first calls.
  void shuffleGroup(RankStep* step) {
    if (step->order.size() < 2) return;
    for (size_t i = 0; i < step->order.size() * 6; ++i) {
      const size_t at = static_cast<size_t>(random_.between(0, static_cast<int64_t>(step->order.size()) - 2));
      const std::vector<int> before = firstCalls(*step);
      swapAt(step, at);
      if (!maySwap(*step, at) || firstCalls(*step) != before) swapAt(step, at);
    }
  }

  static void swapAt(RankStep* step, size_t at) {
    std::swap(step->order[at], step->order[at + 1]);
    const bool send = step->sends[at];
    step->sends[at] = step->sends[at + 1];
    step->sends[at + 1] = send;
  }

  std::vector<int> firstCalls(const RankStep& step) const {
    std::vector<int> comms;
    for (const int id : step.order) {
      // NCCL discards empty collectives before it notes their communicator; an empty message is a task like
      // any other.
      if (program_.ops[id].count == 0 && program_.ops[id].kind != OpKind::kSendRecv) continue;
      const int comm = program_.ops[id].comm;
      if (std::find(comms.begin(), comms.end(), comm) == comms.end()) comms.push_back(comm);
    }
    return comms;
  }

  bool maySwap(const RankStep& step, size_t at) const {
    const Op& a = program_.ops[step.order[at]];
    const Op& b = program_.ops[step.order[at + 1]];
    if (a.comm != b.comm) return true;
    if (!asMessage(a) && !asMessage(b)) return false;
    if (a.id == b.id) return true;
    const int ranks = static_cast<int>(program_.comms[a.comm].members.size());
    for (int from = 0; from < ranks; ++from) {
      for (int to = 0; to < ranks; ++to) {
        if (sendsBetween(a, from, to) && sendsBetween(b, from, to)) return false;
      }
    }
    return true;
  }

  bool asMessage(const Op& op) const { return ordersAsMessage(program_, op, options_); }

  const GenerateOptions options_;
  Random random_;
  Program program_;
  uint64_t used_ = 0;
  int non_blocking_percent_ = 0;
};

const char* redOpName(RedOp redop) {
  static constexpr const char* kNames[] = {"sum", "avg", "premul", "max", "min"};
  return kNames[static_cast<int>(redop)];
}

}  // namespace

const char* opKindName(OpKind kind) {
  static constexpr const char* kNames[] = {"AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Reduce",
                                           "AlltoAll",  "Gather",        "Scatter",   "Send/Recv"};
  return kNames[static_cast<int>(kind)];
}

int Program::rankIn(int comm, int job_rank) const {
  const auto& members = comms[comm].members;
  const auto found = std::find(members.begin(), members.end(), job_rank);
  return found == members.end() ? -1 : static_cast<int>(found - members.begin());
}

bool sendsBetween(const Op& op, int from, int to) {
  switch (op.kind) {
    case OpKind::kAlltoAll:
      return true;
    case OpKind::kGather:
      return to == op.root;
    case OpKind::kScatter:
      return from == op.root;
    case OpKind::kSendRecv:
      return from == op.root && to == op.peer;
    default:
      return false;
  }
}

Program generateProgram(uint64_t seed, const GenerateOptions& options) {
  return Generator(seed, options).run();
}

bool ordersAsMessage(const Program& program, const Op& op, const GenerateOptions& options) {
  if (!isExchange(op.kind)) return op.kind == OpKind::kSendRecv;
  return options.any_order || !shouldCompress(program, op);
}

bool stochastic(const Program& program) { return program.settings.at("HALFWIRE_ROUNDING") == "stochastic"; }

WireFormat wireFormat(const Program& program) {
  WireFormat f;
  const std::string& element = program.settings.at("HALFWIRE_FORMAT");
  for (const ElementFormat each : kElementFormats) {
    if (element == elementFormatName(each)) f.element = each;
  }
  f.scale = program.settings.at("HALFWIRE_SCALE") == "e8m0" ? ScaleFormat::kE8M0 : ScaleFormat::kFp32;
  f.block = static_cast<uint16_t>(std::stoi(program.settings.at("HALFWIRE_BLOCK")));
  return f;
}

uint64_t sendElements(const Program& program, const Op& op, int comm_rank) {
  const uint64_t ranks = program.comms[op.comm].members.size();
  switch (op.kind) {
    case OpKind::kReduceScatter:
    case OpKind::kAlltoAll:
      return op.count * ranks;
    case OpKind::kBroadcast:
    case OpKind::kSendRecv:
      return comm_rank == op.root ? op.count : 0;
    case OpKind::kScatter:
      return comm_rank == op.root ? op.count * ranks : 0;
    default:
      return op.count;
  }
}

uint64_t recvElements(const Program& program, const Op& op, int comm_rank) {
  const uint64_t ranks = program.comms[op.comm].members.size();
  switch (op.kind) {
    case OpKind::kAllGather:
    case OpKind::kAlltoAll:
      return op.count * ranks;
    case OpKind::kGather:
      return comm_rank == op.root ? op.count * ranks : 0;
    case OpKind::kSendRecv:
      return comm_rank == op.peer ? op.count : 0;
    default:
      return op.count;
  }
}

uint64_t chunkBytes(const Program& program) {
  return parseBytes(program.settings.at("HALFWIRE_CHUNK_BYTES")).value();
}

bool shouldCompress(const Program& program, const Op& op) {
  if (program.settings.at("HALFWIRE_MODE") != "wire") return false;  // shadows leave every result exact
  const Comm& comm = program.comms[op.comm];
  const uint64_t ranks = comm.members.size();
  if (ranks < 2 || op.count == 0) return false;
  // Non-blocking communicators and their children pass.
  const bool parent_blocks =
      program.creations[comm.creation].how == CommHow::kId || program.comms[0].blocking;
  if (!comm.blocking || !parent_blocks) return false;
  if (op.type != ncclBfloat16 && op.type != ncclFloat16 && op.type != ncclFloat32) return false;
  static const std::map<OpKind, std::string> kNames = {
      {OpKind::kAllReduce, "allreduce"}, {OpKind::kReduceScatter, "reducescatter"},
      {OpKind::kReduce, "reduce"},       {OpKind::kAllGather, "allgather"},
      {OpKind::kBroadcast, "broadcast"}, {OpKind::kAlltoAll, "alltoall"},
      {OpKind::kSendRecv, "sendrecv"},   {OpKind::kGather, "gather"},
      {OpKind::kScatter, "scatter"}};
  const auto name = kNames.find(op.kind);
  if (name == kNames.end()) return false;
  const std::string ops = "," + program.settings.at("HALFWIRE_OPS") + ",";
  const auto asks = [&](const std::string& word) { return ops.find("," + word + ",") != std::string::npos; };
  const bool sums = reduces(op.kind);
  if (!asks(name->second + "-fp32") && !(asks(name->second) && (sums || op.type != ncclFloat32)))
    return false;
  if (sums && (op.redop == RedOp::kMax || op.redop == RedOp::kMin)) return false;
  const bool whole = op.kind == OpKind::kAllReduce || op.kind == OpKind::kReduce ||
                     op.kind == OpKind::kBroadcast || op.kind == OpKind::kSendRecv;
  const uint64_t bytes = op.count * ncclTypeBytes(op.type) * (whole ? 1 : ranks);
  if (op.kind == OpKind::kSendRecv && bytes > chunkBytes(program)) return false;
  const std::string& min = program.settings.at("HALFWIRE_MIN_BYTES");
  const uint64_t floor = min == "1KiB" ? 1024 : min == "64KiB" ? 65536 : std::stoul(min);
  return bytes >= floor;
}

std::string describeOp(const Program& program, const Op& op) {
  std::ostringstream text;
  text << "#" << op.id << " " << opKindName(op.kind) << " comm " << op.comm << " " << dataTypeName(op.type)
       << " count " << op.count;
  if (reduces(op.kind)) text << " " << redOpName(op.redop);
  for (const double scalar : op.scalars) text << " *" << scalar;
  if (op.kind == OpKind::kBroadcast || op.kind == OpKind::kReduce || op.kind == OpKind::kGather ||
      op.kind == OpKind::kScatter)
    text << " root " << op.root;
  if (op.kind == OpKind::kSendRecv) text << " " << op.root << "->" << op.peer;
  text << " " << profileName(op.profile) << (shouldCompress(program, op) ? " compressed" : " passing");
  return text.str();
}

std::string describeProgram(const Program& program) {
  std::ostringstream text;
  text << "seed " << program.seed << ": " << program.ranks << " ranks, " << program.streams << " streams\n";
  for (const auto& [name, value] : program.settings) text << "  " << name << "=" << value << "\n";
  for (size_t c = 0; c < program.comms.size(); ++c) {
    text << "  comm " << c
         << (program.creations[program.comms[c].creation].how == CommHow::kId ? " by id:" : " by split:");
    for (const int member : program.comms[c].members) text << " " << member;
    text << (program.comms[c].blocking ? "" : " non-blocking")
         << (program.create_grouped ? " (grouped)\n" : "\n");
  }
  for (const Op& op : program.ops) {
    text << "  " << describeOp(program, op) << "\n";
    for (size_t rank = 0; rank < op.placements.size(); ++rank) {
      const Placement& p = op.placements[rank];
      text << "      " << rank << ": stream " << p.stream << " offsets " << p.send_offset << ","
           << p.recv_offset << (p.in_place ? " in place" : "")
           << (p.device_scalar && !op.scalars.empty() ? " device scalar" : "")
           << (p.null_send ? " no send buffer" : "") << (p.null_recv ? " no receive buffer" : "")
           << (p.old_name ? " by Bcast" : "") << "\n";
    }
  }
  for (size_t i = 0; i < program.steps.size(); ++i) {
    text << "  step " << i << "\n";
    for (int rank = 0; rank < program.ranks; ++rank) {
      const RankStep& step = program.steps[i].ranks[rank];
      text << "    rank " << rank << ":" << (step.grouped ? " group" : "");
      if (step.nesting > 1) text << " x" << step.nesting;
      for (size_t k = 0; k < step.order.size(); ++k) {
        text << " #" << step.order[k];
        if (program.ops[step.order[k]].kind == OpKind::kSendRecv) text << (step.sends[k] ? "s" : "r");
        if (static_cast<int>(k) == step.inner_at) text << "(nested)";
      }
      if (step.delay_us > 0) text << " after " << step.delay_us << " us";
      if (step.sync == 1) text << ", sync stream " << step.sync_stream;
      if (step.sync == 2) text << ", sync all";
      if (step.sync == 3) text << ", stream " << step.wait_stream << " waits for " << step.sync_stream;
      text << "\n";
    }
  }
  text << "  when killed or aborted (" << (program.aborts ? "aborted" : "killed")
       << " if it may be either): rank " << program.victim;
  if (program.end_timed) {
    text << " after " << program.end_after_s << " s";
  } else {
    text << (program.end_after_call ? " behind" : " before") << " step " << program.end_step
         << " (counted over repetitions), aborted " << program.abort_after_us << " us into it";
  }
  text << "; watchdogs on ranks";
  for (size_t i = 0; i < program.has_watchdog.size(); ++i) {
    if (program.has_watchdog[i]) text << " " << i;
  }
  text << "\n";
  return text.str();
}

}  // namespace halfwire::soak
