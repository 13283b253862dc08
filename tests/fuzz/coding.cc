// Arbitrary bytes as a coded block: decoding stays inside of its memory, and every instruction set agrees. The
// same bytes as values: they come back.
#include "coding/coding.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "input.h"
#include "kernels/reduce.h"

using namespace smddp;

namespace {

constexpr kernels::Isa kIsas[] = {kernels::Isa::kBaseline, kernels::Isa::kAvx2,
                                  kernels::Isa::kAvx512};
constexpr Dtype kTypes[] = {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32, Dtype::kInt8};

// Of exactly their size: a sanitizer sees each byte that is touched beyond it.
using Memory = std::vector<std::byte>;

Memory decoded(const Memory& coded, size_t bytes, Dtype dtype) {
  Memory to(bytes);
  if (!coding::decode(to.data(), bytes, coded.data(), coded.size(), dtype)) to.clear();
  return to;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  Dtype dtype = kTypes[input.up_to(3)];
  bool is_code = input.up_to(1) == 1, states_its_length = input.up_to(1) == 1;
  size_t bytes = input.number<uint16_t>() % (coding::kBlockBytes + 1);
  std::vector<uint8_t> rest = input.bytes(coding::kBlockBytes + coding::kHeaderBytes);
  Memory given(rest.size());
  if (!rest.empty()) std::memcpy(given.data(), rest.data(), rest.size());
  if (is_code && states_its_length && given.size() >= coding::kHeaderBytes) {
    auto length = static_cast<uint16_t>(given.size());
    std::memcpy(given.data(), &length, sizeof length);
  }
  if (!is_code) given.resize(bytes);
  Memory first;
  for (kernels::Isa isa : kIsas) {
    if (!kernels::set_isa(isa)) continue;
    Memory code = given;
    if (!is_code) {
      code.resize(bytes + coding::kHeaderBytes);
      code.resize(coding::encode(code.data(), given.data(), bytes, dtype));
      code.shrink_to_fit();
    }
    Memory result = decoded(code, bytes, dtype);
    if (!is_code && result != given) std::abort();
    if (isa != kIsas[0] && result != first) std::abort();
    first = result;
  }
  return 0;
}
