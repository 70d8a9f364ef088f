// The header-only recorder: what it writes, what it refuses, and what a killed process leaves.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "halfwire/parity.h"
#include "zoo.h"

namespace halfwire::parity {
namespace {

using nlohmann::json;

class RecorderTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "recorder-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string in(const std::string& name) const { return (folder_ / name).string(); }

  static std::string text(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // Every line as JSON; the last one has to be whole as well.
  static std::vector<json> lines(const std::string& path) {
    const std::string all = text(path);
    EXPECT_TRUE(!all.empty() && all.back() == '\n') << path;
    std::vector<json> result;
    for (size_t at = 0; at < all.size();) {
      const size_t end = all.find('\n', at);
      result.push_back(json::parse(all.substr(at, end - at), nullptr, false));
      EXPECT_FALSE(result.back().is_discarded()) << all.substr(at, end - at);
      at = end + 1;
    }
    return result;
  }

  std::filesystem::path folder_;
};

// Holds a field against docs/parity-record.md.
void expectFields(const json& object, const std::map<std::string, std::string>& types) {
  static const std::regex kHash("[0-9a-f]{16}");
  for (const auto& [name, value] : object.items()) {
    ASSERT_TRUE(types.contains(name)) << name;
    const std::string& type = types.at(name);
    if (type == "integer") {
      EXPECT_TRUE(value.is_number_integer()) << name;
    } else if (type == "number") {
      EXPECT_TRUE(value.is_number() || value == "nan" || value == "inf" || value == "-inf")
          << name << ' ' << value;
    } else if (type == "boolean") {
      EXPECT_TRUE(value.is_boolean()) << name;
    } else if (type == "string") {
      EXPECT_TRUE(value.is_string()) << name;
    } else if (type == "hash") {
      EXPECT_TRUE(value.is_string() && std::regex_match(value.get<std::string>(), kHash))
          << name << ' ' << value;
    } else if (type == "object") {
      EXPECT_TRUE(value.is_object()) << name;
    } else {
      EXPECT_TRUE(value.is_array()) << name;
    }
  }
}

void expectRecord(const std::vector<json>& record) {
  for (const json& line : record) {
    if (line.contains("halfwire_parity")) {
      expectFields(line, {{"halfwire_parity", "integer"},
                          {"rank", "integer"},
                          {"world_size", "integer"},
                          {"seed", "integer"},
                          {"program", "string"},
                          {"versions", "object"},
                          {"precision", "string"},
                          {"halfwire", "object"},
                          {"accumulation", "integer"},
                          {"sharded", "boolean"},
                          {"reduced", "boolean"},
                          {"elements", "integer"},
                          {"sampled_elements", "integer"},
                          {"dropout", "number"},
                          {"tied", "integer"},
                          {"tied_expected", "boolean"},
                          {"resumed_from", "integer"},
                          {"warmup", "integer"}});
      EXPECT_EQ(line["halfwire_parity"], 1);
      continue;
    }
    expectFields(line, {{"step", "integer"},
                        {"samples", "integer"},
                        {"loss", "number"},
                        {"loss_scale", "number"},
                        {"skipped", "boolean"},
                        {"batch_hash", "hash"},
                        {"rng_hash", "hash"},
                        {"tied_apart", "integer"},
                        {"groups", "array"}});
    for (const json& group : line["groups"]) {
      expectFields(group, {{"lr", "number"},
                           {"grad_norm", "number"},
                           {"grad_norm_clipped", "number"},
                           {"grad_hash", "hash"},
                           {"update_norm", "number"},
                           {"unchanged", "number"},
                           {"param_norm", "number"},
                           {"param_sum", "number"},
                           {"param_hash", "hash"},
                           {"nonfinite", "integer"},
                           {"state_dtype", "string"}});
    }
  }
}

TEST_F(RecorderTest, NumbersAreThoseOfAPlainComputation) {
  std::vector<float> a = {3, -4, 0, 1}, ga = {1, 2, 2, 0}, b = {10, 0}, gb = {0, -6};
  Header h;
  h.program = "quote \" backslash \\ newline \n byte \xff";
  h.versions["halfwire"] = "0.1.0";
  std::string error;
  auto r = Recorder::open(in("run"), h,
                          {{"a", a.data(), 4, Type::kFp32, ga.data()},
                           {"b", b.data(), 2, Type::kFp32, gb.data(), Type::kFp32, 1}},
                          &error);
  ASSERT_NE(r, nullptr) << error;
  const int tokens[] = {1, 2, 3};
  r->batch(tokens, sizeof tokens, 6);
  r->loss(2);
  r->loss(4);
  r->gradients();
  for (float& g : ga) g /= 2;
  r->beforeUpdate({0.5, 0.25});
  a = {3, -2, 0, 2};
  b = {10, 4};
  ASSERT_TRUE(r->afterUpdate("bfloat16"));
  const auto record = lines(in("run/rank0.jsonl"));
  expectRecord(record);
  ASSERT_EQ(record.size(), 2u);
  EXPECT_EQ(record[0]["elements"], 6);
  EXPECT_EQ(record[0]["sampled_elements"], 6);
  EXPECT_EQ(record[0]["precision"], "fp32");
  const json& step = record[1];
  EXPECT_EQ(step["step"], 0);
  EXPECT_EQ(step["samples"], 6);
  EXPECT_EQ(step["loss"], 3);
  EXPECT_FALSE(step.contains("loss_scale"));
  EXPECT_FALSE(step.contains("rng_hash"));
  const json& g0 = step["groups"][0];
  EXPECT_EQ(g0["lr"], 0.5);
  EXPECT_EQ(g0["grad_norm"], 3);
  EXPECT_EQ(g0["grad_norm_clipped"], 1.5);
  EXPECT_DOUBLE_EQ(g0["update_norm"], std::sqrt(5.0));
  EXPECT_EQ(g0["unchanged"], 0.5) << "3 and 0 are as they were though their gradients are not zero";
  EXPECT_DOUBLE_EQ(g0["param_norm"], std::sqrt(17.0));
  EXPECT_EQ(g0["param_sum"], 3);
  EXPECT_EQ(g0["state_dtype"], "bfloat16");
  const json& g1 = step["groups"][1];
  EXPECT_EQ(g1["grad_norm"], 6);
  EXPECT_EQ(g1["update_norm"], 4);
  EXPECT_EQ(g1["unchanged"], 0);
}

TEST_F(RecorderTest, SixteenBitTypesAndNumbersThatAreNotFinite) {
  const std::vector<uint16_t> bf16 = {0x3F80, 0xC000, 0x7F80}, half = {0x3C00, 0xC000, 0x7C01, 0x0001};
  std::vector<uint16_t> p = bf16, q = half, gp = {0x7F80, 0, 0}, gq = {0, 0x3C00, 0, 0};
  std::string error;
  auto r = Recorder::open(in("run"), {},
                          {{"p", p.data(), 2, Type::kBf16, gp.data(), Type::kBf16},
                           {"q", q.data(), 2, Type::kFp16, gq.data(), Type::kFp16, 1}},
                          &error);
  ASSERT_NE(r, nullptr) << error;
  r->loss(std::nan(""));
  r->beforeUpdate({1, 1});
  ASSERT_TRUE(r->afterUpdate());
  const auto record = lines(in("run/rank0.jsonl"));
  expectRecord(record);
  EXPECT_EQ(record[0]["precision"], "mixed");
  EXPECT_EQ(record[1]["loss"], "nan");
  const json& a = record[1]["groups"][0];
  EXPECT_EQ(a["grad_norm"], "inf");
  EXPECT_EQ(a["nonfinite"], 1);
  EXPECT_EQ(a["param_sum"], -1);
  EXPECT_EQ(a["unchanged"], 0.5);
  const json& b = record[1]["groups"][1];
  EXPECT_EQ(b["param_sum"], -1);
  EXPECT_EQ(b["grad_norm"], 1);
  EXPECT_EQ(b["nonfinite"], 0);
}

TEST_F(RecorderTest, EqualBitsHaveEqualHashesAndOthersOthers) {
  std::set<uint64_t> seen;
  std::vector<unsigned char> bytes(100);
  for (size_t n = 0; n <= bytes.size(); ++n) seen.insert(Recorder::hash(bytes.data(), n, 0));
  EXPECT_EQ(seen.size(), bytes.size() + 1) << "zeros of different lengths";
  const uint64_t zeros = Recorder::hash(bytes.data(), bytes.size(), 0);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= 1u << bit % 8;
    seen.insert(Recorder::hash(bytes.data(), bytes.size(), 0));
    bytes[bit / 8] ^= 1u << bit % 8;
  }
  EXPECT_EQ(seen.size(), bytes.size() + 1 + 8 * bytes.size()) << "every bit counts, and its place";
  EXPECT_EQ(Recorder::hash(bytes.data(), bytes.size(), 0), zeros);
}

TEST_F(RecorderTest, TheSampleIsOfWholeTensorsAndTheSameInEveryOrder) {
  std::vector<float> memory(1 << 20);
  const auto sampled = [&](std::vector<Tensor> tensors, const std::string& name) {
    std::string error;
    auto r = Recorder::open(in(name), {}, std::move(tensors), &error, 1000 * sizeof(float));
    EXPECT_NE(r, nullptr) << error;
    r->beforeUpdate({1});
    r->afterUpdate();
    const auto record = lines(in(name + "/rank0.jsonl"));
    return std::pair(record[0]["sampled_elements"].get<int>(),
                     record[1]["groups"][0]["param_hash"].get<std::string>());
  };
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < 20; ++i)
    tensors.push_back({"layer." + std::to_string(i), memory.data() + 300 * i, 300});
  const auto some = sampled(tensors, "a");
  EXPECT_EQ(some.first, 900);
  std::reverse(tensors.begin(), tensors.end());
  EXPECT_EQ(sampled(tensors, "b"), some);
  // A first tensor beyond the limit: its beginning.
  EXPECT_EQ(sampled({{"large", memory.data(), memory.size()}}, "c").first, 1000);
}

TEST_F(RecorderTest, RefusesWhatItCannotRecord) {
  float x = 1;
  std::string error;
  const std::vector<Tensor> one = {{"x", &x, 1}};
  EXPECT_EQ(Recorder::open(in("a"), {}, {}, &error), nullptr);
  EXPECT_NE(error.find("no parameters"), std::string::npos);
  EXPECT_EQ(Recorder::open(in("a"), {}, {{"x", nullptr, 1}}, &error), nullptr);
  EXPECT_NE(error.find("no memory"), std::string::npos);
  Header far;
  far.rank = 3;
  EXPECT_EQ(Recorder::open(in("a"), far, one, &error), nullptr);
  EXPECT_NE(error.find("not one of"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(in("a"))) << "nothing is made before all is checked";

  std::ofstream(in("plain")) << "text";
  EXPECT_EQ(Recorder::open(in("plain"), {}, one, &error), nullptr);
  EXPECT_EQ(Recorder::open(in("plain/below"), {}, one, &error), nullptr);
  EXPECT_EQ(Recorder::open("", {}, one, &error), nullptr);
  EXPECT_EQ(text(in("plain")), "text");
}

TEST_F(RecorderTest, NeverWritesOverOrThroughWhatIsThere) {
  float x = 1;
  std::string error;
  const std::vector<Tensor> one = {{"x", &x, 1}};
  Header resumed;
  resumed.resumed_from = 5;
  std::ofstream(in("precious")) << "precious";
  for (const std::string name : {"link", "fifo", "folder", "record"})
    std::filesystem::create_directory(in(name));
  std::filesystem::create_symlink(in("precious"), in("link/rank0.jsonl"));
  ASSERT_EQ(mkfifo(in("fifo/rank0.jsonl").c_str(), 0600), 0);
  std::filesystem::create_directory(in("folder/rank0.jsonl"));
  std::ofstream(in("record/rank0.jsonl")) << "{}\n";
  for (const std::string name : {"link", "fifo", "folder"}) {
    EXPECT_EQ(Recorder::open(in(name), {}, one, &error), nullptr) << name;
    EXPECT_EQ(Recorder::open(in(name), resumed, one, &error), nullptr) << name;
    EXPECT_FALSE(error.empty());
  }
  EXPECT_EQ(Recorder::open(in("record"), {}, one, &error), nullptr);
  EXPECT_NE(error.find("exists"), std::string::npos);
  EXPECT_EQ(text(in("precious")), "precious");
  EXPECT_EQ(text(in("record/rank0.jsonl")), "{}\n");
}

TEST_F(RecorderTest, AResumedRunGoesOnAfterTheLastWholeLine) {
  float x = 1, g = 1;
  const std::vector<Tensor> one = {{"x", &x, 1, Type::kFp32, &g}};
  std::string error;
  {
    auto r = Recorder::open(in("run"), {}, one, &error);
    ASSERT_NE(r, nullptr) << error;
    for (int i = 0; i < 3; ++i) {
      r->beforeUpdate({1});
      r->afterUpdate();
    }
  }
  std::ofstream(in("run/rank0.jsonl"), std::ios::app) << "{\"step\":3,\"gro";
  Header resumed;
  resumed.resumed_from = 2;
  auto r = Recorder::open(in("run"), resumed, one, &error);
  ASSERT_NE(r, nullptr) << error;
  r->beforeUpdate({1});
  ASSERT_TRUE(r->afterUpdate());
  const auto record = lines(in("run/rank0.jsonl"));
  ASSERT_EQ(record.size(), 6u);
  EXPECT_EQ(record[3]["step"], 2);
  EXPECT_EQ(record[4]["resumed_from"], 2);
  EXPECT_EQ(record[5]["step"], 2);
  EXPECT_FALSE(record[5].contains("samples")) << "how many came before is not known";
}

TEST_F(RecorderTest, AKilledProcessLeavesWholeLines) {
  for (int attempt = 0; attempt < 5; ++attempt) {
    const std::string name = "run" + std::to_string(attempt);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::vector<float> p(1000, 1.0f), g(1000, 1.0f);
      std::string error;
      auto r = Recorder::open(in(name), {}, {{"p", p.data(), p.size(), Type::kFp32, g.data()}}, &error);
      if (r == nullptr) _exit(1);
      for (int i = 0; i < 10'000'000; ++i) {
        r->loss(i);
        r->beforeUpdate({1});
        r->afterUpdate("float32");
      }
      _exit(0);
    }
    const std::string path = in(name + "/rank0.jsonl");
    for (int wait = 0; wait < 2000; ++wait) {
      std::error_code code;
      if (std::filesystem::file_size(path, code) > 20000u * (attempt + 1) && !code) break;
      usleep(1000);
    }
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status));
    const auto record = lines(path);
    ASSERT_GT(record.size(), 20u);
    expectRecord(record);
    for (size_t i = 1; i < record.size(); ++i) ASSERT_EQ(record[i]["step"], i - 1);
  }
}

TEST_F(RecorderTest, AFullDiskEndsTheRecordingWithAWholeLine) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {2000, 2000};
    setrlimit(RLIMIT_FSIZE, &limit);
    float p = 1, g = 1;
    std::string error;
    auto r = Recorder::open(in("run"), {}, {{"p", &p, 1, Type::kFp32, &g}}, &error);
    bool ended = false;
    for (int i = 0; i < 50 && r != nullptr; ++i) {
      r->beforeUpdate({1});
      ended = !r->afterUpdate();
    }
    _exit(ended && !r->error().empty() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the training went on and error() says why nothing is recorded";
  const auto record = lines(in("run/rank0.jsonl"));
  EXPECT_GT(record.size(), 2u);
  EXPECT_LT(record.size(), 20u);
}

// The parameters of a run are those of a run that nobody records: the trainer's last hash does not depend on
// what the recorder was asked to look at, and every rank's record holds to the format.
TEST_F(RecorderTest, RecordsOfTheZooHoldToTheFormat) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    zoo::Config c = zoo::faultFree(seed);
    c.steps = 60;
    if (c.resume_at > 0) c.resume_at = 30;
    const std::string name = "run" + std::to_string(seed);
    ASSERT_EQ(zoo::train(c, in(name)), "");
    std::vector<std::string> last;
    for (size_t rank = 0; rank < zoo::kWorld; ++rank) {
      const auto record = lines(in(name + "/rank" + std::to_string(rank) + ".jsonl"));
      expectRecord(record);
      ASSERT_EQ(record.size(), 61u + (c.resume_at > 0 ? 1 : 0));
      EXPECT_EQ(record.back()["samples"].is_number(), c.resume_at == 0);
      last.push_back(record.back()["groups"][0].value("param_hash", "none"));
    }
    EXPECT_EQ(std::set(last.begin(), last.end()).size(), 1u) << "replicas end with the same bits";
  }
}

}  // namespace
}  // namespace halfwire::parity

namespace halfwire::zoo {
namespace {

TEST(UpperLimit, IsClopperPearsons) {
  EXPECT_NEAR(upperLimit(0, 200), 1 - std::pow(0.05, 1.0 / 200), 1e-9);
  EXPECT_NEAR(upperLimit(0, 200), 0.0148669, 1e-6);
  EXPECT_NEAR(upperLimit(3, 400), 0.0192770, 2e-5);
  EXPECT_NEAR(upperLimit(1, 20), 0.2161, 1e-4);
  EXPECT_EQ(upperLimit(5, 5), 1);
  EXPECT_LE(upperLimit(3, 400), 0.02);
  EXPECT_GT(upperLimit(4, 400), 0.02);
}

}  // namespace
}  // namespace halfwire::zoo
