#include "kernels/reduce.h"

#include <atomic>
#include <cstring>

#include "kernels/reduce_kernels.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace smddp::kernels {
namespace {

// For shorter copies memcpy is faster; glibc's takes rep movsb for longer ones, which is slow between aliasing pages
// (2026-11-21, AMD EPYC). With 512 bytes and 8 KiB collectives take as long (2026-11-29-constants).
constexpr size_t kVectorCopy = 2 << 10;
// From here on memcpy is the faster one again where rep movsb is not slow: it takes the lines that it writes from another
// core's cache without reading them. AllReduce fp32 of 256 KiB 31 us for 36, AllGather of 64 KiB 4.7 for 5.1; vectors of 4 KiB
// 1.38 for 1.45 by it (2026-11-29-intel-xeon).
constexpr size_t kRepCopy = 8 << 10;

bool rep_is_fast() {
#if defined(__x86_64__) || defined(__i386__)
  static const bool intel = __builtin_cpu_is("intel");
  return intel;
#else
  return false;
#endif
}

bool processor_has(Isa isa) {
  if (isa == Isa::kBaseline) return true;
#if defined(__x86_64__) || defined(__i386__)
  if (isa == Isa::kAvx2) {
    // Not every compiler's __builtin_cpu_supports() takes "f16c".
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0 &&
           __builtin_cpu_supports("avx2");
  }
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

const Kernels* kernels_of(Isa isa) {
  if (isa == Isa::kBaseline) return baseline_kernels();
  return isa == Isa::kAvx2 ? avx2_kernels() : avx512_kernels();
}

Isa best() {
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (has(isa)) return isa;
  }
  return Isa::kBaseline;
}

std::atomic<const Kernels*> chosen = nullptr;

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_relaxed);
  if (k == nullptr) {
    // Another thread may have chosen or set one in the meantime: that one stays.
    const Kernels* mine = kernels_of(best());
    if (chosen.compare_exchange_strong(k, mine, std::memory_order_relaxed)) k = mine;
  }
  return *k;
}

}  // namespace

bool has(Isa isa) { return kernels_of(isa) != nullptr && processor_has(isa); }

Isa isa() {
  const Kernels* k = &kernels();
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (k == kernels_of(isa)) return isa;
  }
  return Isa::kBaseline;
}

bool set_isa(Isa isa) {
  if (!has(isa)) return false;
  chosen.store(kernels_of(isa), std::memory_order_relaxed);
  return true;
}

const char* name_of(Isa isa) {
  static constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};
  return kNames[static_cast<size_t>(isa)];
}

std::string isa_name() { return name_of(isa()); }

Dtype accumulator_of(Dtype dtype) {
  return dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16 ? Dtype::kFloat32 : dtype;
}

void reduce(void* destination, const void* const* sources, size_t sources_count, size_t count,
            Dtype dtype, ReduceOp op, int divisor, bool streaming) {
  kernels().reduce(destination, sources, sources_count, count, dtype, op, divisor, streaming);
}

void load(void* accumulator, const void* source, size_t count, Dtype dtype) {
  kernels().load(accumulator, source, count, dtype);
}

void accumulate(void* accumulator, const void* source, size_t count, Dtype dtype, ReduceOp op) {
  kernels().accumulate(accumulator, source, count, dtype, op);
}

void store(void* destination, const void* accumulator, size_t count, Dtype dtype) {
  kernels().store(destination, accumulator, count, dtype);
}

void divide(void* accumulator, size_t count, Dtype accumulator_type, int divisor) {
  if (accumulator_type != Dtype::kFloat32 && accumulator_type != Dtype::kFloat64) return;
  const void* source = accumulator;
  kernels().reduce(accumulator, &source, 1, count, accumulator_type, ReduceOp::kSum, divisor,
                   false);
}

void copy(void* to, const void* from, size_t bytes, bool streaming) {
  if (bytes < kVectorCopy || (bytes >= kRepCopy && !streaming && rep_is_fast())) {
    std::memcpy(to, from, bytes);
  } else {
    kernels().copy(to, from, bytes, streaming);
  }
}

void copy_twice(void* to, void* also, const void* from, size_t bytes, bool streaming) {
  kernels().copy_twice(to, also, from, bytes, streaming);
}

}  // namespace smddp::kernels
