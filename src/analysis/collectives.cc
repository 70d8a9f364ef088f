#include "analysis/collectives.h"

#include <algorithm>
#include <bit>
#include <map>
#include <tuple>

namespace halfwire::analysis {

using trace::Collective;
using trace::CommInfo;
using trace::ElementType;

int64_t collectiveBytes(const CommInfo& info) {
  const int size = trace::elementSize(info.element);
  if (!info.has_sizes || size == 0) return -1;
  constexpr int64_t kMost = int64_t{1} << 50;
  int64_t elements = info.in_elements;
  if (info.type == Collective::kAllGather || info.type == Collective::kGather) {
    elements = info.out_elements > 0 ? info.out_elements : info.in_elements * std::max(1, info.group_size);
  } else if (info.type == Collective::kBroadcast || info.type == Collective::kSendRecv) {
    elements = std::max(info.in_elements, info.out_elements);
  }
  if (elements < 0 || elements > kMost) return -1;
  return elements * size;
}

double busFactor(Collective type, int ranks) {
  if (ranks < 2) return 1;
  const double n = ranks;
  switch (type) {
    case Collective::kAllReduce:
      return 2 * (n - 1) / n;
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
    case Collective::kGather:
    case Collective::kScatter:
      return (n - 1) / n;
    default:
      return 1;
  }
}

double fp8Saving(ElementType element) {
  constexpr double kPacked = 1.0 + 4.0 / 128.0;
  switch (element) {
    case ElementType::kFp32:
      return 1 - kPacked / 4;
    case ElementType::kFp16:
    case ElementType::kBf16:
    case ElementType::kUnknown:
      return 1 - kPacked / 2;
    default:
      return 0;
  }
}

std::vector<CollectiveRow> tabulate(const trace::Strings& names, const std::vector<CommInterval>& comms,
                                    const std::vector<int64_t>& needed, int world_size) {
  using Key = std::tuple<Collective, ElementType, uint64_t, int32_t>;
  struct Sized {
    int64_t busy_ns = 0;
    double bus_bytes = 0;
  };
  std::map<Key, CollectiveRow> rows;
  std::map<Key, Sized> sized;
  for (size_t i = 0; i < comms.size(); ++i) {
    const CommInterval& c = comms[i];
    const int64_t bytes = collectiveBytes(c.info);
    const uint64_t bucket = bytes > 0 ? std::bit_floor(static_cast<uint64_t>(bytes)) : 0;
    const Key key{c.info.type, c.info.element, bucket, c.info.group_name};
    CollectiveRow& row = rows[key];
    row.type = c.info.type;
    row.element = c.info.element;
    row.bucket = bucket;
    if (c.info.group_name != trace::kNone) row.group = names.at(static_cast<uint32_t>(c.info.group_name));
    const int64_t duration = c.end_ns - c.start_ns;
    const int64_t need = needed.empty() ? duration : std::min(duration, needed[i]);
    ++row.count;
    row.busy_ns = addSaturated(row.busy_ns, duration);
    row.exposed_ns += c.exposed_ns;
    row.needed_ns = addSaturated(row.needed_ns, need);
    row.exposed_needed_ns += std::min(c.exposed_ns, need);
    if (bytes >= 0) {
      ++row.sized;
      row.bytes = addSaturated(row.bytes, bytes);
      Sized& s = sized[key];
      s.busy_ns = addSaturated(s.busy_ns, need);
      s.bus_bytes += static_cast<double>(bytes) *
                     busFactor(c.info.type, c.info.group_size > 0 ? c.info.group_size : world_size);
    }
  }
  std::vector<CollectiveRow> out;
  for (auto& [key, row] : rows) {
    const Sized& s = sized[key];
    if (s.busy_ns > 0) {
      row.algbw_gbps = static_cast<double>(row.bytes) / static_cast<double>(s.busy_ns);
      row.busbw_gbps = s.bus_bytes / static_cast<double>(s.busy_ns);
    }
    row.saving = row.type == Collective::kBarrier ? 0 : fp8Saving(row.element);
    out.push_back(std::move(row));
  }
  std::stable_sort(out.begin(), out.end(), [](const CollectiveRow& a, const CollectiveRow& b) {
    return a.exposed_ns > b.exposed_ns;
  });
  return out;
}

}  // namespace halfwire::analysis
