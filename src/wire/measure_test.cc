// The figures that the formats promise, and what `halfwire bench codec` reports.
#include "wire/measure.h"

#include <gtest/gtest.h>

#include <cmath>

namespace halfwire {
namespace {

CodecCase quick(ElementFormat element, ScaleFormat scale, CodecOp op = CodecOp::kQuantize) {
  CodecCase c;
  c.format = {element, scale, 128};
  c.op = op;
  c.elements = 1 << 16;
  c.packets = 2;
  c.seconds = 0.001;
  c.snr_elements = 1 << 18;
  return c;
}

TEST(Measure, AccuracyAndBytesSaved) {
  const struct {
    ElementFormat element;
    ScaleFormat scale;
    double snr_db, wire_ratio;
  } promises[] = {{ElementFormat::kE4M3, ScaleFormat::kFp32, 31.7, 0.5157},
                  {ElementFormat::kE5M2, ScaleFormat::kFp32, 25.7, 0.5157},
                  {ElementFormat::kInt8, ScaleFormat::kFp32, 43.5, 0.5157},
                  {ElementFormat::kE3M4, ScaleFormat::kFp32, 37.7, 0.5157},
                  {ElementFormat::kE3M4, ScaleFormat::kE8M0, 37.3, 0.5040},
                  {ElementFormat::kE4M3, ScaleFormat::kE8M0, 31.4, 0.5040},
                  {ElementFormat::kE5M2, ScaleFormat::kE8M0, 25.5, 0.5040},
                  {ElementFormat::kInt8, ScaleFormat::kE8M0, 40.4, 0.5040}};
  for (const auto& promise : promises) {
    const Result<CodecRow> row = measureCodec(quick(promise.element, promise.scale));
    ASSERT_TRUE(row.ok()) << row.status().message();
    EXPECT_GE(row.value().snr_db, promise.snr_db) << row.value().format << " " << row.value().scale;
    EXPECT_LE(row.value().wire_ratio, promise.wire_ratio) << row.value().format << " " << row.value().scale;
  }
}

// An error that is uniform between two codes' distances has twice the variance of one within half of it.
TEST(Measure, StochasticRoundingDoublesTheNoise) {
  for (const ElementFormat element : kElementFormats) {
    CodecCase c = quick(element, ScaleFormat::kFp32);
    const Result<CodecRow> nearest = measureCodec(c);
    c.rounding = {true, 1, 0};
    const Result<CodecRow> stochastic = measureCodec(c);
    ASSERT_TRUE(nearest.ok() && stochastic.ok());
    EXPECT_EQ(stochastic.value().rounding, "stochastic");
    EXPECT_NEAR(nearest.value().snr_db - stochastic.value().snr_db, 10 * std::log10(2.0), 0.15)
        << elementFormatName(element);
  }
}

TEST(Measure, RowsSayWhatWasMeasured) {
  double last = 0;
  CodecCase c = quick(ElementFormat::kE5M2, ScaleFormat::kE8M0, CodecOp::kReduce);
  c.packets = 8;
  c.path = CodecPath::kScalar;
  c.type = DataType::kFp16;
  c.snr_elements = 1;
  const Result<CodecRow> row = measureCodec(c, [&](double done) {
    EXPECT_GE(done, last);
    last = done;
  });
  ASSERT_TRUE(row.ok());
  EXPECT_EQ(last, 1.0);
  EXPECT_EQ(row.value().device, "host");
  EXPECT_EQ(row.value().op, "reduce");
  EXPECT_EQ(row.value().path, "scalar");
  EXPECT_EQ(row.value().input, "fp16");
  EXPECT_EQ(row.value().format, "e5m2");
  EXPECT_EQ(row.value().scale, "e8m0");
  EXPECT_EQ(row.value().block, 128u);
  EXPECT_EQ(row.value().working_set_bytes, 9 * packetBytes(c.format, c.elements));
  EXPECT_GT(row.value().bytes_per_s, 0);
  EXPECT_GT(row.value().copy_bytes_per_s, 0);
  EXPECT_GT(row.value().snr_db, 20);
  c.path = CodecPath::kSimd;
  EXPECT_EQ(measureCodec(c).value().path, host::simdTarget());
}

// Both paths see the same data and give the same bits, so they are equally accurate.
TEST(Measure, PathsAreEquallyAccurate) {
  for (CodecOp op : {CodecOp::kQuantize, CodecOp::kReduce}) {
    CodecCase c = quick(ElementFormat::kE4M3, ScaleFormat::kFp32, op);
    c.snr_elements = 1;
    const double simd = measureCodec(c).value().snr_db;
    c.path = CodecPath::kScalar;
    EXPECT_EQ(measureCodec(c).value().snr_db, simd);
  }
}

TEST(Measure, WorkingSets) {
  CodecCase c = quick(ElementFormat::kE4M3, ScaleFormat::kFp32);
  c.elements = codecElementsFor(c, 64 << 20);
  EXPECT_LE(codecWorkingSet(c), uint64_t{64} << 20);
  EXPECT_GT(codecWorkingSet(c), (uint64_t{64} << 20) - 1000);
  c.op = CodecOp::kReduce;
  c.packets = 8;
  c.elements = codecElementsFor(c, 64 << 20);
  EXPECT_LE(codecWorkingSet(c), uint64_t{64} << 20);
  EXPECT_GT(codecWorkingSet(c), (uint64_t{64} << 20) - 2000);
  EXPECT_EQ(codecElementsFor(c, 100), 0u);
}

TEST(Measure, RefusesWhatItCannotMeasure) {
  CodecCase c = quick(ElementFormat::kE4M3, ScaleFormat::kFp32, CodecOp::kReduce);
  c.elements = 0;
  EXPECT_EQ(measureCodec(c).status().code(), StatusCode::kInvalidArgument);
  c.elements = UINT64_MAX;
  EXPECT_EQ(measureCodec(c).status().code(), StatusCode::kInvalidArgument);
  c.elements = 128;
  c.packets = 0;
  EXPECT_EQ(measureCodec(c).status().code(), StatusCode::kInvalidArgument);
  c.packets = 4096;
  c.elements = uint64_t{1} << 36;
  EXPECT_EQ(measureCodec(c).status().code(), StatusCode::kOutOfMemory);
}

}  // namespace
}  // namespace halfwire
