// The result of an operation that can fail: a code, and a sentence that says what is wrong and what to do.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace halfwire {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // the caller's values
  kInvalidData,      // a file's or a peer's bytes
  kUnavailable,      // something this machine or process lacks
  kOutOfMemory,
  kPeerLost,
  kTimeout,
  kInternal,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value, or the status that says why there is none. `value()` requires `ok()`.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace halfwire
