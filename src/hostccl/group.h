// What ncclGroupStart and ncclGroupEnd collect on a thread, and how it is run.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "hostccl/communicator.h"

namespace halfwire::hostccl {

// Per thread. Every call opens a group of its own if the program has not, so there is one way in.
class Group {
 public:
  static Group& ofThread();

  void start() { ++depth_; }
  // At the outermost end runs what was collected, or starts to where the communicators are non-blocking. The
  // group's first error wins and drops all of it.
  Outcome end();
  // Ends a group without running it.
  void discard();

  // An error of a call inside the group is the group's.
  Outcome note(Outcome outcome);

  void add(const std::shared_ptr<Communicator>& communicator, const CollectiveCall& call,
           cudaStream_t stream);
  void add(const std::shared_ptr<Communicator>& communicator, const PointToPoint& call, cudaStream_t stream);
  // Something that blocks until other ranks do the same (init, split), on behalf of `owner`. The jobs of a
  // group run at the same time.
  void add(const std::shared_ptr<Communicator>& owner, std::function<Outcome()> body);

 private:
  struct Entry {
    std::shared_ptr<Communicator> communicator;
    Batch batch;
  };
  struct Job {
    std::shared_ptr<Communicator> owner;
    std::function<Outcome()> body;
  };

  Batch& batchOf(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream);
  static Outcome runJob(const Job& job);
  static Outcome runJobs(const std::vector<Job>& jobs);
  static Outcome launch(const std::vector<Entry>& entries);
  // Does either on a thread of its own; ncclInProgress.
  static Outcome runBehind(std::vector<Job> jobs, std::vector<Entry> entries);

  int depth_ = 0;
  Outcome error_;
  std::vector<Entry> entries_;  // in order of first call
  std::vector<Job> jobs_;
};

}  // namespace halfwire::hostccl
