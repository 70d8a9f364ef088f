// Trains a byte-level transformer with data parallelism over NCCL's interface, on a machine without GPUs: the
// host engine moves bf16 gradients between the ranks. It knows nothing of Halfwire; `halfwire run -n 4 --
// train_lm` compresses them.
#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "abi/cuda_runtime.h"
#include "abi/host_engine.h"
#include "abi/nccl.h"
#include "base/units.h"
#include "bucket.h"
#include "corpus.h"
#include "launch/progress.h"
#include "launch/rendezvous.h"
#include "model.h"
#include "result.h"

namespace train_lm {
namespace {

struct Options {
  int64_t steps = 240;
  int64_t batch = 1;
  int64_t warm_up = 20;  // steps until the full learning rate
  int64_t seed = 1;
  std::string text;
  std::string out;
  std::string label = "training";
  ModelShape shape;
  AdamSettings adam;
};

constexpr const char* kUsage =
    "usage: train_lm [--steps N] [--batch N] [--context N] [--seed N] [--text FILE_OR_FOLDER] [--out FOLDER] "
    "[--label WORDS]\n"
    "Start it with `halfwire run -n 4 -- train_lm ...`; each rank writes FOLDER/rank<k>.json.\n";

[[noreturn]] void fail(const std::string& sentence) {
  fmt::print(stderr, "train_lm: {}\n", sentence);
  std::exit(2);
}

void check(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  throw std::runtime_error(
      fmt::format("{}: {} ({})", what, ncclGetErrorString(result), ncclGetLastError(nullptr)));
}
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help" || name == "-h") {
      fmt::print("{}", kUsage);
      std::exit(0);
    }
    if (i + 1 >= argc) fail(fmt::format("{} is not known or has no value: see train_lm --help", name));
    const std::string value = argv[++i];
    const auto number = [&](int64_t min, int64_t max) {
      const auto n = halfwire::parseInteger(value, min, max, name.substr(2));
      if (!n.ok()) fail(n.status().message());
      return n.value();
    };
    if (name == "--steps")
      o.steps = number(1, 1'000'000);
    else if (name == "--batch")
      o.batch = number(1, 1024);
    else if (name == "--context")
      o.shape.context = number(8, 4096);
    else if (name == "--seed")
      o.seed = number(0, INT32_MAX);
    else if (name == "--text")
      o.text = value;
    else if (name == "--out")
      o.out = value;
    else if (name == "--label")
      o.label = value;
    else
      fail(fmt::format("{} is not known: see train_lm --help", name));
  }
  return o;
}

// One line that is drawn over on a terminal; about ten lines otherwise.
void show(const Options& o, int64_t step, double loss, double ms) {
  const auto done = static_cast<uint64_t>(step), total = static_cast<uint64_t>(o.steps);
  const std::string words = fmt::format("{:<6} loss {:.3f}  {:.0f} ms a step", o.label, loss, ms);
  if (isatty(2)) {
    fmt::print(stderr, "\r\x1b[K{}{}", halfwire::progressBar(done, total, words), done == total ? "\n" : "");
  } else if (halfwire::progressLineDue(done, total)) {
    fmt::print(stderr, "{}/{}  {}\n", done, total, words);
  }
  std::fflush(stderr);
}

class Training {
 public:
  Training(const Options& options, const halfwire::RankInfo& info)
      : o_(options),
        info_(info),
        lower_(options.shape),
        upper_(options.shape),
        low_(lower_->parameters()),
        high_(upper_->parameters()),
        mask_(causalMask(options.shape.context)) {
    std::string error;
    const auto least = static_cast<uint64_t>(info.ranks) * static_cast<uint64_t>(o_.shape.context + 1) * 64;
    text_ = readCorpus(o_.text, least, 16u << 20, &error);
    if (text_.size() < least) fail(error);
    connect();
  }

  RankResult run() {
    RankResult result;
    result.rank = info_.rank;
    result.ranks = info_.ranks;
    result.parameters = low_.elements() + high_.elements();
    const uint64_t message = result.parameters * 2;
    result.ring_bytes = static_cast<uint64_t>(o_.steps) * 2 * message *
                        static_cast<uint64_t>(info_.ranks - 1) / static_cast<uint64_t>(info_.ranks);
    const uint64_t sent_before = halfwire_host_egress_bytes();
    for (int64_t step = 1; step <= o_.steps; ++step) {
      const auto begin = std::chrono::steady_clock::now();
      const double loss = train(step);
      const double ms =
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      result.loss.push_back(loss);
      result.step_ms.push_back(ms);
      if (info_.rank == 0) show(o_, step, loss, ms);
    }
    result.egress_bytes = halfwire_host_egress_bytes() - sent_before;
    const uint64_t hash =
        hashFloats(high_.master(), high_.elements(), hashFloats(low_.master(), low_.elements(), kHashStart));
    result.params_hash = fmt::format("{:016x}", hash);
    check(ncclCommDestroy(comm_), "cannot close the communicator");
    return result;
  }

 private:
  void connect() {
    ncclUniqueId id{};
    if (info_.rank == 0) check(ncclGetUniqueId(&id), "cannot make an id");
    if (const auto s = halfwire::shareFromRankZero(info_, std::span(id.internal, sizeof id.internal));
        !s.ok())
      fail(s.message());
    check(ncclCommInitRank(&comm_, info_.ranks, id, info_.rank), "cannot connect the ranks");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "no stream");
    // Everybody starts from rank 0's parameters, as DistributedDataParallel does.
    for (const Bucket* b : {&low_, &high_}) {
      check(ncclBroadcast(b->master(), b->master(), b->elements(), ncclFloat32, 0, comm_, stream_),
            "cannot share the parameters");
    }
    check(cudaStreamSynchronize(stream_), "cannot share the parameters");
  }

  // This rank's samples of a step come from its own part of the text.
  void sample(int64_t step, torch::Tensor* bytes, torch::Tensor* targets) const {
    const auto context = static_cast<uint64_t>(o_.shape.context);
    const uint64_t part = text_.size() / static_cast<uint64_t>(info_.ranks);
    const uint64_t first = part * static_cast<uint64_t>(info_.rank);
    *bytes = torch::empty({o_.batch, o_.shape.context}, torch::kInt64);
    *targets = torch::empty({o_.batch, o_.shape.context}, torch::kInt64);
    auto in = bytes->accessor<int64_t, 2>();
    auto out = targets->accessor<int64_t, 2>();
    for (int64_t b = 0; b < o_.batch; ++b) {
      const uint64_t at =
          first + samplePosition(static_cast<uint64_t>(o_.seed), static_cast<uint64_t>(info_.rank),
                                 static_cast<uint64_t>(step), static_cast<uint64_t>(b), part - context);
      for (uint64_t i = 0; i < context; ++i) {
        in[b][static_cast<int64_t>(i)] = static_cast<uint8_t>(text_[at + i]);
        out[b][static_cast<int64_t>(i)] = static_cast<uint8_t>(text_[at + i + 1]);
      }
    }
  }

  double train(int64_t step) {
    torch::Tensor bytes, targets;
    sample(step, &bytes, &targets);
    const torch::Tensor boundary = lower_(bytes, mask_);
    torch::Tensor cut = boundary.detach().requires_grad_();
    const torch::Tensor loss = upper_(cut, mask_, targets);
    loss.backward();
    check(high_.startAverage(comm_, stream_), "cannot average gradients");
    boundary.backward(cut.grad());
    check(low_.startAverage(comm_, stream_), "cannot average gradients");
    const float rate =
        o_.adam.rate * std::min(1.0f, static_cast<float>(step) / static_cast<float>(o_.warm_up));
    high_.update(o_.adam, rate, static_cast<int>(step));
    low_.update(o_.adam, rate, static_cast<int>(step));
    ncclResult_t asynchronous = ncclSuccess;
    check(ncclCommGetAsyncError(comm_, &asynchronous), "cannot ask the communicator");
    check(asynchronous, "a rank was lost");
    return loss.item<double>();
  }

  const Options& o_;
  const halfwire::RankInfo& info_;
  Lower lower_;
  Upper upper_;
  Bucket low_, high_;
  torch::Tensor mask_;
  std::string text_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace
}  // namespace train_lm

int main(int argc, char** argv) {
  using namespace train_lm;
  const Options options = parse(argc, argv);
  const auto info = halfwire::readRankInfo();
  if (!info.ok()) fail(info.status().message());
  if (!options.out.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.out, error);
    if (error)
      fail(fmt::format("cannot make the folder {} ({}): give --out one that can be written", options.out,
                       error.message()));
  }
  try {
    torch::manual_seed(static_cast<uint64_t>(options.seed));
    torch::set_num_threads(1);  // the ranks share the machine
    // Gradients come and go every step: keep their memory instead of asking the kernel for zeroed pages each
    // time.
    mallopt(M_MMAP_THRESHOLD, 256 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    Training training(options, info.value());
    const RankResult result = training.run();
    if (!options.out.empty() && !writeResult(options.out, result))
      fail(fmt::format("cannot write to {}", options.out));
  } catch (const std::exception& error) {
    fmt::print(stderr, "train_lm: rank {}: {}\n", info.value().rank, error.what());
    return 1;
  }
  return 0;
}
