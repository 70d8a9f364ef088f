#include "interpose/create.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "base/units.h"

namespace halfwire {
namespace {

uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9e3779b97f4a7c15ull + (hash >> 29); }

uint64_t cliqueOf(const Token& token, uint64_t branch) {
  uint64_t words[2];
  std::memcpy(words, token.data(), sizeof words);
  return mix(mix(mix(0x243f6a8885a308d3ull, words[0]), words[1]), branch);
}

bool oneConnection(const RealNccl& real) {
  if (real.host_engine != nullptr) return false;
  const char* value = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

const Settings& settings() { return Registry::get().settings().value(); }

// Whether members of this communicator have anything to tell each other.
bool meets(const NewCommunicator& n) {
  if (!n.followed || n.ranks <= 1 || !n.mark) return false;
  return settings().mode != Mode::kOff || n.mark->port != 0;
}

// Kernels and scratch for a communicator that could compress. The failure of one member is told to all.
Status makeCompressor(const NewCommunicator& n, std::shared_ptr<Device>* device,
                      std::unique_ptr<Compressor>* out, std::unique_ptr<Shadow>* shadow) {
  int ordinal = 0;
  {
    const InsideReal inside;
    if (n.real->api.ncclCommCuDevice == nullptr ||
        n.real->api.ncclCommCuDevice(*n.out, &ordinal) != ncclSuccess) {
      return {StatusCode::kUnavailable, "NCCL does not say which device the communicator is on"};
    }
  }
  auto found = Registry::get().device(*n.real, ordinal);
  if (!found.ok()) return found.status();
  *device = std::move(found).value();
  Compressor::Config config;
  config.comm = *n.out;
  config.rank = n.rank;
  config.ranks = n.ranks;
  config.format = settings().format;
  // Until the ranks have met, whoever has NVLink takes what it may need with it.
  config.chunk_bytes = linkDefaults(settings(), (*device)->nvlinkDomain() != 0).chunk_bytes;
  config.overlap = settings().overlap == Overlap::kOn ||
                   (settings().overlap == Overlap::kAuto && (*device)->overlapsPasses());
  config.noise = settings().mode == Mode::kNoise;
  config.stochastic = settings().stochastic;
  config.seed = settings().seed;
  config.number = n.number;
  if (settings().mode == Mode::kShadow) {
    Shadow::Config s{config, settings().shadow_formats, settings().shadow_bytes, settings().shadow_every};
    s.compressor.chunk_bytes = std::min(config.chunk_bytes, s.bytes);
    auto made = Shadow::create(&n.real->api, device->get(), s);
    if (!made.ok()) return made.status();
    *shadow = std::move(made).value();
    return {};
  }
  auto made = Compressor::create(&n.real->api, device->get(), config);
  if (!made.ok()) return made.status();
  *out = std::move(made).value();
  return {};
}

void abandon(const NewCommunicator& n) {
  const InsideReal inside;
  if (*n.out != nullptr && n.real->api.ncclCommAbort != nullptr) (void)n.real->api.ncclCommAbort(*n.out);
  *n.out = nullptr;
}

// A communicator on its way: what it has, what its peers said.
struct Pending {
  NewCommunicator* communicator = nullptr;
  std::shared_ptr<Device> device;
  std::unique_ptr<Compressor> compressor;
  std::unique_ptr<Shadow> shadow;
  std::unique_ptr<Messages> messages;
  Status ready;
  Meeting meeting;
  Verdict verdict;
  bool sent = false;
};

std::unique_ptr<Communicator> makeState(Pending& p) {
  const NewCommunicator& n = *p.communicator;
  auto c = std::make_unique<Communicator>();
  c->real = n.real;
  c->handle = *n.out;
  c->rank = n.rank;
  c->ranks = n.ranks;
  c->blocking = n.blocking;
  c->mark = n.mark;
  c->branch = n.branch;
  c->clique = n.clique != 0 ? n.clique : Registry::get().nextClique();
  c->agreement.settings = settings();
  c->agreement.ranks = n.ranks;
  c->agreement.comm = p.verdict.reason;
  const LinkDefaults link = linkDefaults(settings(), p.verdict.nvlink);
  c->agreement.floor_bytes = link.floor_bytes;
  c->agreement.chunk_bytes = link.chunk_bytes;
  c->device = std::move(p.device);
  c->compressor = std::move(p.compressor);
  c->shadow = std::move(p.shadow);
  c->messages = std::move(p.messages);
  return c;
}

bool sendsMessages(const Settings& s) {
  return s.mode == Mode::kWire && (s.ops & static_cast<uint32_t>(OpBit::kSendRecv)) != 0;
}

// What Sends and Recvs need; no memory yet.
Status makeMessages(Pending* p) {
  const NewCommunicator& n = *p->communicator;
  Messages::Config config{*n.out, settings().format};
  config.stochastic = settings().stochastic;
  config.seed = settings().seed;
  config.number = n.number;
  config.rank = n.rank;
  auto made = Messages::create(&n.real->api, p->device.get(), config);
  if (!made.ok()) return made.status();
  p->messages = std::move(made).value();
  return {};
}

// Asks NCCL for what only it knows of a child communicator.
void learnSize(NewCommunicator* n) {
  if (n->ranks != 0) return;
  int ranks = 0;
  int rank = 0;
  const InsideReal inside;
  if (n->real->api.ncclCommCount(*n->out, &ranks) != ncclSuccess ||
      n->real->api.ncclCommUserRank(*n->out, &rank) != ncclSuccess) {
    n->followed = false;
  }
  n->ranks = static_cast<uint32_t>(ranks);
  n->rank = static_cast<uint32_t>(rank);
}

// Decides alone, gets ready, and tells the peers.
Pending prepare(NewCommunicator& n) {
  const Settings& s = settings();
  Pending p;
  p.communicator = &n;
  p.verdict.reason =
      n.followed || s.mode == Mode::kOff ? decideCommunicator(s, n.ranks) : Reason::kCreatedOutside;
  if (p.verdict.reason == Reason::kCompressed && !n.blocking) p.verdict.reason = Reason::kNonBlocking;
  p.verdict.status = objection(n);
  if (!p.verdict.status.ok()) return p;
  if (p.verdict.reason == Reason::kCompressed)
    p.ready = makeCompressor(n, &p.device, &p.compressor, &p.shadow);
  if (p.ready.ok() && p.compressor != nullptr && sendsMessages(s)) p.ready = makeMessages(&p);
  if (!meets(n)) return p;
  MemberRecord record;
  record.token = n.mark->token;
  record.branch = n.branch;
  record.rank = n.rank;
  record.ranks = n.ranks;
  record.digest = settingsDigest(s);
  record.mode = s.mode;
  record.blocking = n.blocking;
  record.ready = p.ready.ok();
  record.one_connection = oneConnection(*n.real);
  if (p.ready.ok() && p.device != nullptr) record.nvlink_domain = p.device->nvlinkDomain();
  record.words = p.ready.ok() ? describeSettings(s) : p.ready.message();
  p.verdict.status = p.meeting.send(*n.mark, record, s.meeting_timeout_s);
  p.sent = p.verdict.status.ok();
  return p;
}

// Hears what the peers decided.
void conclude(Pending& p, const std::vector<Pending>& all) {
  const NewCommunicator& n = *p.communicator;
  const Reason alone = p.verdict.reason;
  if (n.local) {
    for (const Pending& other : all) {
      if (p.verdict.reason != Reason::kCompressed || other.ready.ok()) continue;
      p.verdict.reason = Reason::kMemberNotReady;
      p.verdict.note = fmt::format("rank {}: {}", other.communicator->rank, other.ready.message());
    }
    if (p.verdict.reason != Reason::kCompressed) return;
    if (oneConnection(*n.real)) p.verdict.reason = Reason::kOneConnection;
    const uint64_t domain = p.device->nvlinkDomain();
    p.verdict.nvlink = domain != 0 && std::all_of(all.begin(), all.end(), [&](const Pending& other) {
                         return other.device != nullptr && other.device->nvlinkDomain() == domain;
                       });
    return;
  }
  // A non-blocking member has said what the others must know and cannot wait: its initialisation is still
  // going on.
  if (!p.sent || !n.blocking) return;
  p.verdict = p.meeting.receive(settings().meeting_timeout_s + 5);
  Registry::get().settleMeetings();
  if (p.verdict.status.ok() && alone != Reason::kCompressed) p.verdict.reason = alone;
}

// What the link between the ranks changes, once they have met.
void useLink(Pending& p) {
  const LinkDefaults link = linkDefaults(settings(), p.verdict.nvlink);
  if (p.shadow != nullptr) {
    p.shadow->compressor().useChunks(std::min(link.chunk_bytes, settings().shadow_bytes));
    p.verdict.note =
        "every call stays exact: samples of what would be compressed run a second time, compressed";
    return;
  }
  if (p.compressor == nullptr) return;
  p.compressor->useChunks(link.chunk_bytes);
  if (p.messages != nullptr) p.messages->useLimit(messageScratchLimit(link.chunk_bytes));
  if (settings().mode == Mode::kNoise) {
    p.verdict.note = "nothing is compressed: results of reductions get noise of one bf16 ulp";
    return;
  }
  if (p.verdict.nvlink)
    p.verdict.note = fmt::format("NVLink joins the ranks: from {}, chunks of {}",
                                 formatBytes(link.floor_bytes), formatBytes(link.chunk_bytes));
}

class OpenGate final : public CallGate {
 public:
  bool enter() override { return ++threadState().inside_real, true; }
  void leave() override { --threadState().inside_real; }
};

// Connects the ranks of every communicator that will compress, all at once; the device memory that took.
Status connect(std::vector<Pending>& pending, uint64_t* bytes) {
  std::vector<Compressor*> members;
  Device* device = nullptr;
  for (Pending& p : pending) {
    if (!p.verdict.status.ok() || p.verdict.reason != Reason::kCompressed || !p.device->connectsLazily() ||
        (p.compressor != nullptr && p.compressor->config().noise))
      continue;
    members.push_back(p.shadow != nullptr ? &p.shadow->compressor() : p.compressor.get());
    device = p.device.get();
  }
  if (members.empty()) return {};
  const size_t before = device->freeBytes();
  OpenGate gate;
  std::string error;
  if (const ncclResult_t result = connectPeers(members, gate, &error); result != ncclSuccess) {
    return {StatusCode::kPeerLost,
            fmt::format("connecting the communicator's ranks failed: {}",
                        error.empty() ? fmt::format("NCCL error {}", static_cast<int>(result)) : error)};
  }
  const size_t after = device->freeBytes();
  *bytes = before > after ? before - after : 0;
  return {};
}

}  // namespace

Status objection(const NewCommunicator& n) {
  if (settings().mode == Mode::kOff || !n.followed || n.local || n.ranks <= 1) return {};
  if (!n.mark) {
    return {StatusCode::kInvalidArgument, fmt::format("rank {}: the process that made this communicator's id "
                                                      "(rank 0 in most programs) runs without the "
                                                      "library; start every rank with halfwire run",
                                                      n.rank)};
  }
  if (n.mark->port == 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format(
                "rank {} compresses, the process that made this communicator's id runs with mode off; start "
                "every rank with the same halfwire run options",
                n.rank)};
  }
  return {};
}

bool asksNonBlocking(const ncclConfig_t* config, bool parent_blocking) {
  // NCCL_COMM_BLOCKING overrides the program's configuration.
  if (const char* forced = std::getenv("NCCL_COMM_BLOCKING")) {
    if (std::strcmp(forced, "0") == 0) return true;
    if (std::strcmp(forced, "1") == 0) return false;
  }
  if (config == nullptr) return !parent_blocking;
  if (config->size < offsetof(ncclConfig_t, blocking) + sizeof(int)) return !parent_blocking;
  if (config->blocking == NCCL_CONFIG_UNDEF_INT) return false;
  return config->blocking == 0;
}

NewCommunicator startCommunicator(const RealNccl& real, ncclComm_t* out, int ranks, int rank,
                                  const ncclUniqueId& id, const ncclConfig_t* config) {
  NewCommunicator n;
  n.out = out;
  n.real = &real;
  n.rank = static_cast<uint32_t>(rank);
  n.ranks = static_cast<uint32_t>(ranks);
  n.blocking = !asksNonBlocking(config, true);
  // Under NCCL_COMM_ID every rank makes an id of its own, so there is no common meeting point.
  n.followed = std::getenv("NCCL_COMM_ID") == nullptr;
  n.mark = readMark(id);
  if (n.mark && n.mark->port != 0) n.clique = cliqueOf(n.mark->token, 0);
  return n;
}

NewCommunicator startUnfollowed(const RealNccl& real, ncclComm_t* out, int ranks, int rank) {
  NewCommunicator n;
  n.out = out;
  n.real = &real;
  n.rank = static_cast<uint32_t>(rank);
  n.ranks = static_cast<uint32_t>(ranks);
  n.followed = false;
  return n;
}

NewCommunicator startSplit(Communicator& parent, int color, ncclComm_t* out, const ncclConfig_t* config) {
  NewCommunicator n;
  n.out = out;
  n.real = parent.real;
  n.blocking = !asksNonBlocking(config, parent.blocking);
  n.mark = parent.mark;
  n.followed = parent.mark.has_value() && parent.blocking;
  // The parent's members count their splits alike, and members of one child share the color.
  n.branch =
      mix(mix(parent.branch, ++parent.splits), static_cast<uint64_t>(static_cast<uint32_t>(color)) + 1);
  if (n.mark && n.mark->port != 0) n.clique = cliqueOf(n.mark->token, n.branch);
  return n;
}

ncclResult_t finishCommunicators(std::vector<NewCommunicator>& communicators, ncclResult_t made) {
  std::vector<Pending> pending;
  uint64_t shared = 0;  // the number of a communicator of which several members are made here
  for (NewCommunicator& n : communicators) {
    // A failed initialisation, or a Split that left this rank without a child.
    if ((made != ncclSuccess && made != ncclInProgress) || *n.out == nullptr) continue;
    learnSize(&n);
    if (!n.local || pending.empty()) shared = Registry::get().nextNumber();
    n.number = shared;
    pending.push_back(prepare(n));
  }
  for (Pending& p : pending) {
    conclude(p, pending);
    if (p.verdict.status.ok() && p.verdict.reason == Reason::kCompressed) useLink(p);
  }

  uint64_t connection_bytes = 0;
  const Status connected = connect(pending, &connection_bytes);
  ncclResult_t result = ncclSuccess;
  for (Pending& p : pending) {
    if (p.verdict.status.ok() && p.verdict.reason == Reason::kCompressed && !connected.ok())
      p.verdict.status = connected;
    if (!p.verdict.status.ok() || p.verdict.reason != Reason::kCompressed) {
      p.messages.reset();
      p.compressor.reset();
      p.shadow.reset();
      p.device.reset();
    }
    if (!p.verdict.status.ok()) {
      abandon(*p.communicator);
      result = refuse(ncclInvalidUsage, p.verdict.status.message());
      continue;
    }
    const uint64_t bytes = p.compressor != nullptr || p.shadow != nullptr ? connection_bytes : 0;
    Registry::get().add(makeState(p), p.verdict.note, bytes);
  }
  return result;
}

ncclResult_t finishInitAll(const RealNccl& real, ncclComm_t* comms, int ranks) {
  std::vector<NewCommunicator> made(static_cast<size_t>(ranks));
  const uint64_t clique = Registry::get().nextClique();
  for (int i = 0; i < ranks; ++i) {
    NewCommunicator& n = made[static_cast<size_t>(i)];
    n.out = &comms[i];
    n.real = &real;
    n.rank = static_cast<uint32_t>(i);
    n.ranks = static_cast<uint32_t>(ranks);
    n.clique = clique;
    n.local = true;
  }
  return finishCommunicators(made, ncclSuccess);
}

}  // namespace halfwire
