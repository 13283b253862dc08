// What the benchmarks of single GPU kernels share: CUDA's errors end them, and a kernel's rate.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(result));
  std::exit(2);
}
#define CHECK(call) check(call, #call)

// The best of several repetitions of `launch`, which moves so many bytes.
template <class F>
double gigabytes_per_second(size_t bytes, F&& launch) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  float best = 1e9f;
  for (int i = 0; i < 5; ++i) {
    float now = 0;
    CHECK(cudaEventRecord(begin));
    launch();
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&now, begin, end));
    best = std::min(best, now);
  }
  return static_cast<double>(bytes) / best / 1e6;
}

inline int multiprocessors() {
  int all = 0, device = 0;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, device));
  return all;
}
