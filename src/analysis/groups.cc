#include "analysis/groups.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

namespace halfwire::analysis {
namespace {

// One collective on the ranks that took part: (index of the lane, index of its comm).
using Match = std::vector<std::pair<size_t, size_t>>;

int64_t duration(const CommInterval& c) { return c.end_ns - c.start_ns; }

class Matcher {
 public:
  explicit Matcher(const std::vector<RankLane>& lanes) : lanes_(lanes) {}

  std::vector<Match> run(size_t* mismatched) {
    // By recorded list of ranks; collectives without one belong to everybody.
    std::map<std::string, std::vector<std::vector<size_t>>> sequences;
    for (size_t r = 0; r < lanes_.size(); ++r) {
      const auto& comms = lanes_[r].lane->comms;
      for (size_t i = 0; i < comms.size(); ++i) {
        std::string key;
        if (comms[i].info.group_ranks != trace::kNone) {
          key = lanes_[r].names->at(static_cast<uint32_t>(comms[i].info.group_ranks));
        }
        auto& lists = sequences[key];
        lists.resize(lanes_.size());
        lists[r].push_back(i);
      }
    }
    // If only some of the collectives say whom they belong to, they cannot be told apart on every rank.
    if (sequences.size() == 2 && sequences.begin()->first.empty()) {
      sequences.clear();
      auto& lists = sequences[""];
      lists.resize(lanes_.size());
      for (size_t r = 0; r < lanes_.size(); ++r) {
        lists[r].resize(lanes_[r].lane->comms.size());
        std::iota(lists[r].begin(), lists[r].end(), size_t{0});
      }
    }
    std::vector<Match> matches;
    for (auto& [key, lists] : sequences) matchSequence(lists, &matches, mismatched);
    return matches;
  }

 private:
  const CommInterval& comm(size_t r, size_t i) const { return lanes_[r].lane->comms[i]; }

  void matchSequence(const std::vector<std::vector<size_t>>& lists, std::vector<Match>* matches,
                     size_t* mismatched) const {
    std::vector<size_t> members;
    size_t aligned = std::numeric_limits<size_t>::max();
    for (size_t r = 0; r < lists.size(); ++r) {
      if (lists[r].empty()) continue;
      members.push_back(r);
      aligned = std::min(aligned, lists[r].size());
    }
    if (members.size() < 2) return;
    std::vector<Match> found;
    size_t wrong = 0;
    for (size_t k = aligned; k-- > 0;) {
      Match m;
      for (const size_t r : members) m.emplace_back(r, lists[r][lists[r].size() - 1 - k]);
      for (const auto& [r, i] : m) {
        if (comm(r, i).info.type == comm(m[0].first, m[0].second).info.type) continue;
        ++wrong;
        break;
      }
      found.push_back(std::move(m));
    }
    if (wrong > 0) {
      found.clear();
      *mismatched += wrong;
      std::map<trace::Collective, std::vector<std::vector<size_t>>> by_type;
      for (const size_t r : members) {
        for (const size_t i : lists[r]) {
          auto& typed = by_type[comm(r, i).info.type];
          typed.resize(lists.size());
          typed[r].push_back(i);
        }
      }
      for (const auto& [type, typed] : by_type) {
        size_t n = std::numeric_limits<size_t>::max();
        for (const size_t r : members) n = std::min(n, typed[r].size());
        for (size_t k = n; k-- > 0;) {
          Match m;
          for (const size_t r : members) m.emplace_back(r, typed[r][typed[r].size() - 1 - k]);
          found.push_back(std::move(m));
        }
      }
    }
    matches->insert(matches->end(), found.begin(), found.end());
  }

  const std::vector<RankLane>& lanes_;
};

// What the lane did in [from, to).
void addCauses(const Lane& lane, int64_t from, int64_t to, std::array<int64_t, kLateCauses>* causes) {
  if (to <= from) return;
  auto it = std::partition_point(lane.segments.begin(), lane.segments.end(),
                                 [&](const Segment& s) { return s.end_ns <= from; });
  auto gap = std::partition_point(lane.gaps.begin(), lane.gaps.end(),
                                  [&](const Gap& g) { return g.end_ns <= from; });
  for (; it != lane.segments.end() && it->start_ns < to; ++it) {
    const int64_t part = std::min(to, it->end_ns) - std::max(from, it->start_ns);
    switch (it->state) {
      case State::kCompute:
      case State::kHidden:
        (*causes)[kIdleCauses] += part;
        break;
      case State::kExposed:
        (*causes)[kIdleCauses + 1] += part;
        break;
      case State::kCopy:
        (*causes)[kIdleCauses + 2] += part;
        break;
      case State::kIdle: {
        while (gap != lane.gaps.end() && gap->start_ns < it->start_ns) ++gap;
        if (gap == lane.gaps.end() || gap->start_ns != it->start_ns) break;
        const double share = static_cast<double>(part) / static_cast<double>(gap->end_ns - gap->start_ns);
        for (int c = 0; c < kIdleCauses; ++c) {
          (*causes)[c] += static_cast<int64_t>(static_cast<double>(gap->causes[c]) * share);
        }
        break;
      }
    }
  }
}

int64_t median(std::vector<int64_t> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

const char* lateCauseName(int cause) {
  if (cause < kIdleCauses) return kIdleCauseNames[cause];
  return cause == kIdleCauses ? "compute" : cause == kIdleCauses + 1 ? "communication" : "copy";
}

Group matchRanks(const std::vector<RankLane>& lanes) {
  Group group;
  const size_t n = lanes.size();
  for (const RankLane& l : lanes) group.ranks.push_back(l.rank);
  group.wait_ns.assign(n, 0);
  group.exposed_wait_ns.assign(n, 0);
  group.exposed_needed_ns.assign(n, 0);
  group.needed.resize(n);
  for (size_t r = 0; r < n; ++r) {
    for (const CommInterval& c : lanes[r].lane->comms) group.needed[r].push_back(duration(c));
  }
  const std::vector<Match> matches = Matcher(lanes).run(&group.mismatched);
  group.matched = matches.size();
  const auto comm = [&](const std::pair<size_t, size_t>& p) -> const CommInterval& {
    return lanes[p.first].lane->comms[p.second];
  };

  // Ranks leave a collective together: their clocks differ by the median difference of the ends.
  std::vector<std::vector<int64_t>> differences(n);
  for (const Match& m : matches) {
    const int64_t reference = comm(m[0]).end_ns + lanes[m[0].first].base_ns;
    for (const auto& p : m)
      differences[p.first].push_back(comm(p).end_ns + lanes[p.first].base_ns - reference);
  }
  std::vector<int64_t> offset(n, 0);
  for (size_t r = 0; r < n; ++r) offset[r] = median(differences[r]);

  std::vector<LateRank> late(n);
  std::vector<int64_t> skews;
  for (size_t r = 0; r < n; ++r) late[r].rank = lanes[r].rank;
  for (const Match& m : matches) {
    const auto& last = *std::min_element(m.begin(), m.end(), [&](const auto& a, const auto& b) {
      return duration(comm(a)) < duration(comm(b));
    });
    const int64_t needed = duration(comm(last));
    group.intrinsic_ns = addSaturated(group.intrinsic_ns, needed);
    int64_t total = 0;
    int64_t longest = 0;
    int64_t first_end = std::numeric_limits<int64_t>::max();
    int64_t last_end = std::numeric_limits<int64_t>::min();
    for (const auto& p : m) {
      const int64_t wait = duration(comm(p)) - needed;
      group.wait_ns[p.first] = addSaturated(group.wait_ns[p.first], wait);
      group.needed[p.first][p.second] = needed;
      total = addSaturated(total, wait);
      longest = std::max(longest, wait);
      const int64_t end = comm(p).end_ns + lanes[p.first].base_ns - offset[p.first];
      first_end = std::min(first_end, end);
      last_end = std::max(last_end, end);
    }
    skews.push_back(last_end - first_end);
    LateRank& blamed = late[last.first];
    blamed.blame_ns = addSaturated(blamed.blame_ns, total / static_cast<int64_t>(m.size() - 1));
    const int64_t arrival = comm(last).start_ns;
    addCauses(*lanes[last.first].lane, arrival - longest, arrival, &blamed.causes);
  }
  for (size_t r = 0; r < n; ++r) {
    const auto& comms = lanes[r].lane->comms;
    for (size_t i = 0; i < comms.size(); ++i) {
      const int64_t need = std::min(comms[i].exposed_ns, group.needed[r][i]);
      group.exposed_needed_ns[r] += need;
      group.exposed_wait_ns[r] += comms[i].exposed_ns - need;
    }
    late[r].cause = static_cast<int>(std::max_element(late[r].causes.begin(), late[r].causes.end()) -
                                     late[r].causes.begin());
  }
  group.end_skew_median_ns = median(skews);
  group.end_skew_max_ns = skews.empty() ? 0 : *std::max_element(skews.begin(), skews.end());
  std::erase_if(late, [](const LateRank& l) { return l.blame_ns == 0; });
  std::stable_sort(late.begin(), late.end(),
                   [](const LateRank& a, const LateRank& b) { return a.blame_ns > b.blame_ns; });
  group.late = std::move(late);
  return group;
}

}  // namespace halfwire::analysis
