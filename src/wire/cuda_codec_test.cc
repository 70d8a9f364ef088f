// Names and geometry of launches: every element of a job is in exactly one tile of one launch.
#include "wire/cuda_codec.h"

#include <gtest/gtest.h>

#include <set>

#include "wire/cuda_tuning.h"

namespace halfwire {
namespace {

TEST(CudaCodecTest, NamesAreDistinctAndSayWhetherTheyNeedHardware) {
  std::set<std::string> names;
  uint32_t hardware = 0;
  for (uint32_t i = 0; i < kCudaKernels; ++i) {
    EXPECT_TRUE(names.insert(cudaKernelName(i)).second) << cudaKernelName(i);
    const bool needs_hardware = cudaKernelPath(i) == CodecPath::kHardware;
    EXPECT_EQ(needs_hardware, cudaKernelName(i).find("_hardware") != std::string::npos);
    hardware += needs_hardware ? 1 : 0;
    EXPECT_EQ(cudaEmptyLaunch(i).kernel, i);
  }
  EXPECT_EQ(hardware, 7u + 7u + 3u + 3u + 2u);
  EXPECT_TRUE(names.contains("halfwire_quantize_e4m3_fp32_software_4"));
  EXPECT_TRUE(names.contains("halfwire_dequantize_e5m2_bf16_any"));
  EXPECT_TRUE(names.contains("halfwire_reduce_e5m2_packet_hardware"));
}

std::string quantizeKernel(ElementFormat element, uint16_t block, DataType type, CodecPath path) {
  QuantizeJob job;
  job.format = {element, ScaleFormat::kFp32, block};
  job.type = type;
  job.in_total = job.segment_elements = 10;
  CudaLaunch launch;
  EXPECT_TRUE(cudaLaunch(job, path, 0, &launch));
  return cudaKernelName(launch.kernel);
}

TEST(CudaCodecTest, QuantizeKernelFollowsFormatTypeBlockAndPath) {
  using enum CodecPath;
  EXPECT_EQ(quantizeKernel(ElementFormat::kE4M3, 128, DataType::kBf16, kHardware),
            "halfwire_quantize_e4m3_bf16_hardware_1");
  EXPECT_EQ(quantizeKernel(ElementFormat::kE4M3, 256, DataType::kFp32, kHardware),
            "halfwire_quantize_e4m3_fp32_hardware_1");
  EXPECT_EQ(quantizeKernel(ElementFormat::kE5M2, 64, DataType::kFp32, kSoftware),
            "halfwire_quantize_e5m2_fp32_software_2");
  EXPECT_EQ(quantizeKernel(ElementFormat::kE5M2, 32, DataType::kFp32, kSoftware),
            "halfwire_quantize_e5m2_fp32_software_4");
  EXPECT_EQ(quantizeKernel(ElementFormat::kInt8, 32, DataType::kFp16, kHardware),
            "halfwire_quantize_int8_fp16_any_2");
  EXPECT_EQ(quantizeKernel(ElementFormat::kE3M4, 128, DataType::kFp32, kHardware),
            "halfwire_quantize_e3m4_fp32_any_1");
}

TEST(CudaCodecTest, ManySegmentsAreSeveralLaunches) {
  QuantizeJob job;
  job.segments = 150000;
  job.in_pitch = job.segment_elements = 5000;
  job.in_total = uint64_t{150000} * 5000;
  uint64_t covered = 0;
  uint32_t part = 0;
  for (CudaLaunch launch; cudaLaunch(job, CodecPath::kSoftware, part, &launch); ++part) {
    const auto& p = std::get<QuantizeParams>(launch.params);
    EXPECT_EQ(p.first_segment, covered);
    EXPECT_LE(launch.grid_y, 65535u);
    EXPECT_GE(uint64_t{launch.grid_x} * launch.threads * kThreadElements * cuda::quantizeRepeat(job.type, 1),
              5000u);
    covered += launch.grid_y;
  }
  EXPECT_EQ(part, 3u);
  EXPECT_EQ(covered, 150000u);
}

TEST(CudaCodecTest, LargeJobsFitTheGrid) {
  ReduceJob job;
  job.elements = uint64_t{1} << 40;
  job.packets = 2;
  CudaLaunch launch;
  ASSERT_TRUE(cudaLaunch(job, CodecPath::kSoftware, 0, &launch));
  EXPECT_EQ(uint64_t{launch.grid_x} * launch.threads * kThreadElements, job.elements);
  EXPECT_FALSE(cudaLaunch(job, CodecPath::kSoftware, 1, &launch));
}

TEST(CudaCodecTest, EmptyJobsAreNoLaunch) {
  CudaLaunch launch;
  EXPECT_FALSE(cudaLaunch(QuantizeJob{}, CodecPath::kSoftware, 0, &launch));
  EXPECT_FALSE(cudaLaunch(DequantizeJob{}, CodecPath::kSoftware, 0, &launch));
  EXPECT_FALSE(cudaLaunch(ReduceJob{}, CodecPath::kSoftware, 0, &launch));
}

TEST(CudaCodecTest, ReduceBoundIsRoundedOnce) {
  ReduceJob job;
  job.type = DataType::kFp16;
  job.elements = 1;
  job.average = 1.0f / 3.0f;
  CudaLaunch launch;
  ASSERT_TRUE(cudaLaunch(job, CodecPath::kSoftware, 0, &launch));
  EXPECT_EQ(std::get<ReduceParams>(launch.params).bound, 65504.0f * (1.0f / 3.0f));
}

}  // namespace
}  // namespace halfwire
