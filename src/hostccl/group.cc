#include "hostccl/group.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

namespace halfwire::hostccl {

Group& Group::ofThread() {
  thread_local Group group;
  return group;
}

Outcome Group::note(Outcome outcome) {
  if (!outcome.ok() && error_.ok()) error_ = outcome;
  return outcome;
}

Batch& Group::batchOf(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream) {
  auto entry = std::find_if(entries_.begin(), entries_.end(),
                            [&](const Entry& e) { return e.communicator == communicator; });
  if (entry == entries_.end()) entry = entries_.insert(entries_.end(), Entry{communicator, {}});
  auto& streams = entry->batch.streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  return entry->batch;
}

void Group::add(const std::shared_ptr<Communicator>& communicator, const CollectiveCall& call,
                cudaStream_t stream) {
  batchOf(communicator, stream).collectives.push_back(call);
}

void Group::add(const std::shared_ptr<Communicator>& communicator, const PointToPoint& call,
                cudaStream_t stream) {
  batchOf(communicator, stream).messages.push_back(call);
}

void Group::add(std::function<Outcome()> job) { jobs_.push_back(std::move(job)); }

Outcome Group::end() {
  if (depth_ == 0) return {ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart"};
  if (--depth_ > 0) return {};
  const std::vector<Entry> entries = std::exchange(entries_, {});
  std::vector<std::function<Outcome()>> jobs = std::exchange(jobs_, {});
  if (Outcome error = std::exchange(error_, {}); !error.ok()) return error;
  if (!jobs.empty() && !entries.empty()) {
    return {ncclInvalidUsage, "a group holds either calls that make communicators or collectives, not both"};
  }
  if (Outcome o = runJobs(std::move(jobs)); !o.ok()) return o;
  return launch(entries);
}

void Group::discard() {
  if (depth_ == 0 || --depth_ > 0) return;
  entries_.clear();
  jobs_.clear();
  error_ = {};
}

Outcome Group::runJobs(std::vector<std::function<Outcome()>> jobs) {
  std::vector<Outcome> outcomes(jobs.size());
  std::vector<std::thread> threads;
  Outcome failure;
  for (size_t i = 1; i < jobs.size(); ++i) {
    try {
      threads.emplace_back([&, i] { outcomes[i] = jobs[i](); });
    } catch (const std::system_error&) {
      outcomes[i] = {ncclSystemError, "cannot start a thread: raise the limit of threads"};
    }
  }
  if (!jobs.empty()) outcomes[0] = jobs[0]();
  for (std::thread& thread : threads) thread.join();
  for (const Outcome& outcome : outcomes) {
    if (!outcome.ok()) return outcome;
  }
  return {};
}

// Clique by clique in order of first call, a clique being the communicators of this process that one unique
// id (or one split) made; in a clique collectives go before point-to-point calls.
Outcome Group::launch(const std::vector<Entry>& entries) {
  std::vector<bool> done(entries.size(), false);
  for (size_t head = 0; head < entries.size(); ++head) {
    if (done[head]) continue;
    std::vector<const Entry*> clique;
    for (size_t i = head; i < entries.size(); ++i) {
      if (entries[i].communicator->number() != entries[head].communicator->number()) continue;
      clique.push_back(&entries[i]);
      done[i] = true;
    }
    for (const Entry* e : clique) {
      if (Outcome o = e->communicator->join(e->batch); !o.ok()) return o;
    }
    for (const Entry* e : clique) {
      if (Outcome o = e->communicator->launchCollectives(e->batch); !o.ok()) return o;
    }
    for (const Entry* e : clique) {
      if (Outcome o = e->communicator->launchMessages(e->batch); !o.ok()) return o;
    }
    for (const Entry* e : clique) {
      if (Outcome o = e->communicator->fork(e->batch); !o.ok()) return o;
    }
  }
  return {};
}

}  // namespace halfwire::hostccl
