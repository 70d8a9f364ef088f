#include "hostccl/service.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>

namespace halfwire::hostccl {
namespace {

using namespace std::chrono_literals;

constexpr auto kHandshakeLimit = 10s;  // for a visitor to prove itself
constexpr auto kConnectLimit = 30s;    // for us to be let in
constexpr auto kJoinLimit = 600s;      // for the last member to join after the first
constexpr auto kSlice = 100ms;         // how often a wait looks whether it was cancelled
constexpr size_t kMaxVisitors = 1024;
constexpr char kHelloMagic[8] = {'H', 'W', 'H', 'E', 'L', 'L', 'O', '1'};
constexpr char kTableMagic[8] = {'H', 'W', 'T', 'A', 'B', 'L', 'E', '1'};

enum class Visit : uint32_t { kJoin = 1, kPair = 2 };

struct Hello {
  char magic[8];
  uint64_t number;  // of the communicator
  Visit visit;
  uint32_t from, to;  // ranks; a join visits rank 0
  uint32_t reserved;
  Nonce nonce;
};
static_assert(sizeof(Hello) == 48);

struct Challenge {
  Nonce nonce;
  Digest digest;
};

struct TableHeader {
  char magic[8];
  uint32_t code;  // ncclResult_t
  uint32_t count;
  char text[240];
};

// The proof of one side: over everything both said, under a label of its own so that it cannot be sent back.
Digest prove(const Token& token, char side, const Hello& hello, const Nonce& nonce) {
  std::array<uint8_t, sizeof(Hello) + sizeof(Nonce)> both;
  std::memcpy(both.data(), &hello, sizeof(hello));
  std::memcpy(both.data() + sizeof(hello), nonce.data(), nonce.size());
  return keyedDigest(token, side, both);
}

void setNoDelay(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

Outcome systemError(const std::string& what) { return {ncclSystemError, what + ": " + std::strerror(errno)}; }

// Reads or writes all of a small message on a non-blocking socket.
Outcome transfer(int fd, void* data, size_t bytes, bool write, std::chrono::steady_clock::time_point deadline,
                 const Cancel* cancel, const std::string& who) {
  auto* p = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = write ? ::send(fd, p, bytes, MSG_NOSIGNAL) : ::recv(fd, p, bytes, 0);
    if (n > 0) {
      p += n;
      bytes -= static_cast<size_t>(n);
      continue;
    }
    if (n == 0 && !write) {
      return {ncclRemoteError, who + " closed the connection: it refused this process or has died"};
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN)
      return {ncclRemoteError, "the connection to " + who + " broke: " + std::strerror(errno)};
    if (cancel != nullptr && cancel->load()) return {ncclRemoteError, "the communicator was aborted"};
    if (std::chrono::steady_clock::now() >= deadline) {
      return {ncclSystemError, who + " did not answer in time: check that it still runs"};
    }
    pollfd p1{fd, static_cast<short>(write ? POLLOUT : POLLIN), 0};
    ::poll(&p1, 1, static_cast<int>(std::chrono::milliseconds(kSlice).count()));
  }
  return {};
}

Outcome connectTo(const Endpoint& endpoint, const Cancel& cancel, int* out) {
  sockaddr_storage address;
  const socklen_t length = endpoint.toSockaddr(&address);
  if (length == 0) return {ncclInvalidArgument, "the unique id holds no valid address"};
  const auto deadline = std::chrono::steady_clock::now() + kConnectLimit;
  const int fd = ::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return systemError("cannot make a socket (raise the limit of open files)");
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 && errno != EINPROGRESS) {
    const Outcome error = systemError("cannot connect to " + endpoint.text());
    ::close(fd);
    return error;
  }
  for (;;) {
    pollfd p{fd, POLLOUT, 0};
    const int n = ::poll(&p, 1, static_cast<int>(std::chrono::milliseconds(kSlice).count()));
    if (n > 0) break;
    if (cancel.load() || std::chrono::steady_clock::now() >= deadline) {
      ::close(fd);
      return {ncclSystemError, "no connection to " + endpoint.text() + " in time"};
    }
  }
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) {
    ::close(fd);
    return {ncclSystemError, "cannot connect to " + endpoint.text() + ": " + std::strerror(error) +
                                 "; the process that made the unique id must still run and be reachable "
                                 "(HALFWIRE_HOST_ADDRESS)"};
  }
  setNoDelay(fd);
  *out = fd;
  return {};
}

// The visitor's side of the handshake.
Outcome visit(int fd, Visit kind, uint64_t number, const Token& token, int from, int to, const Cancel& cancel,
              const std::string& who) {
  const auto deadline = std::chrono::steady_clock::now() + kConnectLimit;
  Hello hello{};
  std::memcpy(hello.magic, kHelloMagic, sizeof(kHelloMagic));
  hello.number = number;
  hello.visit = kind;
  hello.from = static_cast<uint32_t>(from);
  hello.to = static_cast<uint32_t>(to);
  if (!fillRandom(hello.nonce)) return systemError("no random numbers");
  if (Outcome o = transfer(fd, &hello, sizeof(hello), true, deadline, &cancel, who); !o.ok()) return o;
  Challenge challenge;
  if (Outcome o = transfer(fd, &challenge, sizeof(challenge), false, deadline, &cancel, who); !o.ok())
    return o;
  if (!equalConstantTime(challenge.digest, prove(token, 'S', hello, challenge.nonce))) {
    return {ncclSystemError, who + " does not know this communicator's token: somebody else listens there"};
  }
  Digest digest = prove(token, 'C', hello, challenge.nonce);
  if (Outcome o = transfer(fd, digest.data(), digest.size(), true, deadline, &cancel, who); !o.ok()) return o;
  char accepted = 0;
  return transfer(fd, &accepted, 1, false, deadline, &cancel, who);
}

// Sockets that children must not keep. Fixed size and lock-free: it is read between fork and exec.
std::array<std::atomic<int>, 4096> tracked_sockets;
std::atomic<bool> forked{false};

void afterForkInChild() {
  forked = true;
  for (auto& slot : tracked_sockets) {
    const int fd = slot.exchange(0);
    if (fd > 0) ::close(fd);
  }
}

}  // namespace

struct Service::Visitor {
  int fd = -1;
  Step step = Step::kHello;
  Clock::time_point deadline;
  size_t got = 0;
  std::array<uint8_t, 64> buffer{};
  Hello hello{};
  Nonce nonce{};
  Token token{};
};

void Service::trackSocket(int fd) {
  for (auto& slot : tracked_sockets) {
    int empty = 0;
    if (slot.compare_exchange_strong(empty, fd)) return;
  }
}

void Service::untrackSocket(int fd) {
  for (auto& slot : tracked_sockets) {
    int expected = fd;
    if (slot.compare_exchange_strong(expected, 0)) return;
  }
}

Outcome Service::get(Service** out) {
  static std::mutex mutex;
  static Service* service = nullptr;  // never destroyed: its thread may outlive static objects
  if (forked) {
    return {ncclSystemError,
            "the host engine cannot be used in a child forked after its first use: fork earlier"};
  }
  std::lock_guard lock(mutex);
  if (service == nullptr) {
    auto* made = new Service;
    if (Outcome o = made->start(); !o.ok()) {
      delete made;
      return o;
    }
    service = made;
  }
  *out = service;
  return {};
}

Outcome Service::start() {
  // Gloo throws in its own thread where it cannot accept; with room for descriptors it does not come to that.
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  const char* configured = std::getenv("HALFWIRE_HOST_ADDRESS");
  const std::string address = configured != nullptr && *configured != '\0' ? configured : "127.0.0.1";
  const std::optional<Endpoint> wanted = Endpoint::parse(address, 0);
  if (!wanted) {
    return {ncclInvalidArgument,
            "HALFWIRE_HOST_ADDRESS='" + address + "' is not a numeric IPv4 or IPv6 address of this machine"};
  }
  sockaddr_storage storage;
  const socklen_t length = wanted->toSockaddr(&storage);
  listener_ = ::socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener_ < 0) return systemError("cannot make a socket");
  if (::bind(listener_, reinterpret_cast<sockaddr*>(&storage), length) != 0 ||
      ::listen(listener_, 1024) != 0) {
    const Outcome error = systemError("cannot listen on " + address + " (HALFWIRE_HOST_ADDRESS)");
    ::close(listener_);
    return error;
  }
  const std::optional<Endpoint> bound = Endpoint::ofSocket(listener_);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  uint64_t random = 0;
  if (!bound || wake_ < 0 || !fillRandom({reinterpret_cast<uint8_t*>(&random), sizeof(random)})) {
    return systemError("cannot start the host engine");
  }
  endpoint_ = *bound;
  process_ = random;
  trackSocket(listener_);
  pthread_atfork(nullptr, nullptr, afterForkInChild);
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  bool started = true;
  try {
    std::thread([this] { run(); }).detach();
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  if (!started) return {ncclSystemError, "cannot start the host engine's thread: raise the limit of threads"};
  return {};
}

void Service::post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof(one));
}

Outcome Service::makeIdentity(Identity* out) {
  out->root = endpoint_;
  if (!fillRandom(out->token)) return systemError("no random numbers");
  std::lock_guard lock(mutex_);
  Root root;
  root.token = out->token;
  roots_[out->number()] = std::move(root);
  return {};
}

void Service::expect(uint64_t number, const Token& token, int rank, int size) {
  std::lock_guard lock(mutex_);
  gatherings_[{number, rank}] = {token, std::vector<int>(static_cast<size_t>(size), -1)};
}

void Service::forget(uint64_t number, int rank) {
  std::lock_guard lock(mutex_);
  const auto found = gatherings_.find({number, rank});
  if (found == gatherings_.end()) return;
  for (const int fd : found->second.fds) {
    if (fd < 0) continue;
    untrackSocket(fd);
    ::close(fd);
  }
  gatherings_.erase(found);
}

Outcome Service::join(const Identity& identity, Member self, const Cancel& cancel,
                      std::vector<Member>* members) {
  self.endpoint = endpoint_;
  self.process = process_;
  int fd = -1;
  if (Outcome o = connectTo(identity.root, cancel, &fd); !o.ok()) return o;
  const std::string who = "the maker of the unique id at " + identity.root.text();
  const auto body = [&]() -> Outcome {
    if (Outcome o = visit(fd, Visit::kJoin, identity.number(), identity.token, static_cast<int>(self.rank), 0,
                          cancel, who);
        !o.ok()) {
      return o;
    }
    const auto deadline = Clock::now() + kJoinLimit + kConnectLimit;
    if (Outcome o = transfer(fd, &self, sizeof(self), true, deadline, &cancel, who); !o.ok()) return o;
    TableHeader header;
    if (Outcome o = transfer(fd, &header, sizeof(header), false, deadline, &cancel, who); !o.ok()) return o;
    header.text[sizeof(header.text) - 1] = '\0';
    if (std::memcmp(header.magic, kTableMagic, sizeof(kTableMagic)) != 0 || header.code >= ncclNumResults) {
      return {ncclSystemError, who + " sent a malformed table"};
    }
    if (header.code != ncclSuccess) return {static_cast<ncclResult_t>(header.code), header.text};
    if (header.count != self.size) return {ncclSystemError, who + " sent a table of another size"};
    members->resize(header.count);
    return transfer(fd, members->data(), members->size() * sizeof(Member), false, deadline, &cancel, who);
  };
  Outcome outcome = body();
  ::close(fd);
  return outcome;
}

Outcome Service::connectAll(uint64_t number, const Token& token, int rank, const std::vector<Member>& members,
                            const Cancel& cancel, std::vector<int>* fds) {
  // The higher rank visits the lower one.
  std::vector<int> made(members.size(), -1);
  const auto give_up = [&](Outcome outcome) {
    for (const int fd : made) {
      if (fd < 0) continue;
      untrackSocket(fd);
      ::close(fd);
    }
    return outcome;
  };
  for (int p = 0; p < rank; ++p) {
    int fd = -1;
    if (Outcome o = connectTo(members[static_cast<size_t>(p)].endpoint, cancel, &fd); !o.ok())
      return give_up(o);
    trackSocket(fd);
    made[static_cast<size_t>(p)] = fd;
    const std::string who = "rank " + std::to_string(p);
    if (Outcome o = visit(fd, Visit::kPair, number, token, rank, p, cancel, who); !o.ok()) return give_up(o);
  }
  std::unique_lock lock(mutex_);
  Gathering& gathering = gatherings_.at({number, rank});
  const auto missing = [&] {
    return std::find(gathering.fds.begin() + rank + 1, gathering.fds.end(), -1) != gathering.fds.end();
  };
  const auto deadline = Clock::now() + kConnectLimit;
  while (missing()) {
    arrived_.wait_for(lock, kSlice);
    if (cancel.load()) return give_up({ncclRemoteError, "the communicator was aborted"});
    if (Clock::now() < deadline) continue;
    const auto at =
        std::find(gathering.fds.begin() + rank + 1, gathering.fds.end(), -1) - gathering.fds.begin();
    return give_up(
        {ncclRemoteError, "rank " + std::to_string(at) + " did not connect: check that it still runs"});
  }
  for (size_t p = static_cast<size_t>(rank) + 1; p < members.size(); ++p) made[p] = gathering.fds[p];
  gatherings_.erase({number, rank});
  *fds = std::move(made);
  return {};
}

// ---- the helper thread

void Service::run() {
  std::vector<pollfd> polled;
  for (;;) {
    polled.clear();
    polled.push_back({wake_, POLLIN, 0});
    polled.push_back({listener_, POLLIN, 0});
    for (const Visitor& v : visitors_) polled.push_back({v.fd, POLLIN, 0});
    const bool busy = !visitors_.empty();
    ::poll(polled.data(), polled.size(), busy ? 1000 : -1);
    if (polled[0].revents != 0) {
      uint64_t count;
      (void)!::read(wake_, &count, sizeof(count));
      std::vector<std::function<void()>> tasks;
      {
        std::lock_guard lock(mutex_);
        tasks.swap(tasks_);
      }
      for (auto& task : tasks) {
        task();
        task = nullptr;
      }
    }
    size_t i = 2;
    for (auto v = visitors_.begin(); v != visitors_.end(); ++i) {
      // A visitor whose socket was handed over or closed has no fd any more.
      const bool ready = v->fd >= 0 && polled[i].revents != 0;
      const bool late = v->step != Step::kJoined && Clock::now() >= v->deadline;
      if (v->fd < 0 || (ready && !readable(*v)) || late) {
        if (v->fd >= 0) ::close(v->fd);
        v = visitors_.erase(v);
      } else {
        ++v;
      }
    }
    expireRoots();
    if (polled[1].revents != 0) accept();
  }
}

void Service::accept() {
  for (;;) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      // Out of descriptors: the connection stays in the backlog and would keep poll() awake.
      if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(kSlice);
      return;
    }
    setNoDelay(fd);
    if (visitors_.size() >= kMaxVisitors) {
      const auto stranger = std::find_if(visitors_.begin(), visitors_.end(),
                                         [](const Visitor& v) { return v.step == Step::kHello; });
      if (stranger == visitors_.end()) {
        ::close(fd);
        continue;
      }
      ::close(stranger->fd);
      visitors_.erase(stranger);
    }
    Visitor visitor;
    visitor.fd = fd;
    visitor.deadline = Clock::now() + kHandshakeLimit;
    visitors_.push_back(visitor);
  }
}

// Reads what has come. False: the visitor is finished or refused.
bool Service::readable(Visitor& v) {
  if (v.step == Step::kJoined) {
    // Members say nothing while they wait for the table: this is a hang-up (or a fault).
    dropJoined(v.fd);
    v.fd = -1;
    return false;
  }
  const size_t want = v.step == Step::kHello   ? sizeof(Hello)
                      : v.step == Step::kProof ? sizeof(Digest)
                                               : sizeof(Member);
  const ssize_t n = ::recv(v.fd, v.buffer.data() + v.got, want - v.got, 0);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0) return false;
  v.got += static_cast<size_t>(n);
  if (v.got < want) return true;
  v.got = 0;
  switch (v.step) {
    case Step::kHello:
      return hello(v);
    case Step::kProof:
      return proof(v);
    default:
      return member(v);
  }
}

bool Service::hello(Visitor& v) {
  std::memcpy(&v.hello, v.buffer.data(), sizeof(Hello));
  if (std::memcmp(v.hello.magic, kHelloMagic, sizeof(kHelloMagic)) != 0) return false;
  {
    std::lock_guard lock(mutex_);
    if (v.hello.visit == Visit::kJoin) {
      const auto root = roots_.find(v.hello.number);
      if (root == roots_.end()) return false;
      v.token = root->second.token;
    } else if (v.hello.visit == Visit::kPair && v.hello.to < kMaxRanks) {
      const auto gathering = gatherings_.find({v.hello.number, static_cast<int>(v.hello.to)});
      if (gathering == gatherings_.end()) return false;
      v.token = gathering->second.token;
    } else {
      return false;
    }
  }
  if (!fillRandom(v.nonce)) return false;
  const Challenge challenge{v.nonce, prove(v.token, 'S', v.hello, v.nonce)};
  v.step = Step::kProof;
  return ::send(v.fd, &challenge, sizeof(challenge), MSG_NOSIGNAL) == sizeof(challenge);
}

bool Service::proof(Visitor& v) {
  Digest digest;
  std::memcpy(digest.data(), v.buffer.data(), digest.size());
  if (!equalConstantTime(digest, prove(v.token, 'C', v.hello, v.nonce))) return false;
  const char accepted = 1;
  if (v.hello.visit == Visit::kJoin) {
    v.step = Step::kMember;
    return ::send(v.fd, &accepted, 1, MSG_NOSIGNAL) == 1;
  }
  std::lock_guard lock(mutex_);
  const auto gathering = gatherings_.find({v.hello.number, static_cast<int>(v.hello.to)});
  if (gathering == gatherings_.end()) return false;
  auto& fds = gathering->second.fds;
  if (v.hello.from <= v.hello.to || v.hello.from >= fds.size() || fds[v.hello.from] >= 0) return false;
  if (::send(v.fd, &accepted, 1, MSG_NOSIGNAL) != 1) return false;
  trackSocket(v.fd);
  fds[v.hello.from] = v.fd;
  v.fd = -1;
  arrived_.notify_all();
  return false;
}

bool Service::member(Visitor& v) {
  Member member;
  std::memcpy(&member, v.buffer.data(), sizeof(member));
  std::lock_guard lock(mutex_);
  const auto found = roots_.find(v.hello.number);
  if (found == roots_.end()) return false;
  Root& root = found->second;
  if (root.fds.empty()) {
    if (member.size < 1 || member.size > kMaxRanks) return false;
    root.size = static_cast<int>(member.size);
    root.first = Clock::now();
  }
  const auto same = [&](const Member& m) { return m.rank == member.rank; };
  root.fds.push_back(v.fd);
  v.step = Step::kJoined;
  if (member.size != static_cast<uint32_t>(root.size) || member.rank >= member.size) {
    finish(found->first, root,
           {ncclInvalidArgument, "members disagree: one was told of " + std::to_string(root.size) +
                                     " ranks, another of " + std::to_string(member.size)});
  } else if (std::any_of(root.members.begin(), root.members.end(), same)) {
    finish(found->first, root,
           {ncclInvalidArgument, "two members call themselves rank " + std::to_string(member.rank)});
  } else {
    root.members.push_back(member);
    if (root.members.size() == member.size) finish(found->first, root, {});
  }
  // finish() closed the sockets of all members, this one's included.
  const bool finished = roots_.count(v.hello.number) == 0;
  if (finished) v.fd = -1;
  return !finished;
}

// Sends the verdict to all who joined and ends the root. Called with the lock held.
void Service::finish(uint64_t number, Root& root, const Outcome& verdict) {
  std::vector<char> message(sizeof(TableHeader));
  TableHeader header{};
  std::memcpy(header.magic, kTableMagic, sizeof(kTableMagic));
  header.code = static_cast<uint32_t>(verdict.code);
  std::strncpy(header.text, verdict.text.c_str(), sizeof(header.text) - 1);
  if (verdict.ok()) {
    std::sort(root.members.begin(), root.members.end(),
              [](const Member& a, const Member& b) { return a.rank < b.rank; });
    header.count = static_cast<uint32_t>(root.members.size());
    const auto* bytes = reinterpret_cast<const char*>(root.members.data());
    message.insert(message.end(), bytes, bytes + root.members.size() * sizeof(Member));
  }
  std::memcpy(message.data(), &header, sizeof(header));
  for (const int fd : root.fds) {
    // At most 16 KiB into an empty socket: it does not block.
    (void)!transfer(fd, message.data(), message.size(), true, Clock::now() + 2s, nullptr, "a member").ok();
    ::close(fd);
    for (Visitor& v : visitors_) {
      if (v.fd == fd) v.fd = -1;
    }
  }
  roots_.erase(number);
}

void Service::dropJoined(int fd) {
  std::lock_guard lock(mutex_);
  for (auto& [number, root] : roots_) {
    if (std::find(root.fds.begin(), root.fds.end(), fd) == root.fds.end()) continue;
    finish(number, root, {ncclRemoteError, "a member died or gave up while the communicator was being made"});
    return;
  }
  ::close(fd);
}

void Service::expireRoots() {
  std::lock_guard lock(mutex_);
  for (auto root = roots_.begin(); root != roots_.end(); ++root) {
    if (root->second.fds.empty() || Clock::now() < root->second.first + kJoinLimit) continue;
    std::string missing;
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(root->second.size); ++rank) {
      const auto is = [&](const Member& m) { return m.rank == rank; };
      if (std::none_of(root->second.members.begin(), root->second.members.end(), is)) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    finish(root->first, root->second,
           {ncclSystemError, "these ranks did not call ncclCommInitRank within ten minutes: " + missing});
    return;
  }
}

}  // namespace halfwire::hostccl
