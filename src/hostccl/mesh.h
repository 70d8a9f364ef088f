// The links of one rank to all other ranks of a communicator, over Gloo. The only files that know Gloo.
//
// What Gloo lacks and this adds: a link that breaks ends every wait on every link (in Gloo only those on that
// link), a farewell tells a rank that leaves from a rank that died, and nothing a peer sends ends the
// process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "hostccl/link.h"
#include "hostccl/outcome.h"
#include "hostccl/service.h"

namespace gloo::transport {
class UnboundBuffer;
}

namespace halfwire::hostccl {

class Mesh;

// One send or receive under way. Its memory must live as long as it.
class Message {
 public:
  ~Message();
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  // Blocks until the bytes have left (send) or arrived (receive); false once the mesh has failed.
  bool wait();

 private:
  friend class Mesh;
  Message(Mesh* mesh, int peer, bool sends);

  Mesh* const mesh_;
  const int peer_;
  const bool sends_;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer_;
};

// Thread-safe. Messages between two ranks with one slot are matched in the order of their posting.
class Mesh : public std::enable_shared_from_this<Mesh> {
 public:
  // Takes the sockets over (fds[p] leads to rank p, -1 for oneself). `link` may be null.
  static Outcome create(Service* service, int rank, const std::vector<int>& fds, Link* link,
                        std::shared_ptr<Mesh>* out);
  ~Mesh();

  int rank() const { return rank_; }
  int size() const { return size_; }
  Link* link() const { return link_; }

  // Null once the mesh has failed. `bytes` must not be 0; both ends must agree on it.
  std::unique_ptr<Message> send(int peer, uint64_t slot, const void* data, size_t bytes);
  std::unique_ptr<Message> receive(int peer, uint64_t slot, void* data, size_t bytes);

  // At least `bytes` of memory for the operation under way (a communicator runs one at a time). Kept for the
  // next.
  char* scratch(size_t bytes);

  // Sleeps until `deadline`, not at all where it is nearer than a sleep is exact; false once the mesh has
  // failed.
  bool sleepUntil(Link::Time deadline);

  // Why the mesh failed, or success.
  Outcome error();
  // Ends all waits, now and later, and closes all links, which ends the peers' waits too. The first reason
  // stays.
  void fail(const Outcome& reason);
  // Takes leave of all peers: after it, the end of this rank's links is no failure to them. Requires that all
  // messages are done. Returns when all peers have heard it or after `limit`.
  void leave(std::chrono::milliseconds limit);

  // Slots below this are the mesh's own.
  static constexpr uint64_t kFirstSlot = 16;

 private:
  friend class Message;
  friend class LinkPair;
  struct Links;
  struct Peer {
    char farewell = 0, heard = 0;                    // written by Gloo's thread
    bool seen_farewell = false, seen_heard = false;  // that thread's
    bool left = false;                               // said farewell
    bool knows = false;                              // has heard our farewell
    bool closed = false;
    std::vector<std::unique_ptr<Message>> control;
  };

  Mesh(Service* service, int rank, int size, Link* link);
  std::unique_ptr<Message> post(int peer, uint64_t slot, void* data, size_t bytes, bool sends);
  void failLocked(const Outcome& reason);
  void closeLinks(bool hard);
  // From Gloo's thread (or whoever closes a link), with that link locked.
  void onMessage(int peer, uint64_t slot, size_t bytes);
  void onClosed(int peer, const std::string& why);

  Service* const service_;
  const int rank_;
  const int size_;
  Link* const link_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool leaving_ = false;
  Outcome error_;
  std::set<Message*> pending_;
  std::vector<Peer> peers_;
  std::vector<int> fds_;
  std::unique_ptr<char[]> scratch_;
  size_t scratch_bytes_ = 0;
  std::unique_ptr<Links> links_;
};

}  // namespace halfwire::hostccl
