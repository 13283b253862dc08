// The values of results, and what a sentence must hold.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "common/status.h"

namespace smddp {

// Whether `sentence` holds `words`.
inline testing::AssertionResult says(const std::string& sentence, const std::string& words) {
  if (sentence.find(words) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << sentence << "\" lacks \"" << words << "\"";
}
inline testing::AssertionResult says(const Status& status, const std::string& words) {
  return says(status.message(), words);
}

// An error ends the test.
template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().message());
  return std::move(result.value());
}

}  // namespace smddp
