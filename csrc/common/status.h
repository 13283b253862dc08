// Errors inside the core: a code, and a sentence for the user. Below csrc/torch there are no
// exceptions.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

namespace smddp {

enum class Code {
  kOk,
  kInvalid,      // an argument of the caller that can't work
  kUnavailable,  // a library, device or kernel facility is missing
  kMismatch,     // ranks called different operations
  kTimeout,      // a deadline passed
  kPeerLost,     // a peer process died or its connection broke
  kAborted,      // the group was aborted, here or by a peer
  kInternal,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == Code::kOk; }
  explicit operator bool() const { return ok(); }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Of a system call that has just failed: kUnavailable with `what` and the text of errno.
inline Status errno_status(const std::string& what) {
  return {Code::kUnavailable, what + ": " + std::strerror(errno)};
}

// A value, or the Status that says why there is none. value() may be called only if ok().
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}  // NOLINT: implicit by intent
  Result(Status status) : state_(std::move(status)) {}
  bool ok() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return ok(); }
  T& value() { return std::get<T>(state_); }
  const T& value() const { return std::get<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }
  // Moves the value, if there is one, into `target`.
  template <class Target>
  Status into(Target& target) {
    if (ok()) target = static_cast<Target>(std::move(value()));
    return status();
  }

 private:
  std::variant<T, Status> state_;
};

}  // namespace smddp
