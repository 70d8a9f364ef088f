#include "hostccl/group.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <utility>

#include "base/units.h"
#include "hostccl/digest.h"

namespace halfwire::hostccl {
namespace {

// HALFWIRE_HOST_DELAY_US delays what happens behind the caller's back too.
void pauseAsStreamsDo() {
  const char* text = std::getenv("HALFWIRE_HOST_DELAY_US");
  if (text == nullptr) return;
  const Result<int64_t> most = parseInteger(text, 0, 10'000'000, "HALFWIRE_HOST_DELAY_US");
  uint64_t random = 0;
  if (!most.ok() || most.value() == 0 || !fillRandom({reinterpret_cast<uint8_t*>(&random), sizeof(random)}))
    return;
  std::this_thread::sleep_for(std::chrono::microseconds(random % static_cast<uint64_t>(most.value() + 1)));
}

}  // namespace

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

void Group::add(const std::shared_ptr<Communicator>& owner, std::function<Outcome()> body) {
  jobs_.push_back({owner, std::move(body)});
}

Outcome Group::end() {
  if (depth_ == 0) return {ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart"};
  if (--depth_ > 0) return {};
  std::vector<Entry> entries = std::exchange(entries_, {});
  std::vector<Job> jobs = std::exchange(jobs_, {});
  if (Outcome error = std::exchange(error_, {}); !error.ok()) return error;
  if (!jobs.empty() && !entries.empty()) {
    return {ncclInvalidUsage, "a group holds either calls that make communicators or collectives, not both"};
  }
  size_t behind = 0;
  for (const Entry& e : entries) behind += e.communicator->blocking() ? 0 : 1;
  for (const Job& j : jobs) behind += j.owner->blocking() ? 0 : 1;
  if (behind > 0 && behind < entries.size() + jobs.size()) {
    return {ncclInvalidArgument, "blocking and nonblocking communicators are not allowed in the same group"};
  }
  for (const Job& j : jobs) j.owner->begin();
  if (behind > 0) return runBehind(std::move(jobs), std::move(entries));
  if (Outcome o = runJobs(jobs); !o.ok()) return o;
  return launch(entries);
}

void Group::discard() {
  if (depth_ == 0 || --depth_ > 0) return;
  entries_.clear();
  jobs_.clear();
  error_ = {};
}

Outcome Group::runBehind(std::vector<Job> jobs, std::vector<Entry> entries) {
  struct Work {
    std::vector<Job> jobs;
    std::vector<Entry> entries;
  };
  for (const Entry& e : entries) e.communicator->begin();
  const auto work = std::make_shared<Work>(Work{std::move(jobs), std::move(entries)});
  const auto finish = [](const Work& w, const Outcome& outcome) {
    for (const Entry& e : w.entries) e.communicator->finish(outcome);
  };
  try {
    std::thread([work, finish] {
      pauseAsStreamsDo();
      (void)runJobs(work->jobs);
      finish(*work, launch(work->entries));
    }).detach();
  } catch (const std::system_error&) {
    const Outcome failure{ncclSystemError, "cannot start a thread: raise the limit of threads"};
    for (const Job& job : work->jobs) job.owner->finish(failure);
    finish(*work, failure);
    return failure;
  }
  return {ncclInProgress, ""};
}

Outcome Group::runJob(const Job& job) {
  Outcome outcome;
  try {
    outcome = job.body();
  } catch (const std::exception& e) {
    outcome = {ncclSystemError, e.what()};
  }
  // Who waited has been told; who did not asks later.
  job.owner->finish(job.owner->blocking() ? Outcome{} : outcome);
  return outcome;
}

Outcome Group::runJobs(const std::vector<Job>& jobs) {
  std::vector<Outcome> outcomes(jobs.size());
  std::vector<std::thread> threads;
  for (size_t i = 1; i < jobs.size(); ++i) {
    try {
      threads.emplace_back([&, i] { outcomes[i] = runJob(jobs[i]); });
    } catch (const std::system_error&) {
      outcomes[i] = {ncclSystemError, "cannot start a thread: raise the limit of threads"};
      jobs[i].owner->finish(outcomes[i]);
    }
  }
  if (!jobs.empty()) outcomes[0] = runJob(jobs[0]);
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
