// What collectives cost between two GPUs: exact, in NCCL's own unscaled FP8, as blockwise-scaled packets by
// every algorithm, as the same packets without a codec, and with single stages left out. All variants of a
// size alternate in one run (A B C A B C ...), so that ratios compare what ran side by side; beside every
// time are the error against an fp64 sum and whether both GPUs hold the same bits. The kernels are those of
// src/wire at the launches of src/wire/cuda_codec.cc; messages are cut as src/collective/compressor.cc cuts
// them. The library's interposition is not in these times: `halfwire bench collective` has it.
//
// Usage: two-gpu-collectives OUT.jsonl LINK REPEAT BYTES[,BYTES...] (LINK is a label, copied to every row)
#include <cstring>
#include <functional>
#include <map>
#include <sstream>

#include "data.cuh"
#include "wire/codec.h"
#include "wire/cuda_codec.h"
#include "wire/cuda_kernels.h"
#include "wire/cuda_tuning.h"

namespace halfwire::two_gpu {
namespace {

// ---- kernels, in the shapes of src/wire/kernels.cu ----

template <ElementFormat F, CodecPath P>
__global__ void __launch_bounds__(cuda::kQuantizeThreads,
                                  cuda::residentBlocks(cuda::quantizeResident(DataType::kBf16, 1),
                                                       cuda::kQuantizeThreads))
    quantizeKernel(const __grid_constant__ QuantizeParams p) {
  cuda::Quantize<DataType::kBf16, F, P, 1, cuda::kQuantizeThreads, cuda::quantizeRepeat(DataType::kBf16, 1),
                 cuda::kQuantizeHint>::run(p);
}
template <ElementFormat F, CodecPath P>
__global__ void __launch_bounds__(cuda::kDequantizeThreads,
                                  cuda::residentBlocks(cuda::kDequantizeResident, cuda::kDequantizeThreads))
    dequantizeKernel(const __grid_constant__ DequantizeParams p) {
  cuda::Dequantize<DataType::kBf16, F, P, cuda::kDequantizeThreads,
                   cuda::dequantizeRepeat(DataType::kBf16)>::run(p);
}
template <ElementFormat F, CodecPath P, bool kToPacket>
__global__ void __launch_bounds__(cuda::kReduceThreads,
                                  cuda::residentBlocks(cuda::kReduceResident, cuda::kReduceThreads))
    reduceKernel(const __grid_constant__ ReduceParams p) {
  using Kernel = cuda::Reduce<F, P, cuda::kReduceThreads, cuda::kReduceDepth, cuda::kReduceHint>;
  if constexpr (kToPacket) {
    Kernel::toPacket(p);
  } else {
    Kernel::template toElements<DataType::kBf16>(p);
  }
}

const void* kernelNamed(const std::string& name) {
  constexpr auto kHardware = CodecPath::kHardware;
  constexpr auto kAny = CodecPath::kSoftware;
  constexpr auto kE4M3 = ElementFormat::kE4M3;
  constexpr auto kInt8 = ElementFormat::kInt8;
  static const std::map<std::string, const void*> kernels = {
      {"halfwire_quantize_e4m3_bf16_hardware_1",
       reinterpret_cast<const void*>(&quantizeKernel<kE4M3, kHardware>)},
      {"halfwire_quantize_int8_bf16_any_1", reinterpret_cast<const void*>(&quantizeKernel<kInt8, kAny>)},
      {"halfwire_dequantize_e4m3_bf16_hardware",
       reinterpret_cast<const void*>(&dequantizeKernel<kE4M3, kHardware>)},
      {"halfwire_dequantize_int8_bf16_any", reinterpret_cast<const void*>(&dequantizeKernel<kInt8, kAny>)},
      {"halfwire_reduce_e4m3_packet_hardware",
       reinterpret_cast<const void*>(&reduceKernel<kE4M3, kHardware, true>)},
      {"halfwire_reduce_int8_packet_any", reinterpret_cast<const void*>(&reduceKernel<kInt8, kAny, true>)},
      {"halfwire_reduce_e4m3_bf16_hardware",
       reinterpret_cast<const void*>(&reduceKernel<kE4M3, kHardware, false>)},
      {"halfwire_reduce_int8_bf16_any", reinterpret_cast<const void*>(&reduceKernel<kInt8, kAny, false>)}};
  const auto found = kernels.find(name);
  if (found == kernels.end()) die("no kernel %s in this program", name.c_str());
  return found->second;
}

// Casts to and from FP8 without scales, 16 elements a thread: what a program does around NCCL's own FP8.
__global__ void toFp8Kernel(const uint4* in, uint4* out, uint64_t vectors) {
  const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  uint32_t codes[4];
  for (int half = 0; half < 2; ++half) {
    const uint4 raw = in[2 * i + half];
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
    for (int w = 0; w < 2; ++w) {
      float y[4];
      cuda::loadWord<DataType::kBf16>(word[2 * w], y);
      cuda::loadWord<DataType::kBf16>(word[2 * w + 1], y + 2);
      codes[2 * half + w] = cuda::encode4<ElementFormat::kE4M3, CodecPath::kHardware>(y);
    }
  }
  out[i] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
}
__global__ void fromFp8Kernel(const uint4* in, uint4* out, uint64_t vectors) {
  const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  const uint4 raw = in[i];
  const uint32_t codes[4] = {raw.x, raw.y, raw.z, raw.w};
  for (int half = 0; half < 2; ++half) {
    uint32_t word[4];
    for (int w = 0; w < 2; ++w) {
      float y[4];
      cuda::decode4<ElementFormat::kE4M3, CodecPath::kHardware>(codes[2 * half + w], y);
      word[2 * w] = cuda::storeWord<DataType::kBf16>(y);
      word[2 * w + 1] = cuda::storeWord<DataType::kBf16>(y + 2);
    }
    out[2 * i + half] = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// ---- collectives ----

enum class Op { kAllReduce, kReduceScatter, kAllGather, kAlltoAll };
constexpr Op kOps[] = {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather, Op::kAlltoAll};
const char* name(Op op) {
  constexpr const char* kNames[] = {"AllReduce", "ReduceScatter", "AllGather", "AlltoAll"};
  return kNames[static_cast<int>(op)];
}

enum class Algorithm { kDirect, kTwoShot, kRing, kOverlapped };  // kDirect is the one-shot for AllReduce

// Which stages of a compressed collective run: quantize, move, and what follows (reduce, dequantize).
enum Stage : unsigned { kQuantize = 1, kMove = 2, kFinish = 4, kWhole = 7 };

constexpr uint64_t kChunkBytes = 64ull << 20;  // of the user's buffer, that the scratch holds at a time
constexpr uint32_t kPasses = 4;                // of a message whose passes overlap

class Collectives {
 public:
  // Buffers for messages of up to `bytes`.
  Collectives(int rank, uint64_t bytes) : rank_(rank), peer_(1 - rank) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "no stream");
    check(cudaStreamCreateWithFlags(&transfers_, cudaStreamNonBlocking), "no stream");
    for (cudaEvent_t& e : ready_) check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "no event");
    for (cudaEvent_t& e : moved_) check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "no event");
    check(cudaMalloc(&in_, bytes), "no memory for the input");
    check(cudaMalloc(&out_, bytes), "no memory for the output");
    const uint64_t scratch = bytes + bytes / 4 + 4 * kChunkBytes;
    check(cudaMalloc(&scratch_, scratch), "no memory for the packets");
    check(cudaMemset(scratch_, 0, scratch), "cannot clear the packets");
  }

  void select(Op op, uint64_t bytes) {
    op_ = op;
    count_ = op == Op::kAllReduce ? bytes / 2 : bytes / 2 / kRanks;
  }
  uint64_t sendElements() const {
    return op_ == Op::kReduceScatter || op_ == Op::kAlltoAll ? count_ * kRanks : count_;
  }
  uint64_t resultElements() const {
    return op_ == Op::kAllGather || op_ == Op::kAlltoAll ? count_ * kRanks : count_;
  }
  Expected expected() const {
    const uint64_t part = static_cast<uint64_t>(rank_) * count_;
    if (op_ == Op::kAllReduce) return {true, 0, count_};
    if (op_ == Op::kReduceScatter) return {true, part, count_};
    if (op_ == Op::kAllGather) return {false, 0, count_};
    return {false, part, count_};
  }
  // Whether both ranks get the same result.
  bool replicates() const { return op_ == Op::kAllReduce || op_ == Op::kAllGather; }

  cudaStream_t stream() const { return stream_; }
  void* in() const { return in_; }
  void* out() const { return out_; }
  uint64_t sent() const { return sent_; }
  int launches() const { return launches_; }
  void resetCounters() { sent_ = launches_ = 0; }

  void exact(ncclComm_t comm, const void* in, void* out, ncclDataType_t type) {
    ncclResult_t r = ncclInternalError;
    if (op_ == Op::kAllReduce) r = ncclAllReduce(in, out, count_, type, ncclSum, comm, stream_);
    if (op_ == Op::kReduceScatter) r = ncclReduceScatter(in, out, count_, type, ncclSum, comm, stream_);
    if (op_ == Op::kAllGather) r = ncclAllGather(in, out, count_, type, comm, stream_);
    if (op_ == Op::kAlltoAll) r = ncclAlltoAll(in, out, count_, type, comm, stream_);
    check(r, "an exact collective failed");
    ++launches_;
    sent_ += count_ * (type == ncclBfloat16 ? 2 : 1);
  }

  void unscaledFp8(ncclComm_t comm, bool casts) {
    char* from = static_cast<char*>(scratch_);
    char* to = from + sendElements();
    if (casts) cast(&toFp8Kernel, in_, from, sendElements());
    exact(comm, from, to, ncclFloat8e4m3);
    if (casts) cast(&fromFp8Kernel, to, out_, resultElements());
  }

  void wire(Algorithm algorithm, ElementFormat element, unsigned stages, ncclComm_t comm,
            uint64_t chunk_bytes) {
    format_.element = element;
    comm_ = comm;
    stages_ = stages;
    if (algorithm == Algorithm::kOverlapped) return overlappedOneShot();
    const uint64_t chunk = chunk_bytes / 2 / (op_ == Op::kAllReduce ? 1 : kRanks);
    for (uint64_t at = 0; at < count_; at += chunk) {
      const uint64_t n = std::min(chunk, count_ - at);
      if (op_ == Op::kReduceScatter) {
        reduceScatter(at, n);
      } else if (op_ == Op::kAllGather) {
        allGather(at, n);
      } else if (op_ == Op::kAlltoAll) {
        allToAll(at, n);
      } else if (algorithm == Algorithm::kDirect) {
        oneShot(at, n);
      } else if (algorithm == Algorithm::kTwoShot) {
        twoShot(at, n);
      } else {
        ring(at, n);
      }
    }
  }

 private:
  bool has(Stage stage) const { return (stages_ & stage) != 0; }
  char* packets() const { return static_cast<char*>(scratch_); }
  const char* input(uint64_t element) const { return static_cast<const char*>(in_) + element * 2; }
  char* output(uint64_t element) const { return static_cast<char*>(out_) + element * 2; }

  void cast(void (*kernel)(const uint4*, uint4*, uint64_t), const void* in, void* out, uint64_t elements) {
    const uint64_t vectors = elements / 16;
    kernel<<<static_cast<unsigned>((vectors + 255) / 256), 256, 0, stream_>>>(
        static_cast<const uint4*>(in), static_cast<uint4*>(out), vectors);
    check(cudaGetLastError(), "a cast failed");
    ++launches_;
  }

  template <class Job>
  void launch(const Job& job) {
    CudaLaunch l;
    for (uint32_t part = 0; cudaLaunch(job, CodecPath::kHardware, part, &l); ++part) {
      void* arguments[] = {l.argument()};
      check(cudaLaunchKernel(kernelNamed(cudaKernelName(l.kernel)), dim3(l.grid_x, l.grid_y), dim3(l.threads),
                             arguments, 0, stream_),
            "a codec kernel failed");
      ++launches_;
    }
  }

  void quantize(const char* in, uint64_t pitch, uint64_t total, uint32_t segments, uint64_t elements,
                char* out, uint64_t packet) {
    if (!has(kQuantize)) return;
    QuantizeJob job;
    job.format = format_;
    job.segments = segments;
    job.in = in;
    job.in_pitch = pitch;
    job.in_total = total;
    job.segment_elements = elements;
    job.out = out;
    job.out_pitch = packet;
    launch(job);
  }
  void reduce(const char* in, uint64_t packet, const char* own, int own_index, uint64_t elements, char* out,
              bool to_packet) {
    if (!has(kFinish)) return;
    ReduceJob job;
    job.format = format_;
    job.to_packet = to_packet;
    job.packets = kRanks;
    job.in = in;
    job.in_pitch = packet;
    job.own = own;
    job.own_index = own_index;
    job.elements = elements;
    job.out = out;
    launch(job);
  }
  void dequantize(const char* in, uint64_t packet, uint32_t segments, uint64_t elements, char* out,
                  uint64_t pitch, uint64_t total) {
    if (!has(kFinish)) return;
    DequantizeJob job;
    job.format = format_;
    job.segments = segments;
    job.in = in;
    job.in_pitch = packet;
    job.segment_elements = elements;
    job.out = out;
    job.out_pitch = pitch;
    job.out_total = total;
    launch(job);
  }
  void swap(const char* send, uint64_t send_bytes, char* receive, uint64_t receive_bytes) {
    if (!has(kMove)) return;
    check(ncclGroupStart(), "cannot open a group");
    if (send_bytes > 0) check(ncclSend(send, send_bytes, ncclUint8, peer_, comm_, stream_), "cannot send");
    if (receive_bytes > 0)
      check(ncclRecv(receive, receive_bytes, ncclUint8, peer_, comm_, stream_), "cannot receive");
    check(ncclGroupEnd(), "cannot exchange packets");
    sent_ += send_bytes;
    ++launches_;
  }
  void gather(char* to, uint64_t packet, cudaStream_t stream) {
    if (!has(kMove)) return;
    check(ncclAllGather(to + static_cast<uint64_t>(rank_) * packet, to, packet, ncclUint8, comm_, stream),
          "cannot gather packets");
    sent_ += packet;
    ++launches_;
  }

  void oneShot(uint64_t at, uint64_t n) {
    const uint64_t packet = packetBytes(format_, n);
    quantize(input(at), n, n, 1, n, packets() + static_cast<uint64_t>(rank_) * packet, packet);
    gather(packets(), packet, stream_);
    reduce(packets(), packet, nullptr, -1, n, output(at), false);
  }

  // The codec of one pass beside the transfer of its neighbours, on two streams.
  void overlappedOneShot() {
    const uint64_t pass = std::min(roundUp((count_ + kPasses - 1) / kPasses, format_.block), kChunkBytes / 2);
    const uint64_t slot = roundUp(packetBytes(format_, pass) * kRanks, 256);
    const uint64_t passes = (count_ + pass - 1) / pass;
    const auto length = [&](uint64_t p) { return std::min(pass, count_ - p * pass); };
    const auto begin = [&](uint64_t p) {
      const uint64_t packet = packetBytes(format_, length(p));
      char* to = packets() + p % kPasses * slot;
      quantize(input(p * pass), length(p), length(p), 1, length(p),
               to + static_cast<uint64_t>(rank_) * packet, packet);
      check(cudaEventRecord(ready_[p % kPasses], stream_), "no event");
      check(cudaStreamWaitEvent(transfers_, ready_[p % kPasses]), "no event");
      gather(to, packet, transfers_);
      check(cudaEventRecord(moved_[p % kPasses], transfers_), "no event");
    };
    begin(0);
    for (uint64_t p = 0; p < passes; ++p) {
      if (p + 1 < passes) begin(p + 1);
      check(cudaStreamWaitEvent(stream_, moved_[p % kPasses]), "no event");
      reduce(packets() + p % kPasses * slot, packetBytes(format_, length(p)), nullptr, -1, length(p),
             output(p * pass), false);
    }
  }

  void twoShot(uint64_t at, uint64_t n) {
    const Shards s = shards(n);
    char* incoming = packets() + roundUp(kRanks * s.packet, 256);
    quantize(input(at), s.elements, n, kRanks, s.elements, packets(), s.packet);
    swap(packets() + static_cast<uint64_t>(peer_) * s.packet, packetBytes(format_, s.of(peer_)),
         incoming + static_cast<uint64_t>(peer_) * s.packet, packetBytes(format_, s.of(rank_)));
    char* mine = incoming + static_cast<uint64_t>(rank_) * s.packet;
    reduce(incoming, s.packet, packets() + static_cast<uint64_t>(rank_) * s.packet, rank_, s.of(rank_), mine,
           true);
    gather(incoming, s.packet, stream_);
    dequantize(incoming, s.packet, kRanks, s.elements, output(at), s.elements, n);
  }

  // Each shard is summed by one rank and sent back: what a ring is at two ranks.
  void ring(uint64_t at, uint64_t n) {
    const Shards s = shards(n);
    const auto packet = [&](int slot) { return packets() + static_cast<uint64_t>(slot) * s.packet; };
    char* arriving = packet(kRanks);
    const auto sum = [&](int shard) { return packet(kRanks + 1 + shard); };
    quantize(input(at), s.elements, n, kRanks, s.elements, packets(), s.packet);
    swap(packet(rank_), packetBytes(format_, s.of(rank_)), arriving, packetBytes(format_, s.of(peer_)));
    reduce(arriving, s.packet, packet(peer_), 1, s.of(peer_), sum(peer_), true);
    swap(sum(peer_), packetBytes(format_, s.of(peer_)), sum(rank_), packetBytes(format_, s.of(rank_)));
    dequantize(sum(0), s.packet, kRanks, s.elements, output(at), s.elements, n);
  }

  void reduceScatter(uint64_t at, uint64_t n) {
    const uint64_t packet = packetBytes(format_, n);
    char* incoming = packets() + roundUp(kRanks * packet, 256);
    quantize(input(at), count_, count_ + n, kRanks, n, packets(), packet);
    swap(packets() + static_cast<uint64_t>(peer_) * packet, packet,
         incoming + static_cast<uint64_t>(peer_) * packet, packet);
    reduce(incoming, packet, packets() + static_cast<uint64_t>(rank_) * packet, rank_, n, output(at), false);
  }

  void allGather(uint64_t at, uint64_t n) {
    const uint64_t packet = packetBytes(format_, n);
    quantize(input(at), n, n, 1, n, packets() + static_cast<uint64_t>(rank_) * packet, packet);
    gather(packets(), packet, stream_);
    dequantize(packets(), packet, kRanks, n, output(at), count_, count_ + n);
  }

  // What stays on this GPU is copied exactly: nobody else holds it.
  void allToAll(uint64_t at, uint64_t n) {
    const uint64_t packet = packetBytes(format_, n);
    char* arriving = packets() + roundUp(packet, 256);
    const uint64_t mine = static_cast<uint64_t>(rank_) * count_ + at;
    const uint64_t theirs = static_cast<uint64_t>(peer_) * count_ + at;
    quantize(input(theirs), n, n, 1, n, packets(), packet);
    swap(packets(), packet, arriving, packet);
    dequantize(arriving, packet, 1, n, output(theirs), n, n);
    if (!has(kFinish)) return;
    check(cudaMemcpyAsync(output(mine), input(mine), n * 2, cudaMemcpyDeviceToDevice, stream_),
          "cannot copy");
    ++launches_;
  }

  struct Shards {
    uint64_t total, elements, packet;
    uint64_t of(int i) const {
      const uint64_t start = elements * static_cast<uint64_t>(i);
      return start >= total ? 0 : std::min(elements, total - start);
    }
  };
  Shards shards(uint64_t n) const {
    const uint64_t elements = shardElements(format_, n, kRanks);
    return {n, elements, packetBytes(format_, elements)};
  }

  int rank_, peer_;
  Op op_ = Op::kAllReduce;
  uint64_t count_ = 0;  // as passed to NCCL
  WireFormat format_;
  unsigned stages_ = kWhole;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr, transfers_ = nullptr;
  cudaEvent_t ready_[kPasses] = {}, moved_[kPasses] = {};
  void *in_ = nullptr, *out_ = nullptr, *scratch_ = nullptr;
  uint64_t sent_ = 0;
  int launches_ = 0;
};

// ---- measuring ----

struct Variant {
  std::string name;
  std::string format;
  int ctas = 0;  // NCCL's least number of thread blocks; 0 for its own choice
  std::function<void()> run;
  bool result = true;  // whether it computes the collective

  std::vector<double> us, host_us;
  double error = 0;
  bool identical = true;
  double sent = 0;
  int launches = 0;
};

constexpr int kCtas[] = {0, 1, 4, 8, 16, 32};

class Bench {
 public:
  Bench(Pair* pair, std::FILE* out, std::string link, int repeat, const std::vector<uint64_t>& sizes)
      : pair_(*pair),
        out_(out),
        link_(std::move(link)),
        repeat_(repeat),
        sizes_(sizes),
        c_(pair->rank(), *std::max_element(sizes.begin(), sizes.end())) {
    for (const int ctas : kCtas) comms_.push_back(pair_.connect(ctas));
  }

  void run() {
    describe();
    fill(c_.in(), pair_.rank(), *std::max_element(sizes_.begin(), sizes_.end()) / 2);
    for (const Op op : kOps) {
      for (const uint64_t bytes : sizes_) measure(op, bytes);
    }
    smallValues();
    for (const ncclComm_t comm : comms_) check(ncclCommDestroy(comm), "cannot close");
  }

 private:
  void describe() {
    int driver = 0, runtime = 0, nccl = 0;
    cudaDeviceProp p{};
    check(cudaDriverGetVersion(&driver), "no driver");
    check(cudaRuntimeGetVersion(&runtime), "no runtime");
    check(ncclGetVersion(&nccl), "no NCCL");
    check(cudaGetDeviceProperties(&p, pair_.rank()), "no device");
    if (pair_.rank() != 0) return;
    JsonLine()
        .text("kind", "machine")
        .text("link", link_)
        .text("gpu", p.name)
        .number("multiprocessors", p.multiProcessorCount)
        .number("cuda_driver", driver)
        .number("cuda_runtime", runtime)
        .number("nccl", nccl)
        .print(out_);
  }

  // Runs a variant once on a poisoned output, which also connects and loads whatever it needs.
  void verify(Variant* v, float scale = 1.0f) {
    const uint64_t n = c_.resultElements();
    check(cudaMemset(c_.out(), 0xff, n * 2), "cannot poison the output");
    check(cudaDeviceSynchronize(), "cannot poison the output");
    c_.resetCounters();
    v->run();
    check(cudaStreamSynchronize(c_.stream()), "a collective failed");
    v->sent = static_cast<double>(c_.sent());
    v->launches = c_.launches();
    if (!v->result) return;
    const ErrorSums mine = compare(c_.out(), n, c_.expected(), scale);
    const double error = pair_.sumOver(mine.error);
    v->error = std::sqrt(error / pair_.sumOver(mine.total));
    if (c_.replicates()) v->identical = pair_.same(mine.hash);
    // A second run must give the same bits.
    v->run();
    check(cudaStreamSynchronize(c_.stream()), "a collective failed");
    const bool again = compare(c_.out(), n, c_.expected(), scale).hash == mine.hash;
    v->identical = v->identical && pair_.sumOver(again ? 1 : 0) == kRanks;
  }

  void alternate(std::vector<Variant>* variants, int repeat, int calls) {
    for (int i = 0; i < repeat; ++i) {
      for (Variant& v : *variants) {
        const Pair::Time t = pair_.time(calls, c_.stream(), v.run);
        v.us.push_back(t.us);
        v.host_us.push_back(t.host_us);
      }
    }
  }

  // Index into kCtas of the fastest, given in order.
  static size_t fastest(const std::vector<Variant>& sweep, size_t from) {
    size_t best = 0;
    for (size_t i = 0; i < std::size(kCtas); ++i) {
      if (median(sweep[from + i].us) < median(sweep[from + best].us)) best = i;
    }
    return best;
  }

  void measure(Op op, uint64_t bytes) {
    c_.select(op, bytes);
    const int calls = static_cast<int>(std::clamp<uint64_t>((64ull << 20) / bytes, 1, 20));
    const int repeat = bytes > (256ull << 20) ? std::max(3, repeat_ / 2) : repeat_;
    const auto exact = [&](size_t i) {
      return [this, i] { c_.exact(comms_[i], c_.in(), c_.out(), ncclBfloat16); };
    };
    const auto wire = [&](Algorithm a, ElementFormat f, unsigned stages, size_t i = 0,
                          uint64_t chunk = kChunkBytes) {
      return [this, a, f, stages, i, chunk] { c_.wire(a, f, stages, comms_[i], chunk); };
    };
    constexpr auto kE4M3 = ElementFormat::kE4M3;
    constexpr auto kInt8 = ElementFormat::kInt8;
    constexpr auto kDirect = Algorithm::kDirect;

    std::vector<Variant> sweep;
    for (size_t i = 0; i < std::size(kCtas); ++i) sweep.push_back({"exact", "bf16", kCtas[i], exact(i)});
    for (size_t i = 0; i < std::size(kCtas); ++i) {
      sweep.push_back({"packets", "e4m3", kCtas[i], wire(kDirect, kE4M3, kMove, i), false});
    }
    for (Variant& v : sweep) verify(&v);
    alternate(&sweep, std::max(3, repeat / 3), calls);
    const size_t best_exact = fastest(sweep, 0);
    const size_t best_packets = fastest(sweep, std::size(kCtas));
    for (const Variant& v : sweep) write(op, bytes, calls, v, "sweep");

    const bool reduces = op == Op::kAllReduce || op == Op::kReduceScatter;
    const bool all_reduce = op == Op::kAllReduce;
    const std::string direct = all_reduce ? "one-shot" : "wire";
    std::vector<Variant> v;
    v.push_back({"exact", "bf16", 0, exact(0)});
    v.push_back({"exact-best", "bf16", kCtas[best_exact], exact(best_exact)});
    v.push_back({"fp8", "e4m3", 0, [&] { c_.unscaledFp8(comms_[0], true); }});
    if (reduces) v.push_back({"fp8-no-casts", "e4m3", 0, [&] { c_.unscaledFp8(comms_[0], false); }, false});
    v.push_back({direct, "e4m3", 0, wire(kDirect, kE4M3, kWhole)});
    v.push_back({direct, "int8", 0, wire(kDirect, kInt8, kWhole)});
    v.push_back({direct + "-best", "e4m3", kCtas[best_packets], wire(kDirect, kE4M3, kWhole, best_packets)});
    v.push_back({"packets", "e4m3", 0, wire(kDirect, kE4M3, kMove), false});
    v.push_back(
        {"packets-best", "e4m3", kCtas[best_packets], wire(kDirect, kE4M3, kMove, best_packets), false});
    if (all_reduce) {
      v.push_back({"two-shot", "e4m3", 0, wire(Algorithm::kTwoShot, kE4M3, kWhole)});
      v.push_back({"two-shot", "int8", 0, wire(Algorithm::kTwoShot, kInt8, kWhole)});
      v.push_back({"two-shot-packets", "e4m3", 0, wire(Algorithm::kTwoShot, kE4M3, kMove), false});
      v.push_back({"ring", "e4m3", 0, wire(Algorithm::kRing, kE4M3, kWhole)});
      v.push_back({"ring", "int8", 0, wire(Algorithm::kRing, kInt8, kWhole)});
      v.push_back({"ring-packets", "e4m3", 0, wire(Algorithm::kRing, kE4M3, kMove), false});
      if (bytes >= (4ull << 20))
        v.push_back({"one-shot-overlapped", "e4m3", 0, wire(Algorithm::kOverlapped, kE4M3, kWhole)});
    }
    if (bytes > kChunkBytes) {
      v.push_back({direct + "-uncut", "e4m3", 0, wire(kDirect, kE4M3, kWhole, 0, bytes)});
      v.push_back({"packets-uncut", "e4m3", 0, wire(kDirect, kE4M3, kMove, 0, bytes), false});
    }
    // With stages left out, named by what remains.
    if (bytes >= (1ull << 20)) {
      v.push_back({"quantize-only", "e4m3", 0, wire(kDirect, kE4M3, kQuantize), false});
      v.push_back({"finish-only", "e4m3", 0, wire(kDirect, kE4M3, kFinish), false});
      v.push_back({"codec-only", "e4m3", 0, wire(kDirect, kE4M3, kQuantize | kFinish), false});
      v.push_back({"no-finish", "e4m3", 0, wire(kDirect, kE4M3, kQuantize | kMove), false});
      v.push_back({"no-quantize", "e4m3", 0, wire(kDirect, kE4M3, kMove | kFinish), false});
    }
    for (Variant& one : v) verify(&one);
    alternate(&v, repeat, calls);
    for (const Variant& one : v) write(op, bytes, calls, one, "row");
  }

  // What the formats make of values as small as late gradients: a scale a block, or none.
  void smallValues() {
    constexpr float kScale = 0x1p-16f;
    const uint64_t bytes = std::min<uint64_t>(4ull << 20, *std::max_element(sizes_.begin(), sizes_.end()));
    c_.select(Op::kAllReduce, bytes);
    fill(c_.in(), pair_.rank(), bytes / 2, kScale);
    const auto wire = [this](ElementFormat f) {
      return [this, f] { c_.wire(Algorithm::kDirect, f, kWhole, comms_[0], kChunkBytes); };
    };
    std::vector<Variant> v;
    v.push_back({"fp8", "e4m3", 0, [&] { c_.unscaledFp8(comms_[0], true); }});
    v.push_back({"one-shot", "e4m3", 0, wire(ElementFormat::kE4M3)});
    v.push_back({"one-shot", "int8", 0, wire(ElementFormat::kInt8)});
    for (Variant& one : v) {
      verify(&one, kScale);
      write(Op::kAllReduce, bytes, 0, one, "small-values");
    }
  }

  void write(Op op, uint64_t bytes, int calls, const Variant& v, const char* kind) {
    if (pair_.rank() != 0) return;
    JsonLine row;
    row.text("kind", kind)
        .text("link", link_)
        .text("op", name(op))
        .number("bytes", static_cast<double>(bytes))
        .text("variant", v.name)
        .text("format", v.format)
        .number("min_ctas", v.ctas)
        .number("calls", calls)
        .numbers("us", v.us)
        .number("host_us", median(v.host_us))
        .number("sent_bytes", v.sent)
        .number("launches", v.launches);
    if (v.result) {
      row.number("rel_rms", v.error)
          .boolean("same_bits", v.identical)
          .text("compared", c_.replicates() ? "both GPUs and two runs" : "two runs");
    }
    row.print(out_);
  }

  Pair& pair_;
  std::FILE* out_;
  std::string link_;
  int repeat_;
  std::vector<uint64_t> sizes_;
  Collectives c_;
  std::vector<ncclComm_t> comms_;
};

}  // namespace
}  // namespace halfwire::two_gpu

int main(int argc, char** argv) {
  using namespace halfwire::two_gpu;
  const ProgramArguments arguments(argc, argv, "two-gpu-collectives");
  Pair pair;
  check(cudaSetDevice(pair.rank()), "cannot use the GPU");
  std::FILE* out = pair.rank() == 0 ? arguments.open() : nullptr;
  Bench(&pair, out, arguments.link, arguments.repeat, arguments.sizes).run();
  if (out != nullptr && std::fclose(out) != 0) die("cannot write %s", arguments.out);
  return pair.finish();
}
