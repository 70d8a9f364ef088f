// Readers: what they take from good files, and one sentence for bad ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "parity/load.h"
#include "parity/other_readers.h"
#include "parity/record_reader.h"

namespace halfwire::parity {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Recorded = ::halfwire::parity::Run;

const char* const kHeader =
    R"({"halfwire_parity":1,"rank":0,"world_size":1,"seed":7,"precision":"fp32","sharded":null,"program":null,"warmup":null,"halfwire":{"mode":"on","x":[1,{"y":2}]},"unknown":{"a":[1,2]}})"
    "\n";

Result<RankRecord> parse(const std::string& text, const RecordLimits& limits = {}) {
  auto source = trace::memorySource(text);
  return readRankRecord(source.get(), "file", {}, limits);
}
std::string problem(const std::string& text, const RecordLimits& limits = {}) {
  const auto r = parse(text, limits);
  return r.ok() ? "" : r.status().message();
}

TEST(RecordReader, TakesEveryField) {
  const auto r = parse(
      std::string(kHeader) +
      R"({"groups":[{"lr":0.001,"grad_norm":1.5,"grad_norm_clipped":1,"grad_hash":"00000000000000ff","update_norm":0.06,"unchanged":0.25,"param_norm":12,"param_sum":-3.25,"param_hash":"60303ae22b998861","nonfinite":3,"state_dtype":"bfloat16","more":null},{}],"step":5,"samples":64,"loss":"nan","loss_scale":65536,"skipped":true,"batch_hash":"9f86d081884c7d65","rng_hash":"0000000000000000","tied_apart":2,"later":{"x":1}})"
      "\r\n"
      R"({"step":6,"loss":-1.5e-3})");
  ASSERT_TRUE(r.ok()) << r.status().message();
  const RankRecord& k = r.value();
  EXPECT_EQ(k.header.seed, 7);
  EXPECT_EQ(k.header.halfwire, "on");
  EXPECT_FALSE(k.header.warmup.has_value());
  EXPECT_FALSE(k.header.dropout.has_value());
  ASSERT_EQ(k.rows(), 2U);
  EXPECT_EQ(k.step[0], 5U);
  EXPECT_TRUE(std::isinf(k.loss[0]));  // not finite
  EXPECT_EQ(k.loss[1], -1.5e-3);
  EXPECT_EQ(k.loss_scale[0], 65536);
  EXPECT_EQ(k.skipped[0], 1);
  EXPECT_EQ(k.skipped[1], kUnknown);
  EXPECT_EQ(k.batch_hash[0], 0x9f86d081884c7d65U);
  EXPECT_NE(k.rng_hash[0], kNoHash);
  EXPECT_EQ(k.rng_hash[1], kNoHash);
  EXPECT_EQ(k.tied_apart[0], 2U);
  EXPECT_EQ(k.samples[0], 64);
  ASSERT_EQ(k.groups.size(), 2U);
  const Group& g = k.groups[0];
  EXPECT_EQ(g.lr[0], 0.001);
  EXPECT_TRUE(std::isnan(g.lr[1]));
  EXPECT_EQ(g.grad_norm[0], 1.5F);
  EXPECT_EQ(g.unchanged[0], 0.25F);
  EXPECT_EQ(g.param_sum[0], -3.25);
  EXPECT_EQ(g.nonfinite[0], 3U);
  EXPECT_EQ(g.state_dtype[0], static_cast<uint8_t>(StateType::kBfloat16));
  EXPECT_FALSE(k.cut_short);
  EXPECT_EQ(k.row(6), 1U);
  EXPECT_FALSE(k.row(7).has_value());
}

TEST(RecordReader, SmallAndLargeNormsStayWhatTheyAre) {
  const auto r =
      parse(std::string(kHeader) + R"({"step":0,"groups":[{"update_norm":1e-60,"grad_norm":1e60}]})"
                                   "\n");
  ASSERT_TRUE(r.ok());
  EXPECT_GT(r.value().groups[0].update_norm[0], 0);
  EXPECT_TRUE(std::isfinite(r.value().groups[0].grad_norm[0]));
}

TEST(RecordReader, ACutLineAtTheEndIsLeftOut) {
  const std::string whole = std::string(kHeader) + "{\"step\":0,\"loss\":1}\n{\"step\":1,\"loss\":2}\n";
  for (size_t cut = std::string(kHeader).size() + 21; cut < whole.size() - 2; ++cut) {
    const auto r = parse(whole.substr(0, cut));
    ASSERT_TRUE(r.ok()) << cut << r.status().message();
    EXPECT_EQ(r.value().rows(), 1U);
    EXPECT_EQ(r.value().cut_short, cut > std::string(kHeader).size() + 21 - 1 && whole[cut - 1] != '\n')
        << cut;
  }
}

TEST(RecordReader, SaysWhatIsWrongAndWhere) {
  const std::string h = kHeader, ok = "{\"step\":0}\n";
  EXPECT_THAT(problem(""), HasSubstr("has no header"));
  EXPECT_THAT(problem(h), HasSubstr("no steps"));
  EXPECT_THAT(problem(ok), HasSubstr("halfwire_parity"));
  EXPECT_THAT(problem("{\"halfwire_parity\":2}\n"), HasSubstr("version 2"));
  EXPECT_THAT(problem("{\"halfwire_parity\":1,\"rank\":3,\"world_size\":2}\n" + ok), HasSubstr("`rank`"));
  EXPECT_THAT(problem("{\"halfwire_parity\":1,\"world_size\":99999999999}\n" + ok),
              HasSubstr("`world_size` is out of range"));
  const auto bad = [&](const std::string& line) { return problem(h + ok + line + "\n" + "{\"step\":9}\n"); };
  EXPECT_THAT(bad("{\"step\":1,\"loss\":true}"), HasSubstr("line 3: `loss` is not a number"));
  EXPECT_THAT(bad("{\"step\":1,\"loss\":1e999}"), HasSubstr("`loss`"));
  EXPECT_THAT(bad("{\"step\":1,\"loss\":\"NaN\"}"), HasSubstr("neither a number nor nan"));
  EXPECT_THAT(bad("{\"step\":1.5}"), HasSubstr("`step` is not a whole number"));
  EXPECT_THAT(bad("{\"step\":-1}"), HasSubstr("`step` is out of range"));
  EXPECT_THAT(bad("{\"step\":99999999999999999999}"), HasSubstr("`step`"));
  EXPECT_THAT(bad("{\"loss\":1}"), HasSubstr("`step` is missing"));
  EXPECT_THAT(bad("{\"step\":0}"), HasSubstr("no header says that the run was resumed"));
  EXPECT_THAT(bad("{\"step\":1,\"batch_hash\":\"xyz\"}"), HasSubstr("`batch_hash`"));
  EXPECT_THAT(bad("{\"step\":1,\"batch_hash\":\"12345678901234567\"}"), HasSubstr("`batch_hash`"));
  EXPECT_THAT(bad("{\"step\":1,\"groups\":3}"), HasSubstr("`groups` is not an array"));
  EXPECT_THAT(bad("{\"step\":1,\"groups\":[3]}"), HasSubstr("`groups` holds no objects"));
  EXPECT_THAT(bad("{\"step\":1,\"groups\":[{\"lr\":[]}]}"), HasSubstr("`lr`"));
  EXPECT_THAT(bad("{\"step\":1} {\"step\":2}"), HasSubstr("more than one"));
  EXPECT_THAT(bad("[1]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(bad("garbage"), HasSubstr("line 3"));
  EXPECT_THAT(bad(std::string("{\"step\":1,\"x\":\"\xff\xfe\"}")), HasSubstr("line 3"));
  RecordLimits tight;
  tight.line_bytes = 300;
  EXPECT_THAT(problem(h + "{\"step\":1,\"x\":\"" + std::string(400, 'a') + "\"}\n", tight),
              HasSubstr("longer than 300"));
  EXPECT_THAT(problem(h + std::string(3 << 20, 'a')), HasSubstr("longer than"));
  tight.groups = 2;
  EXPECT_THAT(problem(h + "{\"step\":1,\"groups\":[{},{},{}]}\n", tight), HasSubstr("more parameter groups"));
  tight.stored_bytes = 500;
  EXPECT_THAT(
      problem(h + "{\"step\":1,\"groups\":[{},{}]}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4}\n", tight),
      HasSubstr("too large"));
}

TEST(RecordReader, AResumeInTheSameFileReplacesItsSteps) {
  const auto r = parse(std::string(kHeader) +
                       "{\"step\":0,\"loss\":1}\n{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":3}\n" +
                       R"({"halfwire_parity":1,"rank":0,"world_size":1,"resumed_from":1,"tied":0})"
                       "\n{\"step\":1,\"loss\":9}\n");
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(r.value().rows(), 2U);
  EXPECT_EQ(r.value().loss[1], 9);
  EXPECT_EQ(r.value().replaced_rows, 2U);
  ASSERT_EQ(r.value().resumes.size(), 1U);
  EXPECT_EQ(r.value().resumes[0].row, 1U);
  EXPECT_EQ(r.value().resumes[0].tied, 0);
}

// Any change of any byte is either read or refused: no crash, no endless loop.
TEST(RecordReader, DamagedBytes) {
  std::string good = kHeader;
  for (int t = 0; t < 5; ++t) {
    good += "{\"step\":" + std::to_string(t) +
            ",\"loss\":1.5,\"batch_hash\":\"9f86d081884c7d65\",\"groups\":[{\"lr\":0.1,\"unchanged\":0}]}\n";
  }
  std::mt19937 random(3);
  for (int i = 0; i < 20'000; ++i) {
    std::string text = good;
    for (int k = 0; k < 1 + i % 3; ++k) text[random() % text.size()] = static_cast<char>(random());
    if (i % 5 == 0) text.resize(random() % text.size());
    (void)parse(text);
  }
}

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("halfwire-parity-" + std::to_string(::getpid()));
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string write(const std::string& name, const std::string& text) {
    const fs::path path = root_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  Recorded one(const std::string& path) {
    auto r = loadRuns(path);
    EXPECT_TRUE(r.ok()) << r.status().message();
    return r.ok() ? r.value().front() : Recorded();
  }
  std::string fault(const std::string& path) {
    const auto r = loadRuns(path);
    return r.ok() ? "" : r.status().message();
  }
  fs::path root_;
};

std::string header(int rank, int world, const std::string& more = "") {
  return "{\"halfwire_parity\":1,\"rank\":" + std::to_string(rank) +
         ",\"world_size\":" + std::to_string(world) + more + "}\n";
}

TEST_F(Files, FoldersOfRanksAndOfRuns) {
  write("a/rank0.jsonl", header(0, 2) + "{\"step\":0,\"loss\":1}\n");
  write("a/rank1.jsonl", header(1, 2) + "{\"step\":0,\"loss\":2}\n");
  write("a/notes.txt", "x");
  EXPECT_EQ(one(root_ / "a").ranks.size(), 2U);
  EXPECT_EQ(one(root_ / "a/rank1.jsonl").ranks.size(), 1U);
  for (const char* name : {"runs/r10", "runs/r9", "runs/r1"})
    write(std::string(name) + "/rank0.jsonl", header(0, 1) + "{\"step\":0,\"loss\":1}\n");
  const auto runs = loadRuns(root_ / "runs");
  ASSERT_TRUE(runs.ok());
  ASSERT_EQ(runs.value().size(), 3U);
  EXPECT_THAT(runs.value()[1].path, HasSubstr("r9"));
  EXPECT_THAT(runs.value()[2].path, HasSubstr("r10"));
  write("b/rank0.jsonl", header(0, 2) + "{\"step\":0}\n");
  write("b/rank1.jsonl", header(0, 2) + "{\"step\":0}\n");
  EXPECT_THAT(fault(root_ / "b"), HasSubstr("rank 0 is there twice"));
  write("c/rank0.jsonl", header(0, 2) + "{\"step\":0}\n");
  write("c/rank1.jsonl", header(1, 4) + "{\"step\":0}\n");
  EXPECT_THAT(fault(root_ / "c"), HasSubstr("2 and 4 ranks"));
  EXPECT_THAT(fault(root_ / "none"), HasSubstr("does not exist"));
  fs::create_directories(root_ / "empty");
  EXPECT_THAT(fault(root_ / "empty"), HasSubstr("holds no run"));
}

TEST_F(Files, TwoPartsAreOneRun) {
  write("p1/rank0.jsonl",
        header(0, 1) + "{\"step\":0,\"loss\":1}\n{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":3}\n");
  write("p2/rank0.jsonl",
        header(0, 1, ",\"resumed_from\":2,\"tied\":1") +
            "{\"step\":2,\"loss\":9,\"batch_hash\":\"00000000000000aa\"}\n{\"step\":3,\"loss\":8}\n");
  const Recorded run = one((root_ / "p1").string() + "+" + (root_ / "p2").string());
  ASSERT_EQ(run.ranks.size(), 1U);
  const RankRecord& r = run.ranks[0];
  ASSERT_EQ(r.rows(), 4U);
  EXPECT_EQ(r.loss[2], 9);
  EXPECT_EQ(r.batch_hash[2], 0xaaU);
  EXPECT_EQ(r.batch_hash[0], kNoHash);
  ASSERT_EQ(r.resumes.size(), 1U);
  EXPECT_EQ(r.resumes[0].row, 2U);
  EXPECT_EQ(r.resumes[0].tied, 1);
  EXPECT_THAT(fault((root_ / "p2").string() + "+" + (root_ / "p1").string()), HasSubstr("does not go on"));
}

TEST_F(Files, Csv) {
  const Recorded run = one(write("a.csv",
                                 "\xef\xbb\xbfStep,train/loss,Loss__MIN,\"run, 1 - "
                                 "lr\",grad_norm\r\n10,2.5,1,1e-3,nan\r\n20,\"2.25\",1,,0.5\r\n\r\n"));
  ASSERT_EQ(run.source, Source::kCsv);
  const RankRecord& r = run.ranks.at(0);
  ASSERT_EQ(r.rows(), 2U);
  EXPECT_EQ(r.step[1], 20U);
  EXPECT_EQ(r.loss[1], 2.25);
  EXPECT_EQ(r.groups[0].lr[0], 1e-3);
  EXPECT_TRUE(std::isnan(r.groups[0].lr[1]));
  EXPECT_TRUE(std::isinf(r.groups[0].grad_norm[0]));
  EXPECT_EQ(one(write("b.csv", "loss;lr\n3;1\n2;1\n")).ranks[0].step[1], 1U);  // lines are steps
  EXPECT_THAT(fault(write("c.csv", "a,b\n1,2\n")), HasSubstr("no column is called loss"));
  EXPECT_THAT(fault(write("d.csv", "step,loss\n1,two\n")),
              HasSubstr("line 2: column `loss` is not a number"));
  EXPECT_THAT(fault(write("e.csv", "step,loss\n1e99,2\n")), HasSubstr("line 2: the step"));
  EXPECT_THAT(fault(write("f.csv", "step,loss\n")), HasSubstr("no loss"));
  EXPECT_THAT(fault(write("g.csv", "")), HasSubstr("is empty"));
  EXPECT_THAT(fault(write("h.bin", std::string("\x7f\x45\x4c\x46\x02\x01\x01\x00loss", 12))),
              HasSubstr("not text"));
  EXPECT_THAT(fault(write("i.csv", "step,loss\n1," + std::string(3 << 20, '1'))), HasSubstr("longer than"));
}

TEST_F(Files, TrainerState) {
  const Recorded run = one(write(
      "t/trainer_state.json",
      R"({"best_metric": null, "log_history": [{"epoch": 0.1, "grad_norm": 3.5, "learning_rate": 5e-05, "loss": 2.5, "step": 10},
 {"eval_loss": 9, "step": 10}, {"loss": NaN, "grad_norm": Infinity, "step": 20, "note": "NaN \" Infinity"}, {"train_loss": 1.0, "step": 20}], "max_steps": 20})"));
  const RankRecord& r = run.ranks.at(0);
  ASSERT_EQ(r.rows(), 2U);
  EXPECT_EQ(r.loss[0], 2.5);
  EXPECT_TRUE(std::isinf(r.loss[1]));
  EXPECT_EQ(r.groups[0].lr[0], 5e-5);
  EXPECT_EQ(one(root_ / "t").ranks[0].rows(), 2U);
  EXPECT_THAT(fault(write("a.json", "{\"x\": 1}")), HasSubstr("log_history"));
  EXPECT_THAT(fault(write("b.json", "{\"log_history\": 3}")), HasSubstr("not an array"));
  EXPECT_THAT(fault(write("c.json", "{\"log_history\": [{\"loss\": 2, \"step\": 1}, {\"lo")),
              HasSubstr("c.json"));
  EXPECT_THAT(fault(write("d.json", "{\"log_history\": [{\"loss\": [2], \"step\": 1}]}")),
              HasSubstr("`loss` is not a number"));
  EXPECT_THAT(fault(write("e.json", "{\"log_history\": []}")), HasSubstr("no loss"));
  EXPECT_THAT(fault(write("f.json", "{")), HasSubstr("f.json"));
}

TEST_F(Files, Megatron) {
  const Recorded run = one(write("log.txt",
                                 "using world size: 8\n[2024-05-01 10:00:00] iteration        1/     100 | "
                                 "consumed samples:          256 | elapsed time per iteration (ms): "
                                 "900.1 | learning rate: 1.500000E-05 | global batch size:   256 | lm loss: "
                                 "1.085E+01 | loss scale: 65536.0 | grad norm: 2.1 | number of "
                                 "skipped iterations:   0 | number of nan iterations:   0 |\n"
                                 "validation loss at iteration 1 | lm loss value: 9 | lm loss PPL: 1 |\n"
                                 " iteration        2/     100 | consumed samples:          512 | lm loss: "
                                 "1.0E+01 | loss scale: 1.0 | grad norm: nan | number of skipped "
                                 "iterations:   1 |\n iteration        3/     100 | lm lo"));
  ASSERT_EQ(run.source, Source::kMegatron);
  const RankRecord& r = run.ranks.at(0);
  ASSERT_EQ(r.rows(), 2U);
  EXPECT_EQ(r.loss[0], 10.85);
  EXPECT_EQ(r.samples[1], 512);
  EXPECT_EQ(r.skipped[1], 1);
  EXPECT_EQ(r.groups[0].lr[0], 1.5e-5);
  EXPECT_TRUE(std::isinf(r.groups[0].grad_norm[1]));
  EXPECT_THAT(fault(write("none.txt", " iteration 5/ 10 | grad norm: 1 |\n")), HasSubstr("lm loss"));
}

// An independent writer of event files.
uint32_t slowMasked(const std::string& bytes) {
  uint32_t c = ~0U;
  for (const char b : bytes) {
    c ^= static_cast<unsigned char>(b);
    for (int k = 0; k < 8; ++k) c = (c & 1) != 0 ? (c >> 1) ^ 0x82f63b78U : c >> 1;
  }
  c = ~c;
  return ((c >> 15) | (c << 17)) + 0xa282ead8U;
}
template <class T>
std::string raw(T v) {
  std::string s(sizeof v, '\0');
  std::memcpy(s.data(), &v, sizeof v);
  return s;
}
std::string varint(uint64_t v) {
  std::string s;
  for (; v >= 0x80; v >>= 7) s += static_cast<char>(v | 0x80);
  return s + static_cast<char>(v);
}
std::string field(int number, const std::string& bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + bytes;
}
std::string tfRecord(const std::string& data) {
  const std::string length = raw<uint64_t>(data.size());
  return length + raw(slowMasked(length)) + data + raw(slowMasked(data));
}
std::string event(uint64_t step, const std::string& tag, float v, bool tensor) {
  const std::string value =
      tensor ? field(8, varint(1 << 3) + varint(1) + field(4, raw(v))) : varint(2 << 3 | 5) + raw(v);
  return tfRecord(varint(1 << 3 | 1) + raw(1.0) + varint(2 << 3) + varint(step) +
                  field(5, field(1, field(1, tag) + value)));
}

TEST_F(Files, TensorBoard) {
  EXPECT_EQ(slowMasked("123456789"), ((0xe3069283U >> 15) | (0xe3069283U << 17)) + 0xa282ead8U);  // RFC 3720
  const std::string start = tfRecord(varint(1 << 3 | 1) + raw(1.0) + field(3, "brain.Event:2"));
  const std::string whole = start + event(0, "train/loss", 3.5F, false) +
                            event(0, "train/learning_rate", 0.5F, true) + event(1, "train/loss", 2.5F, true) +
                            event(1, "other", 7, false);
  const Recorded run = one(write("tb/events.out.tfevents.1.host", whole));
  ASSERT_EQ(run.source, Source::kTensorBoard);
  ASSERT_EQ(run.ranks.at(0).rows(), 2U);
  EXPECT_EQ(run.ranks[0].loss[0], 3.5);
  EXPECT_EQ(run.ranks[0].loss[1], 2.5);
  EXPECT_EQ(run.ranks[0].groups[0].lr[0], 0.5);
  EXPECT_EQ(one(root_ / "tb").ranks[0].rows(), 2U);
  const Recorded cut = one(write("cut", whole.substr(0, whole.size() - 5)));
  EXPECT_EQ(cut.notes.size(), 1U);
  std::string damaged = whole;
  damaged[start.size() + 30] ^= 1;
  EXPECT_THAT(fault(write("damaged", damaged)), HasSubstr("damaged"));
  EXPECT_THAT(fault(write("x.tfevents", "this is no event file at all")), HasSubstr("byte 0"));
  const std::string huge = raw<uint64_t>(uint64_t{1} << 60);
  EXPECT_THAT(fault(write("huge", huge + raw(slowMasked(huge)))), HasSubstr("64 MiB"));
  EXPECT_THAT(fault(write("noloss", start)), HasSubstr("no scalar called loss"));
  // Messages that lie about their lengths, with checksums that are right.
  std::mt19937 random(5);
  for (int i = 0; i < 300; ++i) {
    std::string body =
        varint(2 << 3) + varint(3) + field(5, field(1, field(1, "loss") + varint(2 << 3 | 5) + raw(1.0F)));
    body[random() % body.size()] = static_cast<char>(random());
    (void)loadRuns(write("lies", start + tfRecord(body)));
  }
}

TEST_F(Files, GzipIsRead) {
  const std::string path = root_ / "z/rank0.jsonl.gz";
  fs::create_directories(root_ / "z");
  gzFile file = gzopen(path.c_str(), "wb");
  const std::string text = header(0, 1) + "{\"step\":0,\"loss\":1}\n";
  gzwrite(file, text.data(), static_cast<unsigned>(text.size()));
  gzclose(file);
  EXPECT_EQ(one(root_ / "z").ranks[0].loss[0], 1);
}

}  // namespace
}  // namespace halfwire::parity
