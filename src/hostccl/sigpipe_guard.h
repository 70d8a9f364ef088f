// Blocks SIGPIPE on this thread for a while: Gloo writes to sockets without MSG_NOSIGNAL.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

namespace halfwire::hostccl {

class SigpipeGuard {
 public:
  SigpipeGuard() {
    sigset_t pipe = onlyPipe();
    pthread_sigmask(SIG_BLOCK, &pipe, &old_);
  }
  ~SigpipeGuard() {
    if (sigismember(&old_, SIGPIPE) == 1) return;
    const sigset_t pipe = onlyPipe();
    const timespec none{};
    while (sigtimedwait(&pipe, nullptr, &none) == SIGPIPE) {
    }
    pthread_sigmask(SIG_SETMASK, &old_, nullptr);
  }
  SigpipeGuard(const SigpipeGuard&) = delete;
  SigpipeGuard& operator=(const SigpipeGuard&) = delete;

 private:
  static sigset_t onlyPipe() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    return set;
  }
  sigset_t old_;
};

}  // namespace halfwire::hostccl
