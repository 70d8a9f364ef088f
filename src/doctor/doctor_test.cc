#include "doctor/doctor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "doctor/elf.h"

namespace halfwire {
namespace {

std::string readFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

std::string writeFile(const std::string& name, const std::string& bytes) {
  const std::string path = testing::TempDir() + name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST(Elf, ReadsWhatThisProgramNeeds) {
  const auto facts = readElf("/proc/self/exe");
  ASSERT_TRUE(facts.ok()) << facts.status().message();
  bool libc = false;
  for (const std::string& n : facts.value().needed) libc = libc || n == "libc.so.6";
  EXPECT_TRUE(libc);
  EXPECT_FALSE(facts.value().uses_nccl);
  EXPECT_FALSE(facts.value().defines_nccl);
}

TEST(Elf, FindsALibraryThatDefinesNccl) {
  const auto facts = readElf(HALFWIRE_HOSTCCL);
  ASSERT_TRUE(facts.ok()) << facts.status().message();
  EXPECT_TRUE(facts.value().defines_nccl);
}

TEST(Elf, HostileFilesAreRefusedOrHarmless) {
  EXPECT_FALSE(readElf("/nonexistent").ok());
  EXPECT_FALSE(readElf(writeFile("text", "#!/bin/sh\n")).ok());
  const std::string whole = readFile(HALFWIRE_HOSTCCL);
  for (const size_t length : {size_t{16}, size_t{64}, whole.size() / 2, whole.size() - 1}) {
    (void)readElf(writeFile("cut", whole.substr(0, length)));
  }
  // Offsets and counts of the header and of the section table at their largest.
  for (size_t at = 32; at < 64; ++at) {
    std::string changed = whole;
    std::memset(changed.data() + at, 0xff, 4);
    (void)readElf(writeFile("changed", changed));
  }
}

TEST(Doctor, NamesTheVariablesThatSwitchCompressionOff) {
  const auto findings = examineEnvironment([](const char* name) -> const char* {
    if (std::strcmp(name, "CUDA_DEVICE_MAX_CONNECTIONS") == 0) return "1";
    return std::strcmp(name, "NCCL_COMM_BLOCKING") == 0 ? "0" : nullptr;
  });
  ASSERT_EQ(findings.size(), 3u);
  EXPECT_EQ(findings[0].subject, "CUDA_DEVICE_MAX_CONNECTIONS");
  EXPECT_EQ(findings[0].health, Health::kProblem);
  EXPECT_EQ(findings[1].subject, "NCCL_COMM_BLOCKING");
  EXPECT_EQ(findings[2].subject, "WORLD_SIZE");
  EXPECT_TRUE(examineEnvironment([](const char* name) -> const char* {
                return std::strcmp(name, "WORLD_SIZE") == 0 ? "4" : nullptr;
              }).empty());
}

TEST(Doctor, ExplainsAProgram) {
  EXPECT_EQ(examineProgram({"/nonexistent/program"})[0].health, Health::kProblem);
  const auto shell = examineProgram({"/bin/sh", "-c", "true"});
  ASSERT_EQ(shell.size(), 1u);
  EXPECT_EQ(shell[0].health, Health::kNote);
  EXPECT_TRUE(examineProgram({}).empty());
}

TEST(Doctor, SaysSomethingAboutGpusEverywhere) { EXPECT_FALSE(examineGpus().empty()); }

}  // namespace
}  // namespace halfwire
