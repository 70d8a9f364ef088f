#include "result.h"

#include <bit>
#include <fstream>
#include <nlohmann/json.hpp>

namespace train_lm {

bool writeResult(const std::string& directory, const RankResult& r) {
  const nlohmann::ordered_json json = {{"rank", r.rank},
                                       {"ranks", r.ranks},
                                       {"parameters", r.parameters},
                                       {"params_hash", r.params_hash},
                                       {"egress_bytes", r.egress_bytes},
                                       {"ring_bytes", r.ring_bytes},
                                       {"loss", r.loss},
                                       {"step_ms", r.step_ms}};
  std::ofstream out(directory + "/rank" + std::to_string(r.rank) + ".json");
  out << json.dump() << '\n';
  out.close();
  return static_cast<bool>(out);
}

std::vector<RankResult> readResults(const std::string& directory, std::string* error) {
  std::vector<RankResult> results;
  for (int rank = 0, ranks = 1; rank < ranks; ++rank) {
    const std::string path = directory + "/rank" + std::to_string(rank) + ".json";
    std::ifstream in(path);
    RankResult r;
    try {
      const auto json = nlohmann::json::parse(in);
      r.rank = json.at("rank");
      r.ranks = json.at("ranks");
      r.parameters = json.at("parameters");
      r.params_hash = json.at("params_hash");
      r.egress_bytes = json.at("egress_bytes");
      r.ring_bytes = json.at("ring_bytes");
      r.loss = json.at("loss").get<std::vector<double>>();
      r.step_ms = json.at("step_ms").get<std::vector<double>>();
    } catch (const nlohmann::json::exception&) {
      *error = path + " is missing or damaged: did the training end well?";
      return {};
    }
    ranks = r.ranks;
    results.push_back(std::move(r));
  }
  return results;
}

uint64_t hashFloats(const float* values, uint64_t count, uint64_t hash) {
  for (uint64_t i = 0; i < count; ++i) {
    hash = (hash ^ std::bit_cast<uint32_t>(values[i])) * 0x100000001b3ull;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace train_lm
