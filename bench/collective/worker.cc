// One rank of `halfwire bench collective`, started by it with libhalfwire.so preloaded. NCCL's public names
// are compressed then, their pncclX twins are not: so exact, compressed and bare-packet collectives alternate
// in one run over the same links. Usage: halfwire-bench-ENGINE CONFIG.json RESULT.json; rank 0 writes the
// result.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "abi/cuda_runtime.h"
#include "abi/nccl.h"
#include "data.h"
#include "engine.h"
#include "launch/rendezvous.h"
#include "policy/policy.h"
#include "policy/run_log_json.h"
#include "ring.h"

namespace halfwire::bench {
namespace {

struct Config {
  CollectiveOp op = CollectiveOp::kAllReduce;
  ncclDataType_t type = ncclBfloat16;
  std::vector<uint64_t> bytes;
  int repeat = 5;
  WireFormat format;
  uint64_t chunk_bytes = 0;
  bool share_gpu = false;
};

[[noreturn]] void die(const std::string& what) {
  fmt::print(stderr, "halfwire-bench-{}: {}\n", engineName(), what);
  std::exit(1);
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) die(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}
void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess)
    die(fmt::format("{}: {} ({})", what, pncclGetErrorString(result), pncclGetLastError(nullptr)));
}
void check(const Status& status) {
  if (!status.ok()) die(status.message());
}

class Buffer {
 public:
  explicit Buffer(uint64_t bytes) {
    check(cudaMalloc(&data_, std::max<uint64_t>(bytes, 16)), "no memory for the buffers");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* get() const { return static_cast<char*>(data_); }

  // Between host memory and this buffer, whose memory the host need not reach.
  void upload(const void* from, uint64_t bytes, uint64_t offset = 0) {
    check(cudaMemcpy(get() + offset, from, bytes, cudaMemcpyHostToDevice), "cannot copy to the buffers");
  }
  void download(void* to, uint64_t bytes, uint64_t offset = 0) const {
    check(cudaMemcpy(to, get() + offset, bytes, cudaMemcpyDeviceToHost), "cannot copy from the buffers");
  }

 private:
  void* data_ = nullptr;
};

Config readConfig(const char* path) {
  std::ifstream in(path);
  const auto json = nlohmann::json::parse(in, nullptr, false);
  if (json.is_discarded()) die(fmt::format("{} is not readable", path));
  Config c;
  c.op = static_cast<CollectiveOp>(json.at("op").get<int>());
  c.type = static_cast<ncclDataType_t>(json.at("type").get<int>());
  c.bytes = json.at("bytes").get<std::vector<uint64_t>>();
  c.repeat = json.at("repeat").get<int>();
  c.format.element = static_cast<ElementFormat>(json.at("format").get<int>());
  c.format.scale = static_cast<ScaleFormat>(json.at("scale").get<int>());
  c.format.block = json.at("block").get<uint16_t>();
  c.chunk_bytes = json.at("chunk_bytes").get<uint64_t>();
  c.share_gpu = json.at("share_gpu").get<bool>();
  return c;
}

// The ranks' own channel, never compressed and not under test.
class Control {
 public:
  explicit Control(const RankInfo& info) : info_(info), values_(64) {
    ncclUniqueId id{};
    if (info.rank == 0) check(pncclGetUniqueId(&id), "cannot make an id");
    check(shareFromRankZero(info, std::span(id.internal, sizeof id.internal)));
    check(pncclCommInitRank(&comm_, info.ranks, id, info.rank), "cannot connect the ranks");
    check(cudaStreamCreate(&stream_), "no stream");
  }
  // Collective: element-wise over the ranks.
  template <class T>
  std::vector<T> reduce(std::vector<T> values, ncclDataType_t type, ncclRedOp_t op) {
    if (values.size() * sizeof(T) > 64) die("too many values");
    const uint64_t bytes = values.size() * sizeof(T);
    values_.upload(values.data(), bytes);
    check(pncclAllReduce(values_.get(), values_.get(), values.size(), type, op, comm_, stream_),
          "cannot exchange results");
    check(cudaStreamSynchronize(stream_), "cannot exchange results");
    values_.download(values.data(), bytes);
    return values;
  }
  double sum(double v) { return reduce<double>({v}, ncclFloat64, ncclSum)[0]; }
  double max(double v) { return reduce<double>({v}, ncclFloat64, ncclMax)[0]; }
  void barrier() { (void)sum(0); }
  bool same(uint64_t v) {
    return reduce<uint64_t>({v}, ncclUint64, ncclMax) == reduce<uint64_t>({v}, ncclUint64, ncclMin);
  }

  // A communicator that the preloaded library follows.
  ncclComm_t newCommunicator() {
    ncclUniqueId id{};
    if (info_.rank == 0) check(ncclGetUniqueId(&id), "cannot make an id");
    Buffer bytes(sizeof id.internal);
    bytes.upload(id.internal, sizeof id.internal);
    check(pncclBroadcast(bytes.get(), bytes.get(), sizeof id.internal, ncclUint8, 0, comm_, stream_),
          "cannot share an id");
    check(cudaStreamSynchronize(stream_), "cannot share an id");
    bytes.download(id.internal, sizeof id.internal);
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, info_.ranks, id, info_.rank), "cannot make a communicator");
    return comm;
  }
  void close() { check(pncclCommDestroy(comm_), "cannot close"); }

 private:
  RankInfo info_;
  Buffer values_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// Counters of this process's compressed calls on its communicator number `index`.
struct Counters {
  uint64_t calls = 0, launches = 0, bytes_ring = 0, bytes_sent = 0;
};
Counters countersOf(size_t index) {
  Counters c;
  const char* directory = std::getenv("HALFWIRE_LOG_DIR");
  if (directory == nullptr) return c;
  std::vector<std::string> problems;
  for (const RunLogRecord& record : readRunLogs(directory, &problems)) {
    if (record.pid != getpid() || record.communicators.size() <= index) continue;
    for (const RunLogCall& call : record.communicators[index].calls) {
      if (call.reason != Reason::kCompressed) continue;
      c.calls += call.calls;
      c.launches += call.launches;
      c.bytes_ring += call.bytes_ring;
      c.bytes_sent += call.bytes_sent;
    }
  }
  return c;
}

// Everything about one message size.
class Case {
 public:
  Case(const Config& config, const RankInfo& info, Control& control, Device* device, ncclComm_t comm,
       cudaStream_t stream, uint64_t bytes)
      : config_(config),
        info_(info),
        control_(control),
        device_(device),
        comm_(comm),
        stream_(stream),
        ranks_(static_cast<uint32_t>(info.ranks)),
        size_(dataTypeBytes(type())),
        count_(config.op == CollectiveOp::kAllReduce ? bytes / size_ : bytes / size_ / ranks_),
        send_elements_(config.op == CollectiveOp::kReduceScatter || config.op == CollectiveOp::kAlltoAll
                           ? count_ * ranks_
                           : count_),
        recv_elements_(config.op == CollectiveOp::kAllGather || config.op == CollectiveOp::kAlltoAll
                           ? count_ * ranks_
                           : count_),
        in_(send_elements_ * size_),
        out_(recv_elements_ * size_),
        packets_out_(pass().packet * ranks_),
        packets_in_(pass().packet * ranks_) {
    std::vector<char> values(std::min(send_elements_, kStep) * size_);
    for (uint64_t at = 0; at < send_elements_; at += kStep) {
      const uint64_t n = std::min(kStep, send_elements_ - at);
      fillNormal(type(), static_cast<uint32_t>(info.rank), at, n, values.data());
      in_.upload(values.data(), n * size_, at * size_);
    }
  }

  // Whether each rank ends with a result of its own.
  bool differsByRank() const {
    return config_.op == CollectiveOp::kReduceScatter || config_.op == CollectiveOp::kAlltoAll;
  }

  uint64_t messageBytes() const { return std::max(send_elements_, recv_elements_) * size_; }
  const char* algorithm() const {
    if (differsByRank()) return "all-to-all";
    if (config_.op == CollectiveOp::kAllGather) return "gather";
    return ranks_ == 2 ? "one-shot" : "two-shot";
  }

  void exact() {
    const ncclDataType_t t = config_.type;
    ncclResult_t r = ncclInternalError;
    if (config_.op == CollectiveOp::kAllReduce)
      r = pncclAllReduce(in_.get(), out_.get(), count_, t, ncclSum, comm_, stream_);
    if (config_.op == CollectiveOp::kReduceScatter)
      r = pncclReduceScatter(in_.get(), out_.get(), count_, t, ncclSum, comm_, stream_);
    if (config_.op == CollectiveOp::kAllGather)
      r = pncclAllGather(in_.get(), out_.get(), count_, t, comm_, stream_);
    if (config_.op == CollectiveOp::kAlltoAll)
      r = pncclAlltoAll(in_.get(), out_.get(), count_, t, comm_, stream_);
    check(r, "the exact collective failed");
  }

  void wire() {
    const ncclDataType_t t = config_.type;
    ncclResult_t r = ncclInternalError;
    if (config_.op == CollectiveOp::kAllReduce)
      r = ncclAllReduce(in_.get(), out_.get(), count_, t, ncclSum, comm_, stream_);
    if (config_.op == CollectiveOp::kReduceScatter)
      r = ncclReduceScatter(in_.get(), out_.get(), count_, t, ncclSum, comm_, stream_);
    if (config_.op == CollectiveOp::kAllGather)
      r = ncclAllGather(in_.get(), out_.get(), count_, t, comm_, stream_);
    if (config_.op == CollectiveOp::kAlltoAll)
      r = ncclAlltoAll(in_.get(), out_.get(), count_, t, comm_, stream_);
    check(r, "the compressed collective failed");
  }

  // The messages of the compressed collective, without codec: what the link alone takes.
  void packets() {
    const Pass whole = pass();
    for (uint64_t offset = 0; offset < count_; offset += whole.elements) {
      const Pass p = cut(std::min(whole.elements, count_ - offset));
      const bool one_shot = config_.op == CollectiveOp::kAllReduce && ranks_ == 2;
      if (config_.op != CollectiveOp::kAllGather && !one_shot) exchange(p);
      if (!differsByRank()) {
        check(pncclAllGather(packets_in_.get() + static_cast<uint64_t>(info_.rank) * p.packet,
                             packets_in_.get(), p.packet, ncclUint8, comm_, stream_),
              "cannot gather packets");
      }
    }
  }

  void ring(bool codec) {
    if (!ring_) {
      auto made =
          Ring::create(device_, config_.format, type(), static_cast<uint32_t>(info_.rank), ranks_, count_);
      check(made.status());
      ring_.emplace(std::move(made).value());
    }
    check(ring_->allReduce(in_.get(), out_.get(), count_, codec, comm_, stream_));
  }

  uint64_t resultHash() const {
    std::vector<char> result(recv_elements_ * size_);
    out_.download(result.data(), result.size());
    return hashBytes(result.data(), result.size());
  }

  // Root of the summed squares of (result - exact) over that of exact, the sums in fp64. Collective.
  double relativeRms() {
    // Ranks with the same result need not all compare it.
    const bool mine = differsByRank() || info_.rank == 0;
    double error = 0, total = 0;
    std::vector<char> raw(kStep * size_);
    std::vector<double> value(kStep), want(kStep), got(kStep);
    for (uint64_t at = 0; mine && at < recv_elements_; at += kStep) {
      const uint64_t n = std::min(kStep, recv_elements_ - at);
      std::fill(want.begin(), want.end(), 0.0);
      const auto add = [&](uint32_t rank, uint64_t begin, uint64_t length, double* to) {
        fillNormal(type(), rank, begin, length, raw.data());
        toDouble(type(), raw.data(), length, value.data());
        for (uint64_t i = 0; i < length; ++i) to[i] += value[i];
      };
      if (config_.op == CollectiveOp::kAllGather || config_.op == CollectiveOp::kAlltoAll) {
        // Of each rank its part, the one for this rank where it has one for each.
        const uint64_t first =
            config_.op == CollectiveOp::kAlltoAll ? static_cast<uint64_t>(info_.rank) * count_ : 0;
        for (uint64_t i = 0; i < n;) {
          const uint64_t length = std::min(n - i, count_ - (at + i) % count_);
          add(static_cast<uint32_t>((at + i) / count_), first + (at + i) % count_, length, want.data() + i);
          i += length;
        }
      } else {
        const uint64_t first =
            config_.op == CollectiveOp::kReduceScatter ? static_cast<uint64_t>(info_.rank) * count_ : 0;
        for (uint32_t rank = 0; rank < ranks_; ++rank) add(rank, first + at, n, want.data());
      }
      out_.download(raw.data(), n * size_, at * size_);
      toDouble(type(), raw.data(), n, got.data());
      for (uint64_t i = 0; i < n; ++i) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        total += want[i] * want[i];
      }
    }
    return std::sqrt(control_.sum(error) / control_.sum(total));
  }

 private:
  // One pass of the library through its scratch, as src/collective/compressor.cc cuts it.
  struct Pass {
    uint64_t elements = 0, shard = 0, packet = 0;
  };
  DataType type() const {
    DataType t = DataType::kBf16;
    if (!wireDataType(config_.type, &t)) die("this type has no packets");
    return t;
  }
  Pass cut(uint64_t elements) const {
    Pass p;
    p.elements = elements;
    const bool shards = config_.op == CollectiveOp::kAllReduce && ranks_ > 2;
    p.shard = shards ? shardElements(config_.format, elements, ranks_) : elements;
    p.packet = packetBytes(config_.format, p.shard);
    return p;
  }
  Pass pass() const {
    const uint64_t block = config_.format.block;
    const uint64_t chunk = std::max(roundUp(config_.chunk_bytes / size_, block), block);
    const uint64_t elements =
        config_.op == CollectiveOp::kAllReduce ? chunk : std::max(chunk / ranks_ / block * block, block);
    return cut(std::min(elements, std::max<uint64_t>(count_, 1)));
  }

  void exchange(const Pass& p) {
    const auto length = [&](uint32_t shard) {
      if (config_.op != CollectiveOp::kAllReduce) return p.elements;
      return std::min(p.shard, p.elements - std::min(p.elements, p.shard * shard));
    };
    const auto rank = static_cast<uint32_t>(info_.rank);
    const uint64_t mine = packetBytes(config_.format, length(rank));
    check(pncclGroupStart(), "cannot open a group");
    for (uint32_t step = 1; step < ranks_; ++step) {
      const uint32_t to = (rank + step) % ranks_;
      const uint32_t from = (rank + ranks_ - step) % ranks_;
      const uint64_t bytes = packetBytes(config_.format, length(to));
      if (bytes > 0) {
        check(pncclSend(packets_out_.get() + to * p.packet, bytes, ncclUint8, static_cast<int>(to), comm_,
                        stream_),
              "cannot send");
      }
      if (mine > 0) {
        check(pncclRecv(packets_in_.get() + from * p.packet, mine, ncclUint8, static_cast<int>(from), comm_,
                        stream_),
              "cannot receive");
      }
    }
    check(pncclGroupEnd(), "cannot exchange packets");
  }

  static constexpr uint64_t kStep = 1 << 16;  // elements made or compared at a time

  const Config& config_;
  const RankInfo& info_;
  Control& control_;
  Device* device_;
  ncclComm_t comm_;
  cudaStream_t stream_;
  uint32_t ranks_;
  uint64_t size_, count_, send_elements_, recv_elements_;
  Buffer in_, out_, packets_out_, packets_in_;
  std::optional<Ring> ring_;
};

double now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Measured {
  std::vector<double> us;
  std::vector<double> host_us;  // until the call returned, on this rank
  double bytes = 0;             // most that any rank sent in one call
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

nlohmann::ordered_json spread(const std::vector<double>& v) {
  return {*std::min_element(v.begin(), v.end()), *std::max_element(v.begin(), v.end())};
}

// Ratios of what ran side by side.
std::vector<double> ratios(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> r;
  for (size_t i = 0; i < a.size(); ++i) r.push_back(a[i] / b[i]);
  return r;
}

// The 95 % confidence interval of a median from order statistics (normal approximation of the binomial; the
// whole range below 6 values, where no such interval exists).
nlohmann::ordered_json medianInterval(std::vector<double> v) {
  if (v.size() < 6) return spread(v);
  std::sort(v.begin(), v.end());
  const auto n = static_cast<double>(v.size());
  const double half = 1.96 * std::sqrt(n) / 2;
  const auto low = static_cast<size_t>(std::max(0.0, std::floor(n / 2 - half)));
  const auto high = std::min(v.size() - 1, static_cast<size_t>(std::ceil(n / 2 + half)));
  return {v[low], v[high]};
}

class Bench {
 public:
  Bench(const Config& config, const RankInfo& info) : config_(config), info_(info), control_(info) {
    check(cudaStreamCreate(&stream_), "no stream");
    int ordinal = 0;
    check(cudaGetDevice(&ordinal), "no device");
    auto device = makeDevice(ordinal);
    check(device.status());
    device_ = std::move(device).value();
  }

  nlohmann::ordered_json run() {
    auto rows = nlohmann::ordered_json::array();
    std::vector<ncclComm_t> comms;
    for (const uint64_t bytes : config_.bytes) {
      comms.push_back(control_.newCommunicator());
      for (auto& row : measureSize(comms.size() - 1, comms.back(), bytes)) rows.push_back(std::move(row));
    }
    control_.barrier();
    for (const ncclComm_t comm : comms) check(ncclCommDestroy(comm), "cannot close a communicator");
    control_.close();
    return rows;
  }

 private:
  // From the first rank's start to the last rank's end, on the clock that all of them share.
  template <class Work>
  void time(Work&& work, Measured* m) {
    check(cudaStreamSynchronize(stream_), "the stream failed");
    control_.barrier();
    const uint64_t sent = egressBytes();
    const double begin = now();
    work();
    m->host_us.push_back(now() - begin);
    check(cudaStreamSynchronize(stream_), "the stream failed");
    const double end = now();
    const uint64_t bytes = egressBytes() - sent;
    const auto all = control_.reduce<double>({end, -begin, static_cast<double>(bytes)}, ncclFloat64, ncclMax);
    m->us.push_back(all[0] + all[1]);
    m->bytes = std::max(m->bytes, all[2]);
  }

  std::vector<nlohmann::ordered_json> measureSize(size_t index, ncclComm_t comm, uint64_t bytes) {
    Case c(config_, info_, control_, device_.get(), comm, stream_, bytes);
    const bool with_ring = config_.op == CollectiveOp::kAllReduce && info_.ranks > 2;
    // Once each unmeasured: connections, first use of the memory.
    Measured ignored;
    time([&] { c.exact(); }, &ignored);
    time([&] { c.wire(); }, &ignored);
    time([&] { c.packets(); }, &ignored);

    Measured exact, wire, packets, ring, ring_packets;
    bool wire_same = true, ring_same = true;
    uint64_t wire_hash = 0, ring_hash = 0;
    double wire_error = 0, ring_error = 0;
    const Counters before = countersOf(index);
    for (int i = 0; i < config_.repeat; ++i) {
      time([&] { c.exact(); }, &exact);
      time([&] { c.wire(); }, &wire);
      const uint64_t hash = c.resultHash();
      wire_same = wire_same && (i == 0 || hash == wire_hash) && agreed(c, hash);
      if (i == 0) wire_error = c.relativeRms();
      wire_hash = hash;
      time([&] { c.packets(); }, &packets);
      if (!with_ring) continue;
      time([&] { c.ring(true); }, &ring);
      const uint64_t of_ring = c.resultHash();
      ring_same = ring_same && (i == 0 || of_ring == ring_hash) && agreed(c, of_ring);
      if (i == 0) ring_error = c.relativeRms();
      ring_hash = of_ring;
      time([&] { c.ring(false); }, &ring_packets);
    }
    Counters after = countersOf(index);
    after.calls -= before.calls;
    after.launches -= before.launches;
    after.bytes_ring -= before.bytes_ring;
    after.bytes_sent -= before.bytes_sent;
    if (after.calls != static_cast<uint64_t>(config_.repeat)) {
      die(fmt::format("{} of {} calls were compressed: the preloaded library did not do its work",
                      after.calls, config_.repeat));
    }

    // Where the engine does not count bytes, the library's own counters do.
    if (exact.bytes == 0) {
      exact.bytes = static_cast<double>(after.bytes_ring) / config_.repeat;
      wire.bytes = ring.bytes = control_.max(static_cast<double>(after.bytes_sent) / config_.repeat);
    }

    const auto row = [&](const char* algorithm, const Measured& w, const Measured& p, double error,
                         bool identical, double launches, double host_us) {
      return nlohmann::ordered_json{{"engine", engineName()},
                                    {"op", opName(config_.op)},
                                    {"algorithm", algorithm},
                                    {"type", dataTypeName(config_.type)},
                                    {"bytes", c.messageBytes()},
                                    {"ranks", info_.ranks},
                                    {"exact_us", median(exact.us)},
                                    {"wire_us", median(w.us)},
                                    {"packet_us", median(p.us)},
                                    {"speedup", median(exact.us) / median(w.us)},
                                    {"exact_bytes", exact.bytes},
                                    {"wire_bytes", w.bytes},
                                    {"rel_rms_error", error},
                                    {"identical", identical},
                                    {"launches", launches},
                                    {"host_us", host_us},
                                    {"exact_host_us", control_.max(median(exact.host_us))},
                                    {"packet_host_us", control_.max(median(p.host_us))},
                                    {"speedup_ci95", medianInterval(ratios(exact.us, w.us))},
                                    {"wire_over_packet", median(ratios(w.us, p.us))},
                                    {"wire_over_packet_ci95", medianInterval(ratios(w.us, p.us))},
                                    {"exact_us_range", spread(exact.us)},
                                    {"wire_us_range", spread(w.us)},
                                    {"packet_us_range", spread(p.us)}};
    };
    const double calls = static_cast<double>(after.calls);
    std::vector<nlohmann::ordered_json> rows;
    rows.push_back(row(c.algorithm(), wire, packets, wire_error, wire_same,
                       static_cast<double>(after.launches) / calls, control_.max(median(wire.host_us))));
    // The comparison ring is the benchmark's own: a quantize, a reduce a hop, a dequantize; its host time is
    // not counted.
    if (with_ring) rows.push_back(row("ring", ring, ring_packets, ring_error, ring_same, info_.ranks + 1, 0));
    return rows;
  }

  // Whether all ranks hold these bits. Where results differ by nature only repetitions compare.
  bool agreed(const Case& c, uint64_t hash) {
    const bool same = control_.same(hash);
    return c.differsByRank() || same;
  }

  const Config& config_;
  const RankInfo& info_;
  Control control_;
  std::unique_ptr<Device> device_;
  cudaStream_t stream_ = nullptr;
};

// NCCL refuses two ranks on one GPU of one host: ranks that name different hosts talk through sockets.
void prepareSharedGpu(int rank) {
  setenv("NCCL_HOSTID", fmt::format("rank{}", rank).c_str(), 0);
  setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  setenv("NCCL_IB_DISABLE", "1", 0);
  setenv("NCCL_SOCKET_NTHREADS", "2", 0);
  setenv("NCCL_NSOCKS_PERTHREAD", "2", 0);
}

}  // namespace
}  // namespace halfwire::bench

int main(int argc, char** argv) {
  using namespace halfwire::bench;
  if (argc != 3)
    die(fmt::format(
        "usage: halfwire-bench-{} CONFIG.json RESULT.json (`halfwire bench collective` starts it)",
        engineName()));
  const Config config = readConfig(argv[1]);
  const auto info = halfwire::readRankInfo();
  if (!info.ok()) die(info.status().message());
  if (config.share_gpu) prepareSharedGpu(info.value().rank);
  const char* local = std::getenv("LOCAL_RANK");
  const int device = local != nullptr ? std::atoi(local) : info.value().rank;
  check(cudaSetDevice(config.share_gpu ? 0 : device), "cannot use the device");
  Bench bench(config, info.value());
  const auto rows = bench.run();
  if (info.value().rank != 0) return 0;
  std::ofstream out(argv[2]);
  out << rows.dump();
  out.close();
  if (!out) die(fmt::format("cannot write {}", argv[2]));
  return 0;
}
