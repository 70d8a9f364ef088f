// The host engine's collectives on 1 to 4 processes, against an oracle in double (floats) or 64-bit integers.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "abi/host_engine.h"
#include "abi/nccl_types.h"
#include "hostccl/ranks_for_test.h"

namespace halfwire {
namespace {

using testing::Rank;
using testing::runRanks;

// ---- elements, written once more and differently from the engine's: through double

double decode(ncclDataType_t type, const char* p) {
  const auto as = [&]<class T>(T x) {
    std::memcpy(&x, p, sizeof(x));
    return x;
  };
  switch (type) {
    case ncclFloat64:
      return as(double{});
    case ncclFloat32:
      return as(float{});
    case ncclBfloat16:
      return std::bit_cast<float>(static_cast<uint32_t>(as(uint16_t{})) << 16);
    default: {  // fp16
      const uint16_t h = as(uint16_t{});
      const int exponent = (h >> 10) & 31, mantissa = h & 1023;
      double magnitude = 0;
      if (exponent == 31) {
        magnitude = mantissa != 0 ? std::nan("") : INFINITY;
      } else if (exponent == 0) {
        magnitude = std::ldexp(mantissa, -24);
      } else {
        magnitude = std::ldexp(1024 + mantissa, exponent - 25);
      }
      return (h & 0x8000) != 0 ? -magnitude : magnitude;
    }
  }
}

// Relative half unit in the last place and the smallest subnormal's half.
double relativeError(ncclDataType_t type) {
  return type == ncclFloat64   ? 0x1p-53
         : type == ncclFloat32 ? 0x1p-24
         : type == ncclFloat16 ? 0x1p-11
                               : 0x1p-8;
}

bool isFloat(ncclDataType_t type) {
  return type == ncclFloat16 || type == ncclFloat32 || type == ncclFloat64 || type == ncclBfloat16;
}

uint64_t hash(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Element `i` of rank `r`: any bits for integers, a finite float of moderate size otherwise.
void fill(ncclDataType_t type, int rank, size_t i, char* p) {
  const uint64_t bits = hash(hash(static_cast<uint64_t>(rank) * 977 + static_cast<uint64_t>(type)) + i);
  const double value =
      std::ldexp(static_cast<double>(static_cast<int64_t>(bits)), -62) * (1 + static_cast<double>(i % 3));
  if (type == ncclFloat64) {
    std::memcpy(p, &value, 8);
  } else if (type == ncclFloat32) {
    const auto f = static_cast<float>(value);
    std::memcpy(p, &f, 4);
  } else if (type == ncclBfloat16) {
    const auto h = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16);
    std::memcpy(p, &h, 2);
  } else if (type == ncclFloat16) {
    const auto h = static_cast<uint16_t>((bits & 0x83ff) | (static_cast<uint64_t>(8 + bits % 10) << 10));
    std::memcpy(p, &h, 2);
  } else {
    std::memcpy(p, &bits, ncclTypeBytes(type));
  }
}

std::vector<char> filled(ncclDataType_t type, int rank, size_t count) {
  const size_t width = ncclTypeBytes(type);
  std::vector<char> data(count * width);
  for (size_t i = 0; i < count; ++i) fill(type, rank, i, data.data() + i * width);
  return data;
}

uint64_t integer(ncclDataType_t type, const char* p) {
  const auto as = [&]<class T>(T x) {
    std::memcpy(&x, p, sizeof(x));
    return static_cast<uint64_t>(static_cast<int64_t>(x));
  };
  switch (type) {
    case ncclInt8:
      return as(int8_t{});
    case ncclUint8:
      return as(uint8_t{});
    case ncclInt32:
      return as(int32_t{});
    case ncclUint32:
      return as(uint32_t{});
    default:
      return as(int64_t{});
  }
}

bool isSigned(ncclDataType_t type) { return type == ncclInt8 || type == ncclInt32 || type == ncclInt64; }

// Whether `got` is the reduction over ranks of element `i`, whose factors (1 for plain operators) are given.
bool isReduction(ncclDataType_t type, ncclRedOp_t op, const std::vector<double>& factors, size_t i,
                 const char* got) {
  const int ranks = static_cast<int>(factors.size());
  char element[8] = {};
  if (!isFloat(type)) {
    uint64_t acc = 0;
    for (int r = 0; r < ranks; ++r) {
      fill(type, r, i, element);
      const uint64_t x = integer(type, element);
      const bool less = isSigned(type) ? static_cast<int64_t>(x) < static_cast<int64_t>(acc) : x < acc;
      if (r == 0) {
        acc = x;
      } else if (op == ncclProd) {
        acc *= x;
      } else if (op == ncclMax) {
        acc = less ? acc : x;
      } else if (op == ncclMin) {
        acc = less ? x : acc;
      } else {
        acc += x;
      }
    }
    if (op == ncclAvg) {
      char wrapped[8];
      std::memcpy(wrapped, &acc, 8);
      acc = integer(type, wrapped);  // the sum wraps in the type first
      acc = isSigned(type) ? static_cast<uint64_t>(static_cast<int64_t>(acc) / ranks)
                           : acc / static_cast<uint64_t>(ranks);
    }
    return std::memcmp(&acc, got, ncclTypeBytes(type)) == 0;
  }
  double acc = 0, magnitude = 0;
  for (int r = 0; r < ranks; ++r) {
    fill(type, r, i, element);
    const double x = decode(type, element) * factors[static_cast<size_t>(r)];
    magnitude += std::abs(x);
    acc = r == 0           ? x
          : op == ncclProd ? acc * x
          : op == ncclMax  ? std::max(acc, x)
          : op == ncclMin  ? std::min(acc, x)
                           : acc + x;
  }
  const double unit = type == ncclFloat64 ? 0x1p-53 : 0x1p-24;  // of the accumulator
  const double tolerance = std::abs(acc) * (relativeError(type) + 2 * ranks * unit) +
                           magnitude * 2 * ranks * unit + (type == ncclFloat16 ? 0x1p-25 : 0);
  return std::abs(decode(type, got) - acc) <= tolerance;
}

std::vector<double> factorsOf(ncclDataType_t type, ncclRedOp_t op, int ranks) {
  double factor = 1;
  if (op == ncclAvg && isFloat(type)) {
    // NCCL rounds 1 / ranks to the type.
    factor = 1.0 / ranks;
    if (type == ncclFloat32) factor = static_cast<float>(factor);
    if (type == ncclBfloat16 || type == ncclFloat16) {
      const int bits = type == ncclBfloat16 ? 8 : 11;
      int exponent = 0;
      const double mantissa = std::frexp(factor, &exponent);
      factor = std::ldexp(std::nearbyint(std::ldexp(mantissa, bits)), exponent - bits);
    }
  }
  return std::vector<double>(static_cast<size_t>(ranks), factor);
}

struct DeviceBuffer {
  explicit DeviceBuffer(size_t bytes) : bytes(bytes) {
    OK(cudaMalloc(&data, bytes + 1));
    std::memset(data, 0x5a, bytes + 1);
  }
  explicit DeviceBuffer(const std::vector<char>& from) : DeviceBuffer(from.size()) {
    std::memcpy(data, from.data(), from.size());
  }
  ~DeviceBuffer() { cudaFree(data); }
  char* at(size_t i) const { return static_cast<char*>(data) + i; }
  void* data = nullptr;
  size_t bytes;
};

const ncclDataType_t kReducible[] = {ncclInt8,   ncclUint8,   ncclInt32,   ncclUint32,  ncclInt64,
                                     ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16};
const ncclRedOp_t kOps[] = {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg};

// AllReduce, ReduceScatter and Reduce of one type, operator and count, out of place and in place, all queued
// at once.
void checkReductions(Rank& self, ncclComm_t comm, cudaStream_t stream, ncclDataType_t type, ncclRedOp_t op,
                     size_t count, size_t stride = 1) {
  const size_t width = ncclTypeBytes(type), ranks = static_cast<size_t>(self.size),
               rank = static_cast<size_t>(self.rank);
  const auto factors = factorsOf(type, op, self.size);
  const DeviceBuffer in(filled(type, self.rank, count)), in_place(filled(type, self.rank, count)),
      out(count * width);
  const DeviceBuffer wide(filled(type, self.rank, count * ranks)),
      wide_in_place(filled(type, self.rank, count * ranks)), part(count * width), at_root(count * width);
  const int root = static_cast<int>(count % ranks);
  OK(ncclAllReduce(in.data, out.data, count, type, op, comm, stream));
  OK(ncclAllReduce(in_place.data, in_place.data, count, type, op, comm, stream));
  OK(ncclReduceScatter(wide.data, part.data, count, type, op, comm, stream));
  OK(ncclReduceScatter(wide_in_place.data, wide_in_place.at(rank * count * width), count, type, op, comm,
                       stream));
  OK(ncclReduce(in.data, self.rank == root ? at_root.data : nullptr, count, type, op, root, comm, stream));
  OK(cudaStreamSynchronize(stream));
  size_t wrong = 0;
  for (size_t i = 0; i < count; i += stride) {
    wrong += !isReduction(type, op, factors, i, out.at(i * width));
    wrong += !isReduction(type, op, factors, i, in_place.at(i * width));
    wrong += !isReduction(type, op, factors, rank * count + i, part.at(i * width));
    wrong += !isReduction(type, op, factors, rank * count + i, wide_in_place.at((rank * count + i) * width));
    if (self.rank == root) wrong += !isReduction(type, op, factors, i, at_root.at(i * width));
  }
  EXPECT_EQ(wrong, 0u) << "type " << type << " op " << op << " count " << count << " ranks " << self.size;
  EXPECT_EQ(*out.at(count * width), 0x5a) << "wrote beyond the buffer";
  EXPECT_EQ(std::memcmp(in.data, filled(type, self.rank, count).data(), count * width), 0)
      << "changed the input";
}

class Ranks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OneToFour, Ranks, ::testing::Values(1, 2, 3, 4));

TEST_P(Ranks, ReduceEveryTypeWithEveryOperator) {
  runRanks(GetParam(), [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    for (const ncclDataType_t type : kReducible) {
      for (const ncclRedOp_t op : kOps)
        checkReductions(self, comm, stream, type, op, op == ncclSum ? 1025 : 67);
    }
    OK(ncclCommDestroy(comm));
  });
}

TEST_P(Ranks, MoveEveryType) {
  runRanks(GetParam(), [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    const size_t ranks = static_cast<size_t>(self.size), rank = static_cast<size_t>(self.rank);
    for (int t = 0; t < ncclNumTypes; ++t) {
      const auto type = static_cast<ncclDataType_t>(t);
      const size_t width = ncclTypeBytes(type);
      for (const size_t count : {size_t{1}, size_t{517}}) {
        const size_t bytes = count * width;
        const DeviceBuffer in(filled(type, self.rank, count * ranks));
        const DeviceBuffer gathered(bytes * ranks), gathered_in_place(bytes * ranks),
            exchanged(bytes * ranks), received(bytes), sent(filled(type, self.rank, count)), root_copy(bytes),
            at_root(bytes * ranks), at_root_in_place(bytes * ranks), scattered(bytes),
            scattered_in_place(filled(type, self.rank, count * ranks));
        std::memcpy(gathered_in_place.at(rank * bytes), in.data, bytes);
        OK(ncclAllGather(in.data, gathered.data, count, type, comm, stream));
        OK(ncclAllGather(gathered_in_place.at(rank * bytes), gathered_in_place.data, count, type, comm,
                         stream));
        OK(ncclAlltoAll(in.data, exchanged.data, count, type, comm, stream));
        const int root = t % self.size;
        OK(ncclBroadcast(self.rank == root ? in.data : nullptr, root_copy.data, count, type, root, comm,
                         stream));
        OK(ncclBcast(sent.data, count, type, root, comm, stream));
        const bool is_root = self.rank == root;
        OK(ncclGather(in.data, is_root ? at_root.data : nullptr, count, type, root, comm, stream));
        OK(ncclScatter(is_root ? in.data : nullptr, scattered.data, count, type, root, comm, stream));
        // In place: the root's own part lies where it belongs.
        std::memcpy(at_root_in_place.at(rank * bytes), in.data, bytes);
        OK(ncclGather(at_root_in_place.at(rank * bytes), at_root_in_place.data, count, type, root, comm,
                      stream));
        OK(ncclScatter(scattered_in_place.data, scattered_in_place.at(rank * bytes), count, type, root, comm,
                       stream));
        OK(ncclGroupStart());
        OK(ncclSend(in.data, count, type, (self.rank + 1) % self.size, comm, stream));
        OK(ncclRecv(received.data, count, type, (self.rank + self.size - 1) % self.size, comm, stream));
        OK(ncclGroupEnd());
        OK(cudaStreamSynchronize(stream));
        for (size_t r = 0; r < ranks; ++r) {
          const auto theirs = filled(type, static_cast<int>(r), count * ranks);
          EXPECT_EQ(std::memcmp(gathered.at(r * bytes), theirs.data(), bytes), 0);
          EXPECT_EQ(std::memcmp(gathered_in_place.at(r * bytes), theirs.data(), bytes), 0);
          EXPECT_EQ(std::memcmp(exchanged.at(r * bytes), theirs.data() + rank * bytes, bytes), 0);
          if (is_root) {
            EXPECT_EQ(std::memcmp(at_root.at(r * bytes), theirs.data(), bytes), 0);
            EXPECT_EQ(std::memcmp(at_root_in_place.at(r * bytes), theirs.data(), bytes), 0);
          }
          if (static_cast<int>(r) == root) {
            EXPECT_EQ(std::memcmp(scattered.data, theirs.data() + rank * bytes, bytes), 0);
            EXPECT_EQ(std::memcmp(scattered_in_place.at(rank * bytes), theirs.data() + rank * bytes, bytes),
                      0);
            EXPECT_EQ(std::memcmp(root_copy.data, theirs.data(), bytes), 0);
            EXPECT_EQ(std::memcmp(sent.data, theirs.data(), bytes), 0);
          }
          if ((r + 1) % ranks == rank) {
            EXPECT_EQ(std::memcmp(received.data, theirs.data(), bytes), 0);
          }
        }
      }
    }
    OK(ncclCommDestroy(comm));
  });
}

TEST(Counts, AllFrom0To1025) {
  runRanks(3, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    const size_t most = 1026;
    const auto data = filled(ncclBfloat16, self.rank, most);
    const DeviceBuffer in(data), out(most * most * 2);
    for (size_t count = 0; count < most; ++count) {
      OK(ncclAllReduce(in.data, out.at(count * most * 2), count, ncclBfloat16, ncclSum, comm, stream));
    }
    OK(cudaStreamSynchronize(stream));
    const auto factors = factorsOf(ncclBfloat16, ncclSum, self.size);
    std::vector<char> all(most);
    size_t wrong = 0;
    for (size_t i = 0; i < most; ++i)
      all[i] = isReduction(ncclBfloat16, ncclSum, factors, i, out.at(((most - 1) * most + i) * 2));
    for (size_t i = 0; i + 1 < most; ++i) wrong += all[i] != 1;
    for (size_t count = 1; count < most; ++count) {
      wrong += std::memcmp(out.at(count * most * 2), out.at((most - 1) * most * 2), count * 2) != 0;
      wrong += *out.at((count * most + count) * 2) != 0x5a;
    }
    EXPECT_EQ(wrong, 0u);
    OK(ncclCommDestroy(comm));
  });
}

TEST(Counts, BigAndRagged) {
  runRanks(4, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    checkReductions(self, comm, stream, ncclFloat32, ncclSum, 600001, 41);
    checkReductions(self, comm, stream, ncclFloat16, ncclAvg, 299993, 41);
    const size_t bytes = 5000003;
    const DeviceBuffer in(filled(ncclInt8, 2, bytes)), out(bytes);
    OK(ncclBroadcast(in.data, out.data, bytes, ncclInt8, 2, comm, stream));
    OK(cudaStreamSynchronize(stream));
    EXPECT_EQ(std::memcmp(in.data, out.data, bytes), 0);
    OK(ncclCommDestroy(comm));
  });
}

uint64_t digest(const void* data, size_t bytes) {
  uint64_t h = 1;
  for (size_t i = 0; i < bytes; ++i) h = hash(h ^ static_cast<const uint8_t*>(data)[i]);
  return h;
}

// Bits that no order of summing gives twice: sums must not depend on who computes them, in which shard or
// form.
TEST(Numbers, EveryRankGetsTheSameBits) {
  runRanks(4, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    const size_t count = 40001;
    std::vector<float> data(count);
    for (size_t i = 0; i < count; ++i) {
      data[i] = std::ldexp(static_cast<float>(hash(i * 4 + static_cast<size_t>(self.rank)) % 1000003),
                           static_cast<int>(i % 60) - 30 * (self.rank % 2));
    }
    const DeviceBuffer in(std::vector<char>(reinterpret_cast<char*>(data.data()),
                                            reinterpret_cast<char*>(data.data() + count))),
        out(count * 4), gathered(count * 16);
    OK(ncclAllReduce(in.data, out.data, count, ncclFloat32, ncclSum, comm, stream));
    OK(ncclAllGather(in.data, gathered.data, count, ncclFloat32, comm, stream));
    OK(cudaStreamSynchronize(stream));
    std::vector<float> expected(count);
    for (size_t i = 0; i < count; ++i) {
      for (size_t r = 0; r < 4; ++r) {
        float x;
        std::memcpy(&x, gathered.at((r * count + i) * 4), 4);
        expected[i] = r == 0 ? x : expected[i] + x;
      }
    }
    EXPECT_EQ(std::memcmp(out.data, expected.data(), count * 4), 0) << "not the sum in rank order";
    self.shared.value[self.rank] = digest(out.data, count * 4);
    self.shared.reach(0);
    self.shared.await(0, 4);
    EXPECT_EQ(self.shared.value[self.rank], self.shared.value[0]);
    OK(ncclCommDestroy(comm));
  });
}

TEST(Numbers, NotFiniteStaysAndOverflowShows) {
  runRanks(2, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    // element: NaN + 1, inf + 1, inf - inf, max + max, max/2 + max/2, 1 + 1, as bf16 and fp16
    const uint16_t bf16[2][6] = {{0x7fc1, 0x7f80, 0x7f80, 0x7f7f, 0x7eff, 0x3f80},
                                 {0x3f80, 0x3f80, 0xff80, 0x7f7f, 0x7eff, 0x3f80}};
    const uint16_t fp16[2][6] = {{0x7e01, 0x7c00, 0x7c00, 0x7bff, 0x77ff, 0x3c00},
                                 {0x3c00, 0x3c00, 0xfc00, 0x7bff, 0x77ff, 0x3c00}};
    const uint16_t bf16_sum[6] = {0x7fff, 0x7f80, 0x7fff, 0x7f80, 0x7f7f, 0x4000};
    const uint16_t fp16_sum[6] = {0x7fff, 0x7c00, 0x7fff, 0x7c00, 0x7bff, 0x4000};
    const uint16_t bf16_average[6] = {0x7fff, 0x7f80, 0x7fff, 0x7f7f, 0x7eff, 0x3f80};
    uint16_t out[3][6];
    OK(ncclAllReduce(bf16[self.rank], out[0], 6, ncclBfloat16, ncclSum, comm, stream));
    OK(ncclAllReduce(fp16[self.rank], out[1], 6, ncclFloat16, ncclSum, comm, stream));
    OK(ncclAllReduce(bf16[self.rank], out[2], 6, ncclBfloat16, ncclAvg, comm, stream));
    OK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(out[0][i], bf16_sum[i]) << i;
      EXPECT_EQ(out[1][i], fp16_sum[i]) << i;
      EXPECT_EQ(out[2][i], bf16_average[i]) << "the average multiplies first: " << i;
    }
    OK(ncclCommDestroy(comm));
  });
}

template <class T>
void premultiply(Rank& self, ncclComm_t comm, cudaStream_t stream, ncclDataType_t type, const T (&scalars)[3],
                 const std::vector<double>& factors) {
  const size_t count = 777, width = ncclTypeBytes(type);
  const DeviceBuffer in(filled(type, self.rank, count)), out(count * width), from_device(count * width),
      scalar(sizeof(T));
  T host = scalars[self.rank];
  ncclRedOp_t op{}, device_op{};
  OK(ncclRedOpCreatePreMulSum(&op, &host, type, ncclScalarHostImmediate, comm));
  EXPECT_GE(static_cast<int>(op), static_cast<int>(ncclNumOps));
  host = T{};  // an immediate scalar is read at once
  OK(ncclRedOpCreatePreMulSum(&device_op, scalar.data, type, ncclScalarDevice, comm));
  // A device scalar is read when the operation runs: here the stream writes it first.
  OK(cudaMemcpyAsync(scalar.data, &scalars[self.rank], sizeof(T), cudaMemcpyHostToDevice, stream));
  OK(ncclGroupStart());
  OK(ncclAllReduce(in.data, out.data, count, type, op, comm, stream));
  OK(ncclAllReduce(in.data, from_device.data, count, type, device_op, comm, stream));
  OK(ncclRedOpDestroy(op, comm));  // inside the group: the call has copied it
  OK(ncclRedOpDestroy(device_op, comm));
  OK(ncclGroupEnd());
  EXPECT_EQ(ncclRedOpDestroy(op, comm), ncclInvalidArgument);
  OK(cudaStreamSynchronize(stream));
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i) wrong += !isReduction(type, ncclSum, factors, i, out.at(i * width));
  EXPECT_EQ(wrong, 0u) << "type " << type;
  EXPECT_EQ(std::memcmp(out.data, from_device.data, count * width), 0);
  EXPECT_EQ(ncclAllReduce(in.data, out.data, count, type, op, comm, stream), ncclInvalidArgument);
}

TEST(Numbers, EveryRankPremultipliesByItsOwnScalar) {
  runRanks(3, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    premultiply<uint16_t>(self, comm, stream, ncclBfloat16, {0x3f00, 0xc040, 0x0000}, {0.5, -3, 0});
    premultiply<uint16_t>(self, comm, stream, ncclFloat16, {0x3800, 0xc200, 0x3555},
                          {0.5, -3, 1365.0 / 4096});
    premultiply<float>(self, comm, stream, ncclFloat32, {0.1f, -7, 1e-3f}, {0.1f, -7, 1e-3f});
    premultiply<double>(self, comm, stream, ncclFloat64, {0.1, -7, 1e-3}, {0.1, -7, 1e-3});
    OK(ncclCommDestroy(comm));
  });
}

TEST(Bytes, AllReduceSendsWhatARingSends) {
  runRanks(4, [](Rank& self) {
    const ncclComm_t comm = self.world();
    const cudaStream_t stream = Rank::stream();
    const size_t count = 1 << 18;
    const DeviceBuffer buffer(count * 4), wide(count * 16);
    const auto sent = [&](auto call) {
      const uint64_t before = halfwire_host_egress_bytes();
      OK(call());
      OK(cudaStreamSynchronize(stream));
      return halfwire_host_egress_bytes() - before;
    };
    EXPECT_EQ(sent([&] {
                return ncclAllReduce(buffer.data, buffer.data, count, ncclFloat32, ncclSum, comm, stream);
              }),
              count * 4 * 2 * 3 / 4);
    EXPECT_EQ(sent([&] { return ncclAllGather(buffer.data, wide.data, count, ncclFloat32, comm, stream); }),
              count * 4 * 3);
    EXPECT_EQ(
        sent([&] { return ncclBroadcast(buffer.data, buffer.data, count, ncclFloat32, 1, comm, stream); }),
        self.rank == 0 ? 0 : count * 4);
    OK(ncclCommDestroy(comm));
  });
}

// Four ranks, 4 MiB each way at 200 Mbit/s: never faster than the link; in the best of three turns not much
// slower even on a busy machine. (The exact rate is a benchmark's to measure, on a quiet one.)
TEST(EmulatedLink, CostsWhatTheRateSays) {
  runRanks(4,
           [](Rank& self) {
             const ncclComm_t comm = self.world();
             const cudaStream_t stream = Rank::stream();
             const size_t part = (size_t{4} << 20) / 3;
             const DeviceBuffer in(part * 4), out(part * 4);
             const auto rate = [&](auto call, double bytes) {
               double best = 0;
               for (int turn = 0; turn < 3; ++turn) {
                 OK(ncclAllReduce(in.data, in.data, 1, ncclFloat32, ncclSum, comm, stream));
                 OK(cudaStreamSynchronize(stream));
                 const auto start = std::chrono::steady_clock::now();
                 OK(call());
                 OK(cudaStreamSynchronize(stream));
                 const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
                 best = std::max(best, bytes * 8 / took.count() / 200e6);
               }
               return best;
             };
             const double gather =
                 rate([&] { return ncclAllGather(in.data, out.data, part, ncclUint8, comm, stream); },
                      double(part) * 3);
             const double exchange =
                 rate([&] { return ncclAlltoAll(in.data, out.data, part, ncclUint8, comm, stream); },
                      double(part) * 3);
             const double reduce = rate(
                 [&] { return ncclAllReduce(in.data, in.data, part, ncclFloat32, ncclSum, comm, stream); },
                 double(part) * 4 * 1.5);
             const double incast = rate(
                 [&] {
                   OK(ncclGroupStart());
                   for (int p = 1; p < 4 && self.rank == 0; ++p)
                     OK(ncclRecv(out.at(size_t(p) * part), part, ncclUint8, p, comm, stream));
                   if (self.rank != 0) OK(ncclSend(in.data, part, ncclUint8, 0, comm, stream));
                   return ncclGroupEnd();
                 },
                 double(part) * 3);
             for (const double r : {gather, exchange, reduce}) {
               EXPECT_LT(r, 1.05);
               EXPECT_GT(r, 0.6);
             }
             if (self.rank == 0) {
               EXPECT_LT(incast, 1.05) << "three senders shared one receiver's link";
               // The senders have left by now; what they sent before must not have been cut short.
               ncclResult_t state = ncclSystemError;
               OK(ncclCommGetAsyncError(comm, &state));
               EXPECT_EQ(state, ncclSuccess);
             }
             OK(ncclCommDestroy(comm));
           },
           {{"HALFWIRE_HOST_LINK", "200Mbit"}});
}

}  // namespace
}  // namespace halfwire
