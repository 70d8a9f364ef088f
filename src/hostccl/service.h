// The one listening socket and the one helper thread of a process that uses the host engine.
//
// Everybody who connects must prove that it knows the token of a communicator that is being made here, over a
// nonce of ours (so that a recorded handshake is worth nothing), and gets the same proof back; only then does
// a byte of his reach anything else. Two kinds of visitors:
//  * join: a member of a communicator whose unique id was made here. The last one to join gets everyone the
//  table of
//    all members.
//  * pair: a member that connects to a member here. Its socket becomes the link between the two.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hostccl/outcome.h"
#include "hostccl/unique_id.h"

namespace halfwire::hostccl {

constexpr int kMaxRanks = 256;

// One member, as the others need to know it.
struct Member {
  Endpoint endpoint;
  uint32_t rank = 0;
  uint32_t size = 0;  // of the communicator, as this member was told
  uint32_t device = 0;
  uint64_t process = 0;  // random, equal for members of one process
  uint32_t paced = 0;    // whether it emulates a link, which decides how messages are cut
  uint8_t reserved[20] = {};
};
static_assert(sizeof(Member) == 64);

// Set by Abort to end a wait of another thread.
using Cancel = std::atomic<bool>;

class Service {
 public:
  // The process's service; starts it at the first call. It lives until the process ends.
  static Outcome get(Service** out);

  const Endpoint& endpoint() const { return endpoint_; }
  uint64_t process() const { return process_; }

  // Makes a unique id whose members will meet here.
  Outcome makeIdentity(Identity* out);

  // Joins the communicator `identity` where its id was made; waits for all members. `self.rank` and `.size`
  // are set.
  Outcome join(const Identity& identity, Member self, const Cancel& cancel, std::vector<Member>* members);

  // Connects `rank` with all others. Collective over the members, each of which must have called expect()
  // before any of them calls this. fds[p] is the socket to p, -1 for oneself.
  Outcome connectAll(uint64_t number, const Token& token, int rank, const std::vector<Member>& members,
                     const Cancel& cancel, std::vector<int>* fds);
  // From now on visitors of that communicator are let in (they wait until connectAll).
  void expect(uint64_t number, const Token& token, int rank, int size);
  // Forgets what expect() announced and closes what came.
  void forget(uint64_t number, int rank);

  // Runs `task` soon on the helper thread. Tasks must not block for long.
  void post(std::function<void()> task);

  // A socket to close in children after fork, who would otherwise keep dead peers' links open.
  void trackSocket(int fd);
  void untrackSocket(int fd);

 private:
  using Clock = std::chrono::steady_clock;
  enum class Step { kHello, kProof, kMember, kJoined };
  struct Visitor;
  struct Root {
    Token token{};
    int size = 0;
    std::vector<Member> members;  // those who joined
    std::vector<int> fds;
    Clock::time_point first;
  };
  struct Gathering {
    Token token{};
    std::vector<int> fds;
  };

  Service() = default;
  Outcome start();
  void run();
  void accept();
  bool readable(Visitor& visitor);
  bool hello(Visitor& visitor);
  bool proof(Visitor& visitor);
  bool member(Visitor& visitor);
  void finish(uint64_t number, Root& root, const Outcome& verdict);
  void dropJoined(int fd);
  void expireRoots();

  Endpoint endpoint_;
  uint64_t process_ = 0;
  int listener_ = -1;
  int wake_ = -1;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<std::function<void()>> tasks_;
  std::map<uint64_t, Root> roots_;
  std::map<std::pair<uint64_t, int>, Gathering> gatherings_;  // by communicator and own rank
  std::list<Visitor> visitors_;                               // the helper thread's alone
};

}  // namespace halfwire::hostccl
