#include "hostccl/mesh.h"

#include <gloo/common/error.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <exception>

#include "base/slice.h"
#include "hostccl/sigpipe_guard.h"

namespace halfwire::hostccl {
namespace tcp = gloo::transport::tcp;

namespace {

constexpr uint64_t kFarewellSlot = 1;
constexpr uint64_t kHeardSlot = 2;
// Gloo's own limits only ever hurt: a wait that runs out of time closes every link. Waits end when the mesh
// fails.
constexpr auto kNever = std::chrono::hours(24 * 365);
constexpr char kMark = 1;
constexpr auto kSleepError = std::chrono::microseconds(60);

// One device, and so one I/O thread, for all communicators of the process.
Outcome device(const Service& service, std::shared_ptr<tcp::Device>* out) {
  static std::mutex mutex;
  static auto* device = new std::shared_ptr<tcp::Device>;  // never destroyed: its thread runs until the end
  std::lock_guard lock(mutex);
  if (*device == nullptr) {
    std::string address = service.endpoint().text();
    address.resize(address.rfind(':'));
    if (address.front() == '[') address = address.substr(1, address.size() - 2);
    tcp::attr attributes;
    attributes.hostname = address;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    try {
      *device = std::dynamic_pointer_cast<tcp::Device>(tcp::CreateDevice(attributes));
    } catch (const std::exception& e) {
      pthread_sigmask(SIG_SETMASK, &old, nullptr);
      return {ncclSystemError, std::string("Gloo cannot use this machine's network: ") + e.what()};
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }
  *out = *device;
  return {};
}

std::string firstLine(const char* text) {
  const std::string all(text);
  return all.substr(0, all.find('\n'));
}

Outcome brokenLink(int peer, const char* why) {
  return {ncclRemoteError, "the link to rank " + std::to_string(peer) + " broke: " + firstLine(why)};
}

}  // namespace

// A Gloo pair on a socket that is connected and has proved who is behind it. Gloo opens a listening socket
// for every pair and takes whoever comes first; here that socket lets nobody in and is closed at once.
class LinkPair final : public tcp::Pair {
 public:
  LinkPair(tcp::Context* context, tcp::Device* device, int rank, Mesh* mesh)
      : tcp::Pair(context, device, rank, kNever), mesh_(mesh) {}

  ~LinkPair() override { closeSoftly(); }

  void adopt(int fd) {
    std::lock_guard lock(m_);
    if (fd_ >= 0) {
      device_->unregisterDescriptor(fd_, this);
      ::close(fd_);
    }
    ex_ = nullptr;
    rx_ = tcp::Op();
    fd_ = fd;
    adopted_ = true;
    try {
      handleConnected();
    } catch (...) {
      // The peer may be gone already. Gloo would take the socket for a registered one and end the process.
      ::close(fd_);
      fd_ = -1;
      throw;
    }
  }

  // Ends the connection after the bytes that were written; close() would discard them.
  void closeSoftly() {
    std::lock_guard lock(m_);
    if (state_ != CLOSED) changeState(CLOSED);
  }

  void handleEvents(int events) override {
    if (!adopted_) {
      refuseStranger();
      return;
    }
    // Gloo checks what peers send by throwing, here in its own thread, which would end the process.
    try {
      tcp::Pair::handleEvents(events);
    } catch (const std::exception& e) {
      signalExceptionExternal(e.what());
    }
  }

 protected:
  // Reads the header itself, so that it is checked before Gloo believes it.
  bool read() override {
    if (state_ == CLOSED) return false;
    while (rx_.nread < sizeof(rx_.preamble)) {
      const ssize_t n = ::recv(fd_, reinterpret_cast<char*>(&rx_.preamble) + rx_.nread,
                               sizeof(rx_.preamble) - rx_.nread, 0);
      if (n > 0) {
        rx_.nread += static_cast<size_t>(n);
        if (rx_.nread == sizeof(rx_.preamble) && !acceptable()) return false;
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else if (n < 0 && errno == EAGAIN) {
        return false;
      } else {
        return tcp::Pair::read();  // the end of the connection is Gloo's to report
      }
    }
    const bool data = rx_.getOpcode() == tcp::Op::SEND_UNBOUND_BUFFER;
    const uint64_t slot = rx_.preamble.slot;
    const size_t bytes = rx_.preamble.length;
    if (!tcp::Pair::read()) return false;
    if (data) mesh_->onMessage(rank_, slot, bytes);
    return true;
  }

  void changeState(state next) noexcept override {
    const bool closes = next == CLOSED && state_ != CLOSED;
    const bool was_open = state_ == CONNECTED;
    tcp::Pair::changeState(next);
    if (!closes || !was_open) return;
    std::string why = "the connection was closed";
    if (ex_ != nullptr) {
      try {
        std::rethrow_exception(ex_);
      } catch (const std::exception& e) {
        why = firstLine(e.what());
      } catch (...) {
      }
    }
    mesh_->onClosed(rank_, why);
  }

 private:
  bool acceptable() {
    const auto opcode = rx_.preamble.opcode;
    if (opcode == tcp::Op::NOTIFY_SEND_READY || opcode == tcp::Op::NOTIFY_RECV_READY) return true;
    if (opcode != tcp::Op::SEND_UNBOUND_BUFFER) {
      signalException("it sent a message of unknown kind");
      return false;
    }
    const auto posted = localPendingRecv_.find(rx_.preamble.slot);
    if (posted == localPendingRecv_.end() || posted->second.empty()) {
      signalException("it sent what nobody asked for");
      return false;
    }
    const size_t expected = std::get<2>(posted->second.front());
    if (rx_.preamble.length == expected) return true;
    signalException("it sent " + std::to_string(rx_.preamble.length) + " bytes where " +
                    std::to_string(expected) +
                    " were expected: the ranks must make the same calls with the same counts and types");
    return false;
  }

  void refuseStranger() {
    std::unique_lock lock(m_, std::try_to_lock);
    if (!lock || fd_ < 0 || state_ != LISTENING) return;
    const int stranger = ::accept(fd_, nullptr, nullptr);
    if (stranger >= 0) ::close(stranger);
  }

  Mesh* const mesh_;
  std::atomic<bool> adopted_{false};
};

namespace {

class LinkContext final : public tcp::Context {
 public:
  LinkContext(std::shared_ptr<tcp::Device> device, int rank, int size, Mesh* mesh)
      : tcp::Context(std::move(device), rank, size), mesh_(mesh) {
    setTimeout(kNever);
  }

  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override {
    pairs_[static_cast<size_t>(rank)] = std::make_unique<LinkPair>(this, device_.get(), rank, mesh_);
    return pairs_[static_cast<size_t>(rank)];
  }

  LinkPair* link(int rank) { return static_cast<LinkPair*>(pairs_[static_cast<size_t>(rank)].get()); }

 private:
  Mesh* const mesh_;
};

}  // namespace

struct Mesh::Links {
  std::shared_ptr<LinkContext> context;
};

Message::Message(Mesh* mesh, int peer, bool sends) : mesh_(mesh), peer_(peer), sends_(sends) {}

Message::~Message() {
  {
    std::lock_guard lock(mesh_->mutex_);
    mesh_->pending_.erase(this);
  }
  // Returns only when Gloo's thread is out of the buffer.
  buffer_.reset();
}

bool Message::wait() {
  try {
    return sends_ ? buffer_->waitSend(kNever) : buffer_->waitRecv(kNever);
  } catch (const std::exception& e) {
    mesh_->fail(brokenLink(peer_, e.what()));
    return false;
  }
}

Mesh::Mesh(Service* service, int rank, int size, Link* link)
    : service_(service), rank_(rank), size_(size), link_(link), peers_(static_cast<size_t>(size)) {}

Outcome Mesh::create(Service* service, int rank, const std::vector<int>& fds, Link* link,
                     std::shared_ptr<Mesh>* out) {
  const int size = static_cast<int>(fds.size());
  std::shared_ptr<Mesh> mesh(new Mesh(service, rank, size, link));
  mesh->fds_ = fds;
  if (size == 1) {
    *out = std::move(mesh);
    return {};
  }
  std::shared_ptr<tcp::Device> shared_device;
  if (Outcome o = device(*service, &shared_device); !o.ok()) return o;
  const SigpipeGuard guard;
  try {
    auto context = std::make_shared<LinkContext>(shared_device, rank, size, mesh.get());
    mesh->links_ = std::make_unique<Links>();
    mesh->links_->context = context;
    for (int p = 0; p < size; ++p) {
      if (p != rank) context->createPair(p);
    }
    for (int p = 0; p < size; ++p) {
      if (p != rank) context->link(p)->adopt(fds[static_cast<size_t>(p)]);
    }
  } catch (const std::exception& e) {
    return {ncclSystemError, "Gloo cannot set up the links: " + firstLine(e.what())};
  }
  for (int p = 0; p < size; ++p) {
    if (p == rank) continue;
    Peer& peer = mesh->peers_[static_cast<size_t>(p)];
    auto farewell = mesh->receive(p, kFarewellSlot, &peer.farewell, 1);
    auto heard = mesh->receive(p, kHeardSlot, &peer.heard, 1);
    if (!farewell || !heard) return mesh->error();
    std::lock_guard lock(mesh->mutex_);
    peer.control.push_back(std::move(farewell));
    peer.control.push_back(std::move(heard));
  }
  *out = std::move(mesh);
  return {};
}

Mesh::~Mesh() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;  // links that close from here on are no news
  }
  std::vector<std::unique_ptr<Message>> control;
  for (Peer& peer : peers_) {
    for (auto& message : peer.control) control.push_back(std::move(message));
  }
  // Links first: a pair that meets the remains of a destroyed buffer would spin.
  closeLinks(false);
  control.clear();
  links_.reset();
}

void Mesh::closeLinks(bool hard) {
  if (!links_) return;
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) continue;
    LinkPair* link = links_->context->link(p);
    if (link == nullptr) continue;
    service_->untrackSocket(fds_[static_cast<size_t>(p)]);
    if (hard) {
      link->close();
    } else {
      link->closeSoftly();
    }
  }
}

std::unique_ptr<Message> Mesh::send(int peer, uint64_t slot, const void* data, size_t bytes) {
  return post(peer, slot, const_cast<void*>(data), bytes, true);
}

std::unique_ptr<Message> Mesh::receive(int peer, uint64_t slot, void* data, size_t bytes) {
  return post(peer, slot, data, bytes, false);
}

std::unique_ptr<Message> Mesh::post(int peer, uint64_t slot, void* data, size_t bytes, bool sends) {
  std::unique_ptr<Message> message(new Message(this, peer, sends));
  message->buffer_ = links_->context->createUnboundBuffer(data, bytes);
  const bool control = slot < kFirstSlot;  // a farewell that cannot be said any more is no failure
  {
    std::lock_guard lock(mutex_);
    if (!error_.ok()) return nullptr;
    if (peers_[static_cast<size_t>(peer)].closed) {
      if (control) return nullptr;
      failLocked({ncclRemoteError, "rank " + std::to_string(peer) +
                                       " has destroyed its communicator while this rank still uses it"});
      return nullptr;
    }
    pending_.insert(message.get());
  }
  try {
    if (sends) {
      message->buffer_->send(peer, slot, 0, bytes);
    } else {
      message->buffer_->recv(peer, slot, 0, bytes);
    }
  } catch (const std::exception& e) {
    if (!control) fail(brokenLink(peer, e.what()));
    return nullptr;
  }
  return message;
}

char* Mesh::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();  // before the new one exists
    scratch_bytes_ = 0;
    scratch_.reset(new char[bytes]);
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

bool Mesh::sleepUntil(Link::Time deadline) {
  if (deadline - Link::Clock::now() < kSleepError) return true;
  requestSlice(kLinkSlice);
  std::unique_lock lock(mutex_);
  return !changed_.wait_until(lock, deadline, [&] { return !error_.ok(); });
}

Outcome Mesh::error() {
  std::lock_guard lock(mutex_);
  return error_;
}

void Mesh::fail(const Outcome& reason) {
  std::lock_guard lock(mutex_);
  failLocked(reason);
}

void Mesh::failLocked(const Outcome& reason) {
  if (!error_.ok() || leaving_) return;
  error_ = reason;
  for (Message* message : pending_) {
    message->buffer_->abortWaitRecv();
    message->buffer_->abortWaitSend();
  }
  changed_.notify_all();
  // Closing waits for Gloo's thread, which may be the one that is here.
  if (auto self = weak_from_this().lock()) {
    service_->post([mesh = std::move(self)] { mesh->closeLinks(true); });
  }
}

void Mesh::onMessage(int peer_rank, uint64_t slot, size_t bytes) {
  if (slot >= kFirstSlot) {
    if (link_ == nullptr) return;
    requestSlice(kLinkSlice);
    link_->arrive(bytes, Link::Clock::now());
    return;
  }
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  if (slot == kHeardSlot) {
    peer.knows = true;
    changed_.notify_all();
    return;
  }
  peer.left = true;
  auto self = weak_from_this().lock();
  if (!self) return;
  // All it sent before has been read, in order: it may go.
  service_->post([mesh = std::move(self), peer_rank] {
    auto message = mesh->send(peer_rank, kHeardSlot, &kMark, 1);
    std::lock_guard lock(mesh->mutex_);
    if (message) mesh->peers_[static_cast<size_t>(peer_rank)].control.push_back(std::move(message));
  });
}

void Mesh::onClosed(int peer_rank, const std::string& why) {
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  peer.closed = true;
  changed_.notify_all();
  // Who said farewell has sent all it had to; whatever still waits for it learns from Gloo that the link is
  // closed.
  if (!leaving_ && !peer.left) {
    failLocked({ncclRemoteError, "rank " + std::to_string(peer_rank) + " is gone: " + why});
  }
}

void Mesh::leave(std::chrono::milliseconds limit) {
  if (size_ == 1) return;
  const SigpipeGuard guard;
  std::vector<std::unique_ptr<Message>> farewells;
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) continue;
    {
      std::lock_guard lock(mutex_);
      if (!error_.ok()) return;
      if (peers_[static_cast<size_t>(p)].closed) continue;
    }
    farewells.push_back(send(p, kFarewellSlot, &kMark, 1));
  }
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] {
    if (!error_.ok()) return true;
    for (int p = 0; p < size_; ++p) {
      const Peer& peer = peers_[static_cast<size_t>(p)];
      if (p != rank_ && !peer.knows && !peer.closed) return false;
    }
    return true;
  });
  leaving_ = true;
  lock.unlock();
  closeLinks(false);
}

}  // namespace halfwire::hostccl
