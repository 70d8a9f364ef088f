// `halfwire bench`: what the codec and compressed collectives do on this machine.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/units.h"
#include "cli/command.h"
#include "cli/temporary_folder.h"
#include "launch/launch.h"
#include "launch/preload.h"
#include "launch/progress.h"
#include "policy/policy.h"
#include "policy/settings.h"
#include "wire/cuda_check/codec_rows.h"
#include "wire/measure.h"

#ifndef HALFWIRE_SANITIZER_RUNTIME
#define HALFWIRE_SANITIZER_RUNTIME ""
#endif

namespace halfwire::cli {
namespace {

using nlohmann::ordered_json;

constexpr uint64_t kMostElements = 1ull << 32;
constexpr uint64_t kInCache = 256ull << 10;
constexpr uint64_t kOutOfCache = 64ull << 20;
constexpr uint64_t kOnGpu[] = {1ull << 20, 64ull << 20,
                               256ull << 20};  // of elements; of a reduction, of codes
constexpr int kGpuSamples = 15;

template <class T>
struct Name {
  const char* name;
  T value;
};

// The value that `text` names, or a sentence that lists the choices.
template <class T, size_t N>
Result<T> choose(const char* option, const std::string& text, const Name<T> (&names)[N]) {
  std::string all;
  for (size_t i = 0; i < N; ++i) {
    if (text == names[i].name) return names[i].value;
    all += fmt::format("{}{}", i == 0 ? "" : i + 1 == N ? " or " : ", ", names[i].name);
  }
  return Status(StatusCode::kInvalidArgument, fmt::format("{} '{}' is not valid: use {}", option, text, all));
}

constexpr Name<ElementFormat> kFormats[] = {{"e4m3", ElementFormat::kE4M3},
                                            {"e3m4", ElementFormat::kE3M4},
                                            {"e5m2", ElementFormat::kE5M2},
                                            {"int8", ElementFormat::kInt8}};
constexpr Name<ScaleFormat> kScales[] = {{"fp32", ScaleFormat::kFp32}, {"e8m0", ScaleFormat::kE8M0}};
constexpr Name<bool> kRoundings[] = {{"nearest", false}, {"stochastic", true}};
constexpr Name<uint16_t> kBlocks[] = {{"32", 32}, {"64", 64}, {"128", 128}, {"256", 256}};
constexpr Name<DataType> kInputs[] = {
    {"bf16", DataType::kBf16}, {"fp16", DataType::kFp16}, {"fp32", DataType::kFp32}};
constexpr Name<ncclDataType_t> kTypes[] = {
    {"bf16", ncclBfloat16}, {"fp16", ncclFloat16}, {"fp32", ncclFloat32}};
constexpr Name<CodecOp> kCodecOps[] = {
    {"quantize", CodecOp::kQuantize}, {"dequantize", CodecOp::kDequantize}, {"reduce", CodecOp::kReduce}};
constexpr Name<CollectiveOp> kCollectives[] = {{"allreduce", CollectiveOp::kAllReduce},
                                               {"reducescatter", CollectiveOp::kReduceScatter},
                                               {"allgather", CollectiveOp::kAllGather},
                                               {"alltoall", CollectiveOp::kAlltoAll}};

// One or several values of an option, in the order given.
template <class T, size_t N>
Result<std::vector<T>> chooseAll(const char* option, const std::vector<std::string>& texts,
                                 const Name<T> (&names)[N]) {
  std::vector<T> values;
  for (const std::string& text : texts) {
    const auto value = choose(option, text, names);
    if (!value.ok()) return value.status();
    values.push_back(value.value());
  }
  return values;
}

int refuse(const char* command, const Status& status) {
  fmt::print(stderr, "halfwire bench {}: {}\n", command, status.message());
  return 2;
}

// "AMD EPYC 9B14, 2 CPUs": where the rows were measured.
std::string machine() {
  std::ifstream in("/proc/cpuinfo");
  std::string model = "unknown processor";
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (!line.starts_with("model name") || colon == std::string::npos) continue;
    model = line.substr(colon + 2);
    break;
  }
  return fmt::format("{}, {} CPUs", model, std::max(1u, std::thread::hardware_concurrency()));
}

void printJson(ordered_json rows) {
  const ordered_json whole = {
      {"rows", std::move(rows)}, {"machine", machine()}, {"version", HALFWIRE_VERSION}};
  fmt::print("{}\n", whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

void showProgress(uint64_t done, uint64_t total, const std::string& words) {
  if (!isatty(2)) return;
  fmt::print(stderr, "\r\x1b[K{}", done == total ? "" : progressBar(done, total, words));
  std::fflush(stderr);
}

struct CodecOptions {
  std::vector<std::string> formats = {"e4m3"}, blocks = {"128"}, scales = {"fp32"}, inputs = {"bf16"};
  std::vector<std::string> ops = {"quantize", "dequantize", "reduce"};
  std::string rounding = "nearest";
  std::string elements;
  std::string device = "host";
  bool json = false;
};

ordered_json codecJson(const CodecRow& r) {
  return {{"device", r.device},
          {"op", r.op},
          {"path", r.device != "host" || r.path == "scalar" ? r.path : "simd"},
          {"instructions", r.path},
          {"input", r.input},
          {"format", r.format},
          {"block", r.block},
          {"scale", r.scale},
          {"rounding", r.rounding},
          {"elements", r.elements},
          {"working_set_bytes", r.working_set_bytes},
          {"bytes_per_s", r.bytes_per_s},
          {"copy_bytes_per_s", r.copy_bytes_per_s},
          {"wire_ratio", r.wire_ratio},
          {"snr_db", r.snr_db}};
}

Result<std::vector<CodecCase>> codecCases(const CodecOptions& options) {
  const auto formats = chooseAll("--format", options.formats, kFormats);
  if (!formats.ok()) return formats.status();
  const auto blocks = chooseAll("--block", options.blocks, kBlocks);
  if (!blocks.ok()) return blocks.status();
  const auto scales = chooseAll("--scale", options.scales, kScales);
  if (!scales.ok()) return scales.status();
  const auto inputs = chooseAll("--input", options.inputs, kInputs);
  if (!inputs.ok()) return inputs.status();
  const auto rounding = choose("--rounding", options.rounding, kRoundings);
  if (!rounding.ok()) return rounding.status();
  const auto ops = chooseAll("--op", options.ops, kCodecOps);
  if (!ops.ok()) return ops.status();
  uint64_t elements = 0;
  if (!options.elements.empty()) {
    const auto parsed =
        parseInteger(options.elements, 1, static_cast<int64_t>(kMostElements), "number of elements");
    if (!parsed.ok()) return Status(StatusCode::kInvalidArgument, "--elements " + parsed.status().message());
    elements = static_cast<uint64_t>(parsed.value());
  }
  std::vector<CodecCase> cases;
  for (const DataType input : inputs.value()) {
    for (const ElementFormat format : formats.value()) {
      for (const uint16_t block : blocks.value()) {
        for (const ScaleFormat scale : scales.value()) {
          for (const CodecOp op : ops.value()) {
            for (const CodecPath path : {CodecPath::kSimd, CodecPath::kScalar}) {
              if (path == CodecPath::kScalar && (options.device == "cuda" || rounding.value())) continue;
              CodecCase c;
              c.format = {format, scale, block};
              c.type = input;
              c.op = op;
              c.path = path;
              c.rounding = {rounding.value(), 1, 0};
              c.seconds = 0.5;
              if (elements != 0) {
                c.elements = elements;
                cases.push_back(c);
                continue;
              }
              if (options.device == "cuda") {
                for (const uint64_t bytes : kOnGpu) {
                  c.elements = bytes / (op == CodecOp::kReduce ? c.packets : dataTypeBytes(input));
                  cases.push_back(c);
                }
                continue;
              }
              c.elements = codecElementsFor(c, kInCache);
              cases.push_back(c);
              // The first whole number of blocks that reaches the size.
              c.elements = codecElementsFor(c, kOutOfCache) + block;
              cases.push_back(c);
            }
          }
        }
      }
    }
  }
  return cases;
}

// Every case on every path that the first GPU has.
Status measureOnGpu(const std::vector<CodecCase>& cases, std::vector<CodecRow>* rows) {
  check::Gpu gpu;
  std::string why;
  if (!check::openGpu(&gpu, &why)) {
    return {StatusCode::kUnavailable,
            fmt::format("--device cuda needs a GPU and its driver, and there is none: {}", why)};
  }
  const char* paths[] = {"hardware", "software"};
  const uint64_t total = cases.size() * std::size(paths) * 100;
  uint64_t done = 0;
  std::string refused;
  for (const char* path : paths) {
    setenv("HALFWIRE_CODEC_PATH", path, 1);
    const auto device = makeCudaDevice(0);
    unsetenv("HALFWIRE_CODEC_PATH");
    if (!device.ok()) {
      // Before sm_89 there is no conversion in hardware, which is no error.
      refused += fmt::format("{}{} path: {}", refused.empty() ? "" : "; ", path, device.status().message());
      continue;
    }
    for (const CodecCase& c : cases) {
      if (roundsStochastically(c) && !rows->empty() && path == paths[1]) continue;
      auto row = check::measureCudaCodec(gpu, *device.value(), c, kGpuSamples, [&](double part) {
        showProgress(done + static_cast<uint64_t>(part * 100), total, "measuring");
      });
      if (!row.ok()) return row.status();
      rows->push_back(row.value());
      done += 100;
    }
  }
  showProgress(total, total, "");
  if (rows->empty()) return {StatusCode::kUnavailable, refused};
  return {};
}

int benchCodec(const CodecOptions& options) {
  if (options.device != "host" && options.device != "cuda")
    return refuse("codec", {StatusCode::kInvalidArgument,
                            fmt::format("--device '{}' is not valid: use host or cuda", options.device)});
  const auto cases = codecCases(options);
  if (!cases.ok()) return refuse("codec", cases.status());
  std::vector<CodecRow> rows;
  const bool cuda = options.device == "cuda";
  if (cuda) {
    if (Status status = measureOnGpu(cases.value(), &rows); !status.ok()) return refuse("codec", status);
  }
  const uint64_t total = cases.value().size() * 100;
  for (size_t i = 0; !cuda && i < cases.value().size(); ++i) {
    const auto row = measureCodec(cases.value()[i], [&](double part) {
      showProgress(i * 100 + static_cast<uint64_t>(part * 100), total, "measuring");
    });
    if (!row.ok()) return refuse("codec", row.status());
    rows.push_back(row.value());
  }
  showProgress(total, total, "");
  if (options.json) {
    ordered_json json = ordered_json::array();
    for (const CodecRow& r : rows) json.push_back(codecJson(r));
    printJson(std::move(json));
    return 0;
  }
  if (options.rounding == "stochastic") fmt::print("rounded stochastically\n");
  fmt::print("{}\n{:<10}  {:<8}  {:<5}  {:<14}  {:>11}  {:>7}  {:>7}  {:>7}  {:>6}  {:>7}\n",
             cuda ? rows.front().device : machine(), "op", "path", "input", "format", "working set", "GB/s",
             cuda ? "copy" : "memcpy", "of copy", "ratio", "SNR dB");
  for (const CodecRow& r : rows) {
    fmt::print("{:<10}  {:<8}  {:<5}  {:<14}  {:>11}  {:>7.2f}  {:>7.2f}  {:>7.3f}  {:>6.4f}  {:>7.2f}\n",
               r.op, r.path, r.input, fmt::format("{}/{}/{}", r.format, r.block, r.scale),
               formatBytes(r.working_set_bytes), r.bytes_per_s / 1e9, r.copy_bytes_per_s / 1e9,
               r.bytes_per_s / r.copy_bytes_per_s, r.wire_ratio, r.snr_db);
  }
  if (cuda) {
    fmt::print(
        "Medians by events. Rates count bytes read and written; copy is a device copy of as many bytes in "
        "the "
        "same run. The ratio is packet bytes over bf16's.\n");
    return 0;
  }
  fmt::print(
      "One thread. Rates count bytes read and written; memcpy is a copy of as many bytes in the same run. "
      "The ratio is packet "
      "bytes over bf16's.\n");
  return 0;
}

struct CollectiveOptions {
  std::string engine = "host", ranks = "4", link = "1Gbit", op = "allreduce", type = "bf16", repeat = "5";
  std::vector<std::string> bytes = {"1MiB", "4MiB", "16MiB"};
  std::string format = "e4m3", block = "128", scale = "fp32", chunk = "64MiB", overlap = "auto";
  bool share_gpu = false;
  bool json = false;
};

// What the worker reads.
Result<ordered_json> workerConfig(const CollectiveOptions& o, int64_t ranks) {
  if (o.engine != "host" && o.engine != "nccl") {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("--engine '{}' is not valid: use host (no GPU needed) or nccl", o.engine));
  }
  if (o.share_gpu && o.engine != "nccl") {
    return Status(StatusCode::kInvalidArgument, "--share-gpu is for --engine nccl");
  }
  const auto op = choose("--op", o.op, kCollectives);
  if (!op.ok()) return op.status();
  const auto type = choose("--type", o.type, kTypes);
  if (!type.ok()) return type.status();
  const auto format = choose("--format", o.format, kFormats);
  if (!format.ok()) return format.status();
  const auto block = choose("--block", o.block, kBlocks);
  if (!block.ok()) return block.status();
  const auto scale = choose("--scale", o.scale, kScales);
  if (!scale.ok()) return scale.status();
  const auto repeat = parseInteger(o.repeat, 1, 1000, "number of repetitions");
  if (!repeat.ok()) return Status(StatusCode::kInvalidArgument, "--repeat " + repeat.status().message());
  const auto chunk = parseBytes(o.chunk);
  if (!chunk.ok()) return Status(StatusCode::kInvalidArgument, "--chunk-bytes " + chunk.status().message());
  DataType wire = DataType::kBf16;
  (void)wireDataType(type.value(), &wire);
  // Parts of equal size, except for AllReduce, which has none.
  const uint64_t least =
      dataTypeBytes(wire) * (op.value() == CollectiveOp::kAllReduce ? 1 : static_cast<uint64_t>(ranks));
  std::vector<uint64_t> sizes;
  for (const std::string& text : o.bytes) {
    const auto bytes = parseBytes(text);
    if (!bytes.ok()) return Status(StatusCode::kInvalidArgument, "--bytes " + bytes.status().message());
    if (bytes.value() < least || bytes.value() > (4ull << 30) || bytes.value() % least != 0) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--bytes {} is not valid: use a multiple of {} up to 4GiB", text, least));
    }
    sizes.push_back(bytes.value());
  }
  return ordered_json{{"op", static_cast<int>(op.value())},
                      {"type", static_cast<int>(type.value())},
                      {"bytes", sizes},
                      {"repeat", repeat.value()},
                      {"format", static_cast<int>(format.value())},
                      {"scale", static_cast<int>(scale.value())},
                      {"block", block.value()},
                      {"chunk_bytes", chunk.value()},
                      {"share_gpu", o.share_gpu}};
}

int benchCollective(const CollectiveOptions& o) {
  const auto ranks = parseInteger(o.ranks, 2, kMaxFlatRanks, "number of ranks");
  if (!ranks.ok())
    return refuse("collective", {StatusCode::kInvalidArgument, "-n " + ranks.status().message()});
  const auto config = workerConfig(o, ranks.value());
  if (!config.ok()) return refuse("collective", config.status());
  if (!o.link.empty() && o.link != "none") {
    if (const auto rate = parseBitRate(o.link); !rate.ok()) {
      return refuse("collective",
                    {StatusCode::kInvalidArgument, "--link " + rate.status().message() + ", or none"});
    }
  }
  const auto library = findPreloadLibrary();
  if (!library.ok()) return refuse("collective", library.status());
  std::error_code error;
  const std::filesystem::path worker =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / ("halfwire-bench-" + o.engine);
  if (access(worker.c_str(), X_OK) != 0) {
    return refuse("collective",
                  {StatusCode::kUnavailable,
                   fmt::format("cannot run {}: build it (`scripts/build.sh test`{})", worker.string(),
                               o.engine == "nccl" ? ", where nvcc and NCCL are installed" : "")});
  }
  const TemporaryFolder folder("bench");
  if (folder.path().empty()) {
    return refuse("collective", {StatusCode::kUnavailable,
                                 "cannot create a temporary folder: set TMPDIR to one that can be written"});
  }

  std::vector<std::string> environment = currentEnvironment();
  std::erase_if(environment, [](const std::string& entry) { return entry.starts_with("HALFWIRE_"); });
  const char* existing = findVariable(environment, "LD_PRELOAD");
  const auto preload =
      preloadValue(existing == nullptr ? "" : existing, library.value(), HALFWIRE_SANITIZER_RUNTIME);
  if (!preload.ok()) return refuse("collective", preload.status());
  const std::pair<const char*, std::string> variables[] = {
      {"LD_PRELOAD", preload.value()},
      {"HALFWIRE_MODE", "wire"},
      {"HALFWIRE_MIN_BYTES", "0"},
      {"HALFWIRE_COMMS", "world"},
      {"HALFWIRE_OPS", "allreduce,reducescatter,allgather-fp32,alltoall-fp32"},
      {"HALFWIRE_FORMAT", o.format},
      {"HALFWIRE_BLOCK", o.block},
      {"HALFWIRE_SCALE", o.scale},
      {"HALFWIRE_ROUNDING", "nearest"},
      {"HALFWIRE_CHUNK_BYTES", std::to_string(config.value()["chunk_bytes"].get<uint64_t>())},
      {"HALFWIRE_OVERLAP", o.overlap},
      {"HALFWIRE_LOG_DIR", folder.path()}};
  for (const auto& [name, value] : variables) setVariable(&environment, name, value);
  if (o.engine == "host" && !o.link.empty() && o.link != "none")
    setVariable(&environment, "HALFWIRE_HOST_LINK", o.link);
  if (Status status = checkPreload(environment, library.value()); !status.ok())
    return refuse("collective", status);
  if (const auto settings = readSettings([&](const char* name) { return findVariable(environment, name); });
      !settings.ok()) {
    return refuse("collective", settings.status());
  }
  const auto port = freePort();
  if (!port.ok()) return refuse("collective", port.status());

  const std::string config_path = folder.path() + "/config.json";
  const std::string result_path = folder.path() + "/result.json";
  std::ofstream(config_path) << config.value().dump();
  LaunchOptions job;
  job.command = {worker.string(), config_path, result_path};
  job.ranks = true;
  for (int rank = 0; rank < ranks.value(); ++rank) {
    job.environments.push_back(
        rankEnvironment(environment, rank, static_cast<int>(ranks.value()), port.value()));
  }
  const auto outcome = launch(job);
  if (!outcome.ok()) return refuse("collective", outcome.status());
  if (outcome.value().exit_code != 0) {
    fmt::print(stderr, "halfwire bench collective: rank {} failed: its words are above\n",
               outcome.value().failed_rank);
    return 1;
  }
  std::ifstream in(result_path);
  const ordered_json rows = ordered_json::parse(in, nullptr, false);
  if (!rows.is_array()) {
    fmt::print(stderr, "halfwire bench collective: the ranks left no result: is {} full?\n", folder.path());
    return 1;
  }
  if (o.json) {
    printJson(rows);
    return 0;
  }
  fmt::print("{}; {} ranks, {}, {}/{}/{}\n", machine(), ranks.value(),
             o.engine == "host" ? fmt::format("host engine, link {}", o.link)
                                : std::string(o.share_gpu ? "NCCL, one GPU shared" : "NCCL"),
             o.format, o.block, o.scale);
  fmt::print("{:<13} {:<10} {:>8}  {:>9}  {:>9}  {:>9}  {:>7}  {:>9}  {:>6}  {:>9}  {:>9}  {:>8}  {:>7}\n",
             "op", "algorithm", "bytes", "exact us", "wire us", "packet us", "speedup", "of bound", "bytes",
             "rel rms", "identical", "launches", "host us");
  for (const ordered_json& r : rows) {
    const double exact_bytes = r["exact_bytes"].get<double>();
    fmt::print(
        "{:<13} {:<10} {:>8}  {:>9.0f}  {:>9.0f}  {:>9.0f}  {:>7.2f}  {:>9.3f}  {:>6.3f}  {:>9.5f}  {:>9}  "
        "{:>8.1f}  {:>7.0f}\n",
        r["op"].get<std::string>(), r["algorithm"].get<std::string>(),
        formatBytes(r["bytes"].get<uint64_t>()), r["exact_us"].get<double>(), r["wire_us"].get<double>(),
        r["packet_us"].get<double>(), r["speedup"].get<double>(),
        r["packet_us"].get<double>() / r["wire_us"].get<double>(),
        exact_bytes > 0 ? r["wire_bytes"].get<double>() / exact_bytes : 0.0, r["rel_rms_error"].get<double>(),
        r["identical"].get<bool>() ? "yes" : "NO", r["launches"].get<double>(), r["host_us"].get<double>());
  }
  fmt::print(
      "Medians of alternating repetitions, from the first rank's start to the last rank's end. \"packet "
      "us\": the same packets moved "
      "without a codec;\n\"of bound\": that over wire us. \"bytes\": what a rank sent, over what it sent "
      "exactly.\n");
  return 0;
}

}  // namespace

void addBenchCommand(CLI::App& app, int* exit_code) {
  CLI::App* bench =
      app.add_subcommand("bench", "Measure the codec or compressed collectives on this machine");
  bench->require_subcommand(1);

  auto codec = std::make_shared<CodecOptions>();
  CLI::App* c = bench->add_subcommand("codec", "Speed, size and accuracy of the codec beside a plain copy");
  const auto list = [](CLI::App* sub, const char* name, std::vector<std::string>& to, const char* type,
                       const char* help) {
    sub->add_option(name, to, help)
        ->delimiter(',')
        ->type_name(type)
        ->allow_extra_args(false)
        ->default_str("");
  };
  list(c, "--format", codec->formats, "LIST", "of e4m3, e3m4, e5m2, int8 (default: e4m3)");
  list(c, "--block", codec->blocks, "LIST", "of 32, 64, 128, 256 (default: 128)");
  list(c, "--scale", codec->scales, "LIST", "of fp32, e8m0 (default: fp32)");
  c->add_option("--rounding", codec->rounding, "nearest or stochastic (default: nearest)")
      ->type_name("HOW")
      ->default_str("");
  list(c, "--input", codec->inputs, "LIST", "of bf16, fp16, fp32 (default: bf16)");
  list(c, "--op", codec->ops, "LIST", "of quantize, dequantize, reduce (default: all)");
  c->add_option("--device", codec->device, "host, or cuda: the kernels on the first GPU (default: host)")
      ->type_name("DEVICE")
      ->default_str("");
  c->add_option(
       "--elements", codec->elements,
       "elements of a message (default: 256 KiB and 64 MiB of memory touched; on a GPU 1, 64 and 256 "
       "MiB of elements)")
      ->type_name("N");
  c->add_flag("--json", codec->json, "one JSON object with rows");
  c->footer(
      "Examples:\n  halfwire bench codec\n  halfwire bench codec --device cuda\n  halfwire bench codec "
      "--format e4m3,int8 --scale e8m0 --op "
      "quantize --json");
  c->callback([codec, exit_code] { *exit_code = benchCodec(*codec); });

  addBenchStep(*bench, exit_code);

  auto collective = std::make_shared<CollectiveOptions>();
  CLI::App* k =
      bench->add_subcommand("collective", "Compressed against exact collectives between local ranks");
  const auto text = [](CLI::App* sub, const char* name, std::string& to, const char* type, const char* help) {
    sub->add_option(name, to, help)->type_name(type)->default_str("");
  };
  text(k, "--engine", collective->engine, "ENGINE",
       "host: NCCL's interface over TCP, no GPU needed; nccl: the real one (default: host)");
  text(k, "-n", collective->ranks, "RANKS", "ranks on this machine, 2 to 32 (default: 4)");
  text(k, "--link", collective->link, "RATE", "rate of each rank's emulated link, or none (default: 1Gbit)");
  list(k, "--bytes", collective->bytes, "LIST", "message sizes (default: 1MiB,4MiB,16MiB)");
  text(k, "--op", collective->op, "OP",
       "allreduce, reducescatter, allgather or alltoall (default: allreduce)");
  text(k, "--type", collective->type, "TYPE", "bf16, fp16 or fp32 (default: bf16)");
  text(k, "--format", collective->format, "FORMAT", "e4m3, e3m4, e5m2 or int8 (default: e4m3)");
  text(k, "--block", collective->block, "N", "32, 64, 128 or 256 (default: 128)");
  text(k, "--scale", collective->scale, "SCALE", "fp32 or e8m0 (default: fp32)");
  text(k, "--chunk-bytes", collective->chunk, "SIZE",
       "bytes of a message that the scratch holds at a time (default: 64MiB)");
  text(k, "--overlap", collective->overlap, "auto|on|off",
       "codec of one pass beside the transfers of another (default: auto, on with the host engine)");
  text(k, "--repeat", collective->repeat, "N", "repetitions of each, alternating (default: 5)");
  k->add_flag("--share-gpu", collective->share_gpu, "with --engine nccl: all ranks on GPU 0");
  k->add_flag("--json", collective->json, "one JSON object with rows");
  k->footer(
      "Examples:\n  halfwire bench collective -n 4 --link 1Gbit\n"
      "  halfwire bench collective -n 2 --link 10Gbit --op reducescatter --bytes 64MiB --json");
  k->callback([collective, exit_code] { *exit_code = benchCollective(*collective); });
}

}  // namespace halfwire::cli
