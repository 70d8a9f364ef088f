#include "interpose/create.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

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

Result<std::unique_ptr<Device>> makeDevice(const RealNccl& real) {
  if (real.host_engine != nullptr) return makeHostDevice(real.host_engine);
  return makeCudaDevice();
}

const Settings& settings() { return Registry::get().settings().value(); }

// Whether members of this communicator have anything to tell each other.
bool meets(const NewCommunicator& n) {
  if (!n.followed || n.ranks <= 1 || !n.mark) return false;
  return settings().mode != Mode::kOff || n.mark->port != 0;
}

// What cannot be right whoever answers.
Status objection(const NewCommunicator& n) {
  if (settings().mode == Mode::kOff || !n.followed || n.ranks <= 1) return {};
  if (!n.mark) {
    return {StatusCode::kInvalidArgument, fmt::format("rank {}: the process that made this communicator's id "
                                                      "(rank 0 in most programs) runs without the "
                                                      "library; start every rank with halfwire run",
                                                      n.rank)};
  }
  if (n.mark->port == 0) {
    return {
        StatusCode::kInvalidArgument,
        fmt::format(
            "rank {} runs with mode wire, the process that made this communicator's id with mode off; start "
            "every rank with the same halfwire run options",
            n.rank)};
  }
  return {};
}

// Scratch for a communicator that could compress. The failure of one member is told to all.
Status makeCompressor(const NewCommunicator& n, std::unique_ptr<Compressor>* out) {
  if (!n.device_status.ok()) return n.device_status;
  Compressor::Config config;
  config.comm = *n.out;
  config.rank = n.rank;
  config.ranks = n.ranks;
  config.format = settings().format;
  config.chunk_bytes = settings().chunk_bytes;
  auto made = Compressor::create(&n.real->api, n.device.get(), config);
  if (!made.ok()) return made.status();
  *out = std::move(made).value();
  return {};
}

void abandon(const NewCommunicator& n) {
  const InsideReal inside;
  if (*n.out != nullptr && n.real->api.ncclCommAbort != nullptr) (void)n.real->api.ncclCommAbort(*n.out);
  *n.out = nullptr;
}

std::unique_ptr<Communicator> makeState(NewCommunicator& n, Reason reason,
                                        std::unique_ptr<Compressor> compressor) {
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
  c->agreement.comm = reason;
  if (reason == Reason::kCompressed) {
    c->device = std::move(n.device);
    c->compressor = std::move(compressor);
  }
  return c;
}

void makeDeviceFor(NewCommunicator* n) {
  if (!n->followed || !n->blocking || decideCommunicator(settings(), n->ranks) != Reason::kCompressed) return;
  auto made = makeDevice(*n->real);
  if (made.ok()) {
    n->device = std::move(made).value();
  } else {
    n->device_status = made.status();
  }
}

}  // namespace

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
  makeDeviceFor(&n);
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
  struct Pending {
    NewCommunicator* communicator;
    std::unique_ptr<Compressor> compressor;
    Meeting meeting;
    Verdict verdict;
    bool sent = false;
  };
  std::vector<Pending> pending;
  const Settings& s = settings();
  for (NewCommunicator& n : communicators) {
    // A failed initialisation, or a Split that left this rank without a child.
    if ((made != ncclSuccess && made != ncclInProgress) || *n.out == nullptr) continue;
    if (n.ranks == 0) {  // a child: NCCL knows its size
      int ranks = 0, rank = 0;
      const InsideReal inside;
      if (n.real->api.ncclCommCount(*n.out, &ranks) != ncclSuccess ||
          n.real->api.ncclCommUserRank(*n.out, &rank) != ncclSuccess) {
        n.followed = false;
      }
      n.ranks = static_cast<uint32_t>(ranks);
      n.rank = static_cast<uint32_t>(rank);
      makeDeviceFor(&n);
    }
    Pending p;
    p.communicator = &n;
    p.verdict.reason =
        n.followed || s.mode == Mode::kOff ? decideCommunicator(s, n.ranks) : Reason::kCreatedOutside;
    if (p.verdict.reason == Reason::kCompressed && !n.blocking) p.verdict.reason = Reason::kNonBlocking;
    p.verdict.status = objection(n);
    Status ready;
    if (p.verdict.status.ok() && p.verdict.reason == Reason::kCompressed)
      ready = makeCompressor(n, &p.compressor);
    if (p.verdict.status.ok() && meets(n)) {
      MemberRecord record;
      record.token = n.mark->token;
      record.branch = n.branch;
      record.rank = n.rank;
      record.ranks = n.ranks;
      record.digest = settingsDigest(s);
      record.mode = s.mode;
      record.blocking = n.blocking;
      record.ready = ready.ok();
      record.one_connection = oneConnection(*n.real);
      record.words = ready.ok() ? describeSettings(s) : ready.message();
      p.verdict.status = p.meeting.send(*n.mark, record, s.meeting_timeout_s);
      p.sent = p.verdict.status.ok();
    }
    pending.push_back(std::move(p));
  }

  ncclResult_t result = ncclSuccess;
  for (Pending& p : pending) {
    NewCommunicator& n = *p.communicator;
    // A non-blocking member has said what the others must know and cannot wait: its initialisation is still
    // going on.
    if (p.sent && n.blocking) {
      const Reason alone = p.verdict.reason;
      p.verdict = p.meeting.receive(s.meeting_timeout_s + 5);
      if (p.verdict.status.ok() && alone != Reason::kCompressed) p.verdict.reason = alone;
    }
    if (!p.verdict.status.ok()) {
      p.compressor.reset();
      abandon(n);
      result = refuse(ncclInvalidUsage, p.verdict.status.message());
      continue;
    }
    if (p.verdict.reason != Reason::kCompressed) p.compressor.reset();
    Registry::get().add(makeState(n, p.verdict.reason, std::move(p.compressor)), p.verdict.note, 0);
  }
  return result;
}

ncclResult_t finishInitAll(const RealNccl& real, ncclComm_t* comms, int ranks, const int* devices) {
  const Settings& s = settings();
  Reason reason = decideCommunicator(s, static_cast<uint32_t>(ranks));
  if (reason == Reason::kCompressed && real.host_engine == nullptr) reason = Reason::kCreatedOutside;
  std::vector<NewCommunicator> made(static_cast<size_t>(ranks));
  std::vector<std::unique_ptr<Compressor>> compressors(static_cast<size_t>(ranks));
  const uint64_t clique = Registry::get().nextClique();
  std::string note;
  int current = 0;
  if (reason == Reason::kCompressed) (void)real.host_engine->getDevice(&current);
  for (int i = 0; i < ranks; ++i) {
    NewCommunicator& n = made[static_cast<size_t>(i)];
    n.out = &comms[i];
    n.real = &real;
    n.rank = static_cast<uint32_t>(i);
    n.ranks = static_cast<uint32_t>(ranks);
    n.clique = clique;
    if (reason != Reason::kCompressed) continue;
    (void)real.host_engine->setDevice(devices != nullptr ? devices[i] : i);
    makeDeviceFor(&n);
    if (const Status ready = makeCompressor(n, &compressors[static_cast<size_t>(i)]); !ready.ok()) {
      note = fmt::format("rank {}: {}", i, ready.message());
    }
  }
  if (reason == Reason::kCompressed) {
    (void)real.host_engine->setDevice(current);
    if (!note.empty()) reason = Reason::kMemberNotReady;
  }
  for (int i = 0; i < ranks; ++i) {
    auto& compressor = compressors[static_cast<size_t>(i)];
    if (reason != Reason::kCompressed) compressor.reset();
    Registry::get().add(makeState(made[static_cast<size_t>(i)], reason, std::move(compressor)), note, 0);
  }
  return ncclSuccess;
}

}  // namespace halfwire
