// A transport of our own for two GPUs that reach each other only through host memory, as a prototype to
// measure: a one-shot AllReduce in one kernel a GPU. Each thread block is a channel: its writers quantize a
// chunk of this rank's buffer straight into pinned host memory that both GPUs map and release a counter
// there; its readers acquire the peer's counter, read the peer's chunk, sum both packets in rank order and
// write the result, while the writers are chunks ahead. A channel has a few slots; the readers hand slots
// back by a second counter, so host memory is bounded whatever the message. Nothing is launched, copied or
// waited for by the host in between.
//
// Results are held bit for bit against the scalar reference of docs/wire-format.md, on normal numbers and on
// random bit patterns. NCCL's AllReduce alternates with it in the same run: start with NCCL_P2P_DISABLE=1 to
// have NCCL on the same link.
//
// The memory is mapped by both processes and registered with CUDA in each: what cudaHostAlloc cannot share
// between processes. A wait that lasts longer than some seconds gives up and fails the run.
//
// Usage: two-gpu-host-transport OUT.jsonl LINK REPEAT BYTES[,BYTES...]
#include <cstring>
#include <functional>
#include <sstream>
#include <thread>

#include "data.cuh"
#include "wire/codec.h"
#include "wire/cuda_arithmetic.h"

namespace halfwire::two_gpu {
namespace {

constexpr uint32_t kWriters = 256;  // threads of a block that quantize and write
constexpr uint32_t kReaders = 256;  // threads of a block that read and sum
constexpr uint32_t kBlock = 128;    // elements that share a scale
constexpr uint32_t kMaxChunk = 131072;
constexpr uint32_t kMaxChannels = 128;
constexpr uint64_t kMaxWindow = 48ull << 20;  // bytes of slots of one rank
constexpr auto kFormat = ElementFormat::kE4M3;
constexpr auto kPath = CodecPath::kHardware;
constexpr uint64_t kPatienceNs = 5'000'000'000;

// A counter that one GPU writes and the other polls, on a line of its own.
struct alignas(128) Counter {
  uint64_t value;
};

// What both GPUs map.
struct HostMemory {
  Counter sent[kRanks][kMaxChannels];      // chunks that this rank's channel has written so far
  Counter consumed[kRanks][kMaxChannels];  // chunks that this rank's channel has read so far
  alignas(4096) uint8_t slots[kRanks][kMaxWindow];
};

struct Shape {
  uint32_t channels = 32;
  uint32_t chunk = 32768;  // elements
  uint32_t slots = 4;

  uint64_t slotBytes() const { return packetBytes({}, chunk); }
  uint64_t windowBytes() const { return slotBytes() * slots * channels; }
};

struct Arguments {
  const uint8_t* in;
  uint8_t* out;
  uint64_t elements;  // a multiple of kBlock
  uint32_t chunk;
  uint32_t slots;
  uint32_t slot_bytes;
  int rank;
  HostMemory* host;
  uint8_t* local;      // copies of this rank's slots, in its own memory
  uint64_t* progress;  // chunks of each channel before this call
  uint32_t* failed;
};

__device__ __forceinline__ uint64_t acquire(const Counter* c) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(&c->value) : "memory");
  return v;
}
__device__ __forceinline__ void release(Counter* c, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&c->value), "l"(v) : "memory");
}
__device__ __forceinline__ uint4 loadVolatile(const void* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint64_t clockNs() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
template <uint32_t kId, uint32_t kThreads>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

struct Channel {
  float scales[2][kMaxChunk / kBlock];  // of the chunk being written and of the peer's being read
  volatile uint64_t written;            // what the two roles of the block tell each other
  volatile uint64_t read;
  bool failed;   // of thread 0 of each role, so that one that gives up takes the other along
  bool stop[2];  // what thread 0 of a role tells its role; read between two meetings
};

// Until the peer's counter and the block's own one reach `peers` and `own`. False after too long.
__device__ bool wait(Channel& ch, const Counter* counter, uint64_t peers, const volatile uint64_t& mine,
                     uint64_t own) {
  const uint64_t limit = clockNs() + kPatienceNs;
  while (mine < own || acquire(counter) < peers) {
    if (!*static_cast<volatile bool*>(&ch.failed) && clockNs() < limit) {
      __nanosleep(64);
      continue;
    }
    *static_cast<volatile bool*>(&ch.failed) = true;
    return false;
  }
  __threadfence_block();
  return true;
}

// Chunk `i` of a channel: `elements` from `start` on, in the slot at `slot`.
struct Place {
  uint64_t start;
  uint32_t elements;
  uint64_t slot;
};
__device__ __forceinline__ Place place(const Arguments& a, uint64_t i, uint64_t sequence) {
  Place p;
  p.start = (blockIdx.x + i * gridDim.x) * a.chunk;
  p.elements = static_cast<uint32_t>(a.elements - p.start < a.chunk ? a.elements - p.start : a.chunk);
  p.slot = (uint64_t{blockIdx.x} * a.slots + sequence % a.slots) * a.slot_bytes;
  return p;
}

// With kCodec false the same bytes move and nothing is computed.
template <bool kCodec>
__device__ void writeChunks(const Arguments& a, Channel& ch, uint64_t base, uint64_t chunks) {
  const uint32_t thread = threadIdx.x;
  uint8_t* const window = a.host->slots[a.rank];
  for (uint64_t i = 0; i < chunks; ++i) {
    const uint64_t sequence = base + i;
    const Place p = place(a, i, sequence);
    if (thread == 0 && sequence >= a.slots) {
      const uint64_t free = sequence + 1 - a.slots;
      ch.stop[0] = !wait(ch, &a.host->consumed[1 - a.rank][blockIdx.x], free, ch.read, free);
    }
    meet<1, kWriters>();
    if (ch.stop[0]) return;
    uint8_t* const packet = window + p.slot;
    uint8_t* const copy = a.local + p.slot;
#pragma unroll 2
    for (uint32_t at = thread * 16; at < p.elements; at += kWriters * 16) {
      uint32_t codes[4];
      if constexpr (kCodec) {
        const uint4* from = reinterpret_cast<const uint4*>(a.in + (p.start + at) * 2);
        const uint4 raw[2] = {from[0], from[1]};
        float y[16];
        uint32_t amax = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t word[4] = {raw[half].x, raw[half].y, raw[half].z, raw[half].w};
#pragma unroll
          for (int w = 0; w < 4; ++w) cuda::loadWord<DataType::kBf16>(word[w], y + 8 * half + 2 * w);
        }
        // A block is eight neighbouring lanes, all of them here or none: chunks are whole blocks.
        const uint32_t lanes = 0xffu << (thread & 24);
        constexpr uint32_t kOverflow = overflowBits(DataType::kBf16);
        bool special = false;
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          const uint32_t magnitude = cuda::bitsOf(y[e]) & 0x7fffffffu;
          special |= magnitude >= kOverflow;
          if (magnitude < kOverflow) amax = cuda::maxOf(amax, magnitude);
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2)
          amax = cuda::maxOf(amax, __shfl_xor_sync(lanes, amax, offset));
        const cuda::BlockScale scale = cuda::blockScale<kFormat>(ScaleFormat::kFp32, amax);
        if (thread % 8 == 0) ch.scales[0][at / kBlock] = cuda::floatOf(scale.stored);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float from4[4] = {y[4 * w], y[4 * w + 1], y[4 * w + 2], y[4 * w + 3]};
          const float z[4] = {cuda::mulRn(from4[0], scale.v), cuda::mulRn(from4[1], scale.v),
                              cuda::mulRn(from4[2], scale.v), cuda::mulRn(from4[3], scale.v)};
          codes[w] = cuda::encode4<kFormat, kPath>(z);
          if (special) codes[w] = cuda::markNonFinite<kFormat>(codes[w], from4, kOverflow);
        }
      } else {
        const uint4 raw = *reinterpret_cast<const uint4*>(a.in + p.start + at);
        codes[0] = raw.x;
        codes[1] = raw.y;
        codes[2] = raw.z;
        codes[3] = raw.w;
      }
      const uint4 vector = make_uint4(codes[0], codes[1], codes[2], codes[3]);
      *reinterpret_cast<uint4*>(packet + at) = vector;
      if constexpr (kCodec) *reinterpret_cast<uint4*>(copy + at) = vector;
    }
    meet<1, kWriters>();
    // Scales go in one run: single ones would be many small packets on the bus.
    const uint32_t blocks = p.elements / kBlock;
    const uint32_t padded = (blocks + 3) / 4 * 4;
    for (uint32_t b = thread; b < padded; b += kWriters) {
      const float scale = kCodec && b < blocks ? ch.scales[0][b] : 0.0f;
      reinterpret_cast<float*>(packet + p.elements)[b] = scale;
      if constexpr (kCodec) reinterpret_cast<float*>(copy + p.elements)[b] = scale;
    }
    __threadfence_block();
    meet<1, kWriters>();
    if (thread == 0) {
      ch.written = sequence + 1;
      release(&a.host->sent[a.rank][blockIdx.x], sequence + 1);
    }
  }
}

template <bool kCodec>
__device__ void readChunks(const Arguments& a, Channel& ch, uint64_t base, uint64_t chunks) {
  constexpr uint32_t kDepth = 4;  // loads in flight a thread
  constexpr uint32_t kRow = kReaders * 16;
  const uint32_t thread = threadIdx.x - kWriters;
  const uint8_t* const window = a.host->slots[1 - a.rank];
  const float bound = typeMax(DataType::kBf16);
  for (uint64_t i = 0; i < chunks; ++i) {
    const uint64_t sequence = base + i;
    const Place p = place(a, i, sequence);
    if (thread == 0)
      ch.stop[1] = !wait(ch, &a.host->sent[1 - a.rank][blockIdx.x], sequence + 1, ch.written, sequence + 1);
    meet<2, kReaders>();
    if (ch.stop[1]) return;
    const uint8_t* const packet = window + p.slot;
    const uint8_t* const copy = a.local + p.slot;
    const float* const own_scales = reinterpret_cast<const float*>(copy + p.elements);
    for (uint32_t b = thread * 4; b < p.elements / kBlock; b += kReaders * 4) {
      *reinterpret_cast<uint4*>(&ch.scales[1][b]) = loadVolatile(packet + p.elements + b * 4);
    }
    bool scales_ready = false;
    for (uint32_t first = thread * 16; first - thread * 16 < p.elements; first += kDepth * kRow) {
      uint4 theirs[kDepth];
#pragma unroll
      for (uint32_t d = 0; d < kDepth; ++d) {
        if (first + d * kRow < p.elements) theirs[d] = loadVolatile(packet + first + d * kRow);
      }
      if (!scales_ready) meet<2, kReaders>();
      scales_ready = true;
#pragma unroll
      for (uint32_t d = 0; d < kDepth; ++d) {
        const uint32_t at = first + d * kRow;
        if (at >= p.elements) break;
        if constexpr (!kCodec) {
          *reinterpret_cast<uint4*>(a.out + p.start + at) = theirs[d];
          continue;
        }
        const uint4 mine = loadVolatile(copy + at);
        const float own_scale = const_cast<const volatile float*>(own_scales)[at / kBlock];
        const float peer_scale = ch.scales[1][at / kBlock];
        const uint32_t own[4] = {mine.x, mine.y, mine.z, mine.w};
        const uint32_t peer[4] = {theirs[d].x, theirs[d].y, theirs[d].z, theirs[d].w};
        uint32_t word[8];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float t[kRanks][4];
          cuda::decodeScaled4<kFormat, kPath>(own[w], own_scale, bound, false, t[0]);
          cuda::decodeScaled4<kFormat, kPath>(peer[w], peer_scale, bound, false, t[1]);
          float sum[4];
#pragma unroll
          for (int e = 0; e < 4; ++e)
            sum[e] = a.rank == 0 ? cuda::addRn(t[0][e], t[1][e]) : cuda::addRn(t[1][e], t[0][e]);
          word[2 * w] = cuda::storeWord<DataType::kBf16>(sum);
          word[2 * w + 1] = cuda::storeWord<DataType::kBf16>(sum + 2);
        }
        uint4* to = reinterpret_cast<uint4*>(a.out + (p.start + at) * 2);
        to[0] = make_uint4(word[0], word[1], word[2], word[3]);
        to[1] = make_uint4(word[4], word[5], word[6], word[7]);
      }
    }
    meet<2, kReaders>();
    if (thread == 0) {
      ch.read = sequence + 1;
      release(&a.host->consumed[a.rank][blockIdx.x], sequence + 1);
    }
  }
}

template <bool kCodec>
__global__ void __launch_bounds__(kWriters + kReaders, 1)
    allReduceKernel(const __grid_constant__ Arguments a) {
  __shared__ alignas(16) Channel ch;
  const uint64_t base = a.progress[blockIdx.x];
  const uint64_t all = (a.elements + a.chunk - 1) / a.chunk;
  const uint64_t chunks = all > blockIdx.x ? (all - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  if (threadIdx.x == 0) {
    ch.written = base;
    ch.read = base;
    ch.failed = false;
    ch.stop[0] = false;
    ch.stop[1] = false;
  }
  __syncthreads();
  if (threadIdx.x < kWriters) {
    writeChunks<kCodec>(a, ch, base, chunks);
  } else {
    readChunks<kCodec>(a, ch, base, chunks);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    a.progress[blockIdx.x] = base + chunks;
    if (ch.failed) *a.failed = 1;
  }
}

// Bit patterns of every kind: not a number, infinite, subnormal, sums that overflow.
__global__ void patternKernel(uint16_t* out, int rank, uint64_t n) {
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += uint64_t{gridDim.x} * blockDim.x) {
    const uint64_t h = mix(i * 2 + static_cast<uint64_t>(rank) + 77);
    // Blocks of about one magnitude each, so that small ones are not all flushed; every sixteenth block of
    // any bits.
    const uint64_t exponent = mix(i / kBlock + 5) % 256;
    const bool any = mix(i / kBlock + 9) % 16 == 0;
    const auto bits = static_cast<uint16_t>((h & 0x80ff) | (exponent << 7));
    out[i] = any ? static_cast<uint16_t>(h >> 20) : bits;
  }
}

// The AllReduce of docs/wire-format.md by the scalar reference, over as many host threads as there are.
std::vector<uint16_t> reference(const std::vector<uint16_t> (&in)[kRanks]) {
  const uint64_t n = in[0].size();
  std::vector<uint16_t> out(n);
  constexpr uint64_t kStep = 1 << 16;
  const WireFormat format;
  const unsigned threads = std::clamp(std::thread::hardware_concurrency() / kRanks, 1u, 16u);
  std::vector<std::thread> workers;
  for (unsigned t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      std::vector<uint8_t> packets(kRanks * packetBytes(format, kStep));
      for (uint64_t at = t * kStep; at < n; at += threads * kStep) {
        const uint64_t m = std::min(kStep, n - at);
        const uint64_t pitch = packetBytes(format, m);
        for (int rank = 0; rank < kRanks; ++rank) {
          QuantizeJob q;
          q.in = in[rank].data() + at;
          q.in_pitch = q.in_total = q.segment_elements = m;
          q.out = packets.data() + static_cast<uint64_t>(rank) * pitch;
          q.out_pitch = pitch;
          reference::quantize(q);
        }
        ReduceJob r;
        r.to_packet = false;
        r.packets = kRanks;
        r.in = packets.data();
        r.in_pitch = pitch;
        r.elements = m;
        r.out = out.data() + at;
        reference::reduce(r);
      }
    });
  }
  for (std::thread& w : workers) w.join();
  return out;
}

struct Variant {
  std::string name;
  std::function<void()> run;
  std::vector<double> us, host_us;
  double error = -1;
  double different = -1;  // elements that differ from the reference; -1 where that does not apply
  bool same = true;
};

class Bench {
 public:
  Bench(Pair* pair, HostMemory* host, std::FILE* out, std::string link, int repeat, uint64_t most)
      : pair_(*pair), host_(host), out_(out), link_(std::move(link)), repeat_(repeat) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "no stream");
    check(cudaHostRegister(host, sizeof(HostMemory), cudaHostRegisterPortable | cudaHostRegisterMapped),
          "cannot map the shared memory on the GPU");
    check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped_), host, 0), "no device pointer");
    check(cudaMalloc(&in_, most), "no memory for the input");
    check(cudaMalloc(&result_, most), "no memory for the output");
    check(cudaMalloc(&local_, kMaxWindow), "no memory for the packets");
    check(cudaMalloc(&packets_, most + (1 << 20)), "no memory for the packets");
    check(cudaMalloc(&progress_, kMaxChannels * sizeof(uint64_t)), "no memory");
    check(cudaMalloc(&failed_, sizeof(uint32_t)), "no memory");
    check(cudaMemset(failed_, 0, sizeof(uint32_t)), "cannot clear");
    fill(in_, pair_.rank(), most / 2);
    for (const int ctas : {0, 4, 8, 16, 32}) comms_.push_back({ctas, pair_.connect(ctas)});
  }

  void run(const std::vector<uint64_t>& sizes) {
    for (const uint64_t bytes : sizes) {
      if (bytes <= (256ull << 20)) choose(bytes);
      measure(bytes);
    }
    patterns(std::min<uint64_t>(sizes.front(), 64ull << 20));
    for (const auto& [ctas, comm] : comms_) check(ncclCommDestroy(comm), "cannot close");
  }

 private:
  void allReduce(uint64_t bytes, bool codec) {
    Arguments a{static_cast<const uint8_t*>(in_),
                static_cast<uint8_t*>(result_),
                bytes / 2,
                shape_.chunk,
                shape_.slots,
                static_cast<uint32_t>(shape_.slotBytes()),
                pair_.rank(),
                mapped_,
                static_cast<uint8_t*>(local_),
                progress_,
                failed_};
    auto* kernel = codec ? &allReduceKernel<true> : &allReduceKernel<false>;
    kernel<<<shape_.channels, kWriters + kReaders, 0, stream_>>>(a);
    check(cudaGetLastError(), "cannot launch");
  }
  void nccl(size_t comm, uint64_t bytes) {
    check(ncclAllReduce(in_, result_, bytes / 2, ncclBfloat16, ncclSum, comms_[comm].comm, stream_),
          "NCCL failed");
  }
  void ncclPackets(uint64_t bytes) {
    const uint64_t packet = packetBytes({}, bytes / 2);
    check(ncclAllGather(static_cast<char*>(packets_) + static_cast<uint64_t>(pair_.rank()) * packet, packets_,
                        packet, ncclUint8, comms_[0].comm, stream_),
          "NCCL failed");
  }

  void finish() {
    check(cudaStreamSynchronize(stream_), "the stream failed");
    uint32_t failed = 0;
    check(cudaMemcpy(&failed, failed_, sizeof failed, cudaMemcpyDeviceToHost), "cannot read");
    if (failed != 0) die("rank %d waited for its peer in vain", pair_.rank());
  }

  // Both ranks agree on a shape and start its counters afresh.
  void use(const Shape& shape) {
    finish();
    pair_.barrier();
    shape_ = shape;
    check(cudaMemset(progress_, 0, kMaxChannels * sizeof(uint64_t)), "cannot clear");
    check(cudaDeviceSynchronize(), "cannot clear");
    if (pair_.rank() == 0) {
      std::memset(host_->sent, 0, sizeof host_->sent);
      std::memset(host_->consumed, 0, sizeof host_->consumed);
    }
    pair_.barrier();
  }

  // The shape with the fewest thread blocks among those within a twentieth of the fastest: what the transport
  // takes of the GPU, the program's own kernels lose.
  void choose(uint64_t bytes) {
    std::vector<std::pair<double, Shape>> tried;
    for (const uint32_t channels : {8u, 16u, 32u, 64u, 128u}) {
      for (const uint32_t chunk : {2048u, 8192u, 32768u, 131072u}) {
        for (const uint32_t slots : {2u, 4u}) {
          const Shape shape{channels, chunk, slots};
          if (shape.windowBytes() > kMaxWindow || uint64_t{channels} * chunk > bytes / 2) continue;
          use(shape);
          std::vector<double> us;
          for (int i = 0; i < 6; ++i) {
            const double t = pair_.time(2, stream_, [&] { allReduce(bytes, true); }).us;
            if (i > 0) us.push_back(t);
          }
          finish();
          tried.emplace_back(median(us), shape);
          if (pair_.rank() != 0) continue;
          JsonLine()
              .text("kind", "shape")
              .text("link", link_)
              .number("bytes", static_cast<double>(bytes))
              .number("channels", channels)
              .number("chunk_elements", chunk)
              .number("slots", slots)
              .number("window_bytes", static_cast<double>(shape.windowBytes()))
              .numbers("us", us)
              .print(out_);
        }
      }
    }
    double fastest = 1e300;
    for (const auto& [us, shape] : tried) fastest = std::min(fastest, us);
    std::pair<double, Shape> best{1e300, Shape{1u << 30, 0, 0}};
    for (const auto& one : tried) {
      if (one.first > fastest * 1.05) continue;
      if (one.second.channels < best.second.channels ||
          (one.second.channels == best.second.channels && one.first < best.first))
        best = one;
    }
    use(best.second);
  }

  std::vector<uint16_t> download(const void* from, uint64_t elements) {
    std::vector<uint16_t> v(elements);
    check(cudaMemcpy(v.data(), from, elements * 2, cudaMemcpyDeviceToHost), "cannot read");
    return v;
  }

  // Elements of the result that are not what the reference makes of both ranks' inputs, over both ranks.
  template <class Make>
  double differences(uint64_t bytes, Make&& make) {
    const uint64_t n = bytes / 2;
    std::vector<uint16_t> in[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
      make(packets_, rank);
      check(cudaDeviceSynchronize(), "cannot make the input");
      in[rank] = download(packets_, n);
    }
    const std::vector<uint16_t> want = reference(in);
    const std::vector<uint16_t> got = download(result_, n);
    uint64_t different = 0;
    for (uint64_t i = 0; i < n; ++i) different += want[i] != got[i];
    return pair_.sumOver(static_cast<double>(different));
  }

  void verify(Variant* v, uint64_t bytes) {
    check(cudaMemset(result_, 0xff, bytes), "cannot poison");
    check(cudaDeviceSynchronize(), "cannot poison");
    v->run();
    finish();
    const ErrorSums mine = compare(result_, bytes / 2, {true, 0, bytes / 2});
    const double error = pair_.sumOver(mine.error);
    v->error = std::sqrt(error / pair_.sumOver(mine.total));
    v->same = pair_.same(mine.hash);
  }

  void measure(uint64_t bytes) {
    const int calls = static_cast<int>(std::clamp<uint64_t>((64ull << 20) / bytes, 1, 20));
    const int repeat = bytes > (256ull << 20) ? std::max(3, repeat_ / 2) : repeat_;
    // The fastest number of thread blocks for NCCL at this size.
    size_t best = 0;
    double best_us = 1e300;
    for (size_t i = 0; i < comms_.size(); ++i) {
      std::vector<double> us;
      for (int k = 0; k < 5; ++k) {
        const double t = pair_.time(calls, stream_, [&] { nccl(i, bytes); }).us;
        if (k > 0) us.push_back(t);
      }
      if (median(us) < best_us) {
        best_us = median(us);
        best = i;
      }
    }
    std::vector<Variant> variants(5);
    const auto set = [&](size_t i, const char* name, std::function<void()> run) {
      variants[i].name = name;
      variants[i].run = std::move(run);
    };
    set(0, "exact", [&] { nccl(0, bytes); });
    set(1, "exact-best", [&, best] { nccl(best, bytes); });
    set(2, "host-transport", [&] { allReduce(bytes, true); });
    set(3, "host-transport-bytes", [&] { allReduce(bytes, false); });
    set(4, "packets", [&] { ncclPackets(bytes); });
    verify(&variants[0], bytes);
    verify(&variants[1], bytes);
    verify(&variants[2], bytes);
    // The scalar reference is slow: larger results are held against fp64 sums alone.
    if (bytes <= (256ull << 20)) {
      variants[2].different = differences(bytes, [&](void* to, int rank) { fill(to, rank, bytes / 2); });
    }
    for (Variant& v : variants) v.run();
    finish();
    for (int i = 0; i < repeat; ++i) {
      for (Variant& v : variants) {
        const Pair::Time t = pair_.time(calls, stream_, v.run);
        v.us.push_back(t.us);
        v.host_us.push_back(t.host_us);
      }
    }
    finish();
    for (const Variant& v : variants) write(v, bytes, calls, "transport", best);
  }

  void patterns(uint64_t bytes) {
    const auto make = [&](void* to, int rank) {
      patternKernel<<<1056, 256>>>(static_cast<uint16_t*>(to), rank, bytes / 2);
    };
    make(in_, pair_.rank());
    check(cudaDeviceSynchronize(), "cannot make the input");
    Variant v{"host-transport", [&] { allReduce(bytes, true); }};
    verify(&v, bytes);
    v.different = differences(bytes, make);
    v.error = -1;  // of no meaning beside infinities
    write(v, bytes, 0, "transport-bit-patterns", 0);
  }

  void write(const Variant& v, uint64_t bytes, int calls, const char* kind, size_t best) {
    if (pair_.rank() != 0) return;
    JsonLine row;
    row.text("kind", kind)
        .text("link", link_)
        .text("op", "AllReduce")
        .number("bytes", static_cast<double>(bytes))
        .text("variant", v.name)
        .number("min_ctas", v.name == "exact-best" ? comms_[best].ctas : 0)
        .number("calls", calls)
        .numbers("us", v.us)
        .number("host_us", median(v.host_us));
    if (v.name.starts_with("host-transport")) {
      row.number("channels", shape_.channels)
          .number("chunk_elements", shape_.chunk)
          .number("slots", shape_.slots)
          .number("window_bytes", static_cast<double>(shape_.windowBytes()));
    }
    if (v.error != -1) row.number("rel_rms", v.error);
    if (v.error != -1 || v.different >= 0) row.boolean("same_bits", v.same);
    if (v.different >= 0) row.number("elements_unlike_reference", v.different);
    row.print(out_);
  }

  struct Comm {
    int ctas;
    ncclComm_t comm;
  };

  Pair& pair_;
  HostMemory* host_;
  HostMemory* mapped_ = nullptr;
  std::FILE* out_;
  std::string link_;
  int repeat_;
  Shape shape_;
  cudaStream_t stream_ = nullptr;
  void *in_ = nullptr, *result_ = nullptr, *local_ = nullptr, *packets_ = nullptr;
  uint64_t* progress_ = nullptr;
  uint32_t* failed_ = nullptr;
  std::vector<Comm> comms_;
};

}  // namespace
}  // namespace halfwire::two_gpu

int main(int argc, char** argv) {
  using namespace halfwire::two_gpu;
  const ProgramArguments arguments(argc, argv, "two-gpu-host-transport");
  auto* host = static_cast<HostMemory*>(mapShared(sizeof(HostMemory)));
  Pair pair;
  if (pair.rank() == 0) std::memset(static_cast<void*>(host), 0, sizeof(HostMemory));
  pair.barrier();
  check(cudaSetDevice(pair.rank()), "cannot use the GPU");
  std::FILE* out = pair.rank() == 0 ? arguments.open() : nullptr;
  const std::vector<uint64_t>& sizes = arguments.sizes;
  Bench(&pair, host, out, arguments.link, arguments.repeat, *std::max_element(sizes.begin(), sizes.end()))
      .run(sizes);
  if (out != nullptr && std::fclose(out) != 0) die("cannot write %s", arguments.out);
  return pair.finish();
}
