// Arbitrary bytes as a coded block, and as a piece: decoding stays inside of its memory, every instruction set
// agrees, and a piece decodes in place to the same values. Arbitrary bytes as values: they come back.
#include "coding/piece.h"

#include <algorithm>
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

Memory decoded(const Memory& coded, size_t bytes) {
  Memory to(bytes);
  if (!coding::decode(to.data(), bytes, coded.data(), coded.size())) to.clear();
  return to;
}

Memory decoded_piece(const Memory& coded, size_t bytes) {
  Memory to(bytes), in_place(bytes);
  bool is_piece = coding::decode_piece(to.data(), bytes, coded.data(), coded.size());
  if (coded.size() <= bytes) {
    if (!coded.empty()) std::memcpy(in_place.data(), coded.data(), coded.size());
    if (coding::decode_in_place(in_place.data(), bytes, coded.size()) != is_piece) std::abort();
    if (is_piece && in_place != to) std::abort();
  }
  if (!is_piece) to.clear();
  return to;
}

Memory encoded(const Memory& values, Dtype dtype) {
  Memory code(coding::most_coded(values.size()));
  code.resize(coding::encode_piece(code.data(), values.data(), values.size(), dtype));
  code.shrink_to_fit();
  return code;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  enum { kValues, kBlock, kPiece };
  Dtype dtype = kTypes[input.up_to(3)];
  size_t what = input.up_to(2);
  bool states_its_length = input.up_to(1) == 1;
  size_t bytes = input.number<uint16_t>() % (3 * coding::kBlockBytes);
  std::vector<uint8_t> rest = input.bytes(coding::kPieceBytes);
  Memory given(rest.size());
  if (!rest.empty()) std::memcpy(given.data(), rest.data(), rest.size());
  if (what == kBlock && states_its_length && given.size() >= coding::kHeaderBytes) {
    auto length = static_cast<uint16_t>(given.size());
    std::memcpy(given.data(), &length, sizeof length);
  }
  if (what == kValues) given.resize(bytes);
  Memory first;
  for (kernels::Isa isa : kIsas) {
    if (!kernels::set_isa(isa)) continue;
    Memory result = what == kBlock   ? decoded(given, std::min(bytes, coding::kBlockBytes))
                    : what == kPiece ? decoded_piece(given, bytes)
                                     : decoded_piece(encoded(given, dtype), bytes);
    if (what == kValues && result != given) std::abort();
    if (isa != kIsas[0] && result != first) std::abort();
    first = result;
  }
  return 0;
}
