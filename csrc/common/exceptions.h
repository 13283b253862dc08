// Exceptions as errors. Nothing below csrc/torch throws on purpose, but the standard library does where memory
// or threads run out, and callbacks of the torch module do. Called where the engine calls into a group or a
// task, and where a group is made.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "common/status.h"

namespace smddp {

// Without the lines of C++ that torch puts behind the sentence.
inline std::string text_of(const std::exception& error) {
  std::string text = error.what();
  return text.substr(0, text.find("\nException raised from "));
}

// The exception that is being handled. The texts are short: std::string keeps them without an allocation,
// so this works where the exception says that there is no memory.
inline Status status_of_exception() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return {Code::kUnavailable, "out of memory"};
  } catch (const std::exception& error) {
    try {
      return {Code::kInternal, text_of(error)};
    } catch (...) {
    }
  } catch (...) {
  }
  return {Code::kInternal, "an exception"};
}

// What f() returns, a Status, or throws.
template <class F>
Status without_exceptions(F&& f) noexcept {
  try {
    return f();
  } catch (...) {
    return status_of_exception();
  }
}

// A copy of `status`; without its sentence if there is no memory for it.
inline Status copy_of(const Status& status) noexcept {
  try {
    return status;
  } catch (...) {
    return {status.code(), "out of memory"};
  }
}

}  // namespace smddp
