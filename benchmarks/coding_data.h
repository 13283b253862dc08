// Data of several kinds, a MiB of each, for the programs that code it.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/types.h"
#include "kernels/reduce.h"

namespace smddp {

constexpr size_t kDataBytes = 1 << 20;

struct Data {
  std::string name;
  Dtype dtype;
  std::vector<std::byte> bytes;
};

inline void append(std::vector<std::byte>* to, float x, Dtype dtype) {
  std::byte element[4];
  std::memcpy(element, &x, sizeof x);
  if (dtype != Dtype::kFloat32) kernels::store(element, &x, 1, dtype);
  to->insert(to->end(), element, element + size_of(dtype));
}

// Weights: normal, of one scale. Gradients: normal, each row of 1,024 of another scale, one row in eight zero.
inline Data weights(Dtype dtype) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  Data data{"weights", dtype, {}};
  while (data.bytes.size() < kDataBytes) append(&data.bytes, normal(random), dtype);
  return data;
}
inline Data gradients(Dtype dtype) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 1), log_scale(-14, 2);
  Data data{"gradients", dtype, {}};
  while (data.bytes.size() < kDataBytes) {
    float scale = random() % 8 == 0 ? 0 : std::exp2(log_scale(random));
    for (int i = 0; i < 1024; ++i) append(&data.bytes, normal(random) * scale, dtype);
  }
  return data;
}
inline Data random_bits(Dtype dtype) {
  std::mt19937 random(3);
  Data data{"random", dtype, std::vector<std::byte>(kDataBytes)};
  for (auto& byte : data.bytes) byte = static_cast<std::byte>(random());
  return data;
}
inline std::vector<Data> all_data() {
  std::vector<Data> all;
  for (Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32}) {
    for (auto make : {weights, gradients, random_bits}) all.push_back(make(dtype));
  }
  return all;
}

}  // namespace smddp
