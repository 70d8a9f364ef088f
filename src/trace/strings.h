// A pool of distinct strings, each known by a small number. Traces repeat a few thousand names millions of
// times.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>

namespace halfwire::trace {

// Not thread-safe. Views and ids stay valid for the pool's lifetime, also when the pool is moved.
class Strings {
 public:
  uint32_t intern(std::string_view text) {
    if (auto it = ids_.find(text); it != ids_.end()) return it->second;
    const auto id = static_cast<uint32_t>(texts_.size());
    texts_.emplace_back(text);
    ids_.emplace(texts_.back(), id);
    return id;
  }
  const std::string& at(uint32_t id) const { return texts_[id]; }
  size_t size() const { return texts_.size(); }

 private:
  std::deque<std::string> texts_;  // never moves its elements
  std::unordered_map<std::string_view, uint32_t> ids_;
};

}  // namespace halfwire::trace
