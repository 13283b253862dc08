#include "flows/coding_choice.h"

#include <algorithm>
#include <cstring>

#include "coding/piece.h"
#include "common/clock.h"

namespace smddp {
namespace {

// Data that does not shrink costs a sample of 8 KiB in so many pieces: 0.995 to 1.006 of the rate (2026-11-27-coding,
// AMD EPYC).
constexpr size_t kPiecesPerSample = 16;
// Times differ from one piece to the next. Not measured.
constexpr double kLeastGain = 1.05;
// No smaller piece is coded: to sample, code and decode 2 KiB of bf16 takes 0.56 us, as much as they save at 10 Gbit/s
// (AVX-512, AMD EPYC), and the time is not in proportion to the bytes.
constexpr size_t kLeastBytes = 4 << 10;

}  // namespace

// One time counts as at most four times the average: the thread may have lost its core meanwhile.
// Not measured: these weights.
void CodingChoice::Speed::count(size_t bytes, uint64_t ns) {
  double each = static_cast<double>(ns) / static_cast<double>(bytes);
  average_ += (std::min(each, 4 * average_) - average_) / 16;
}

// While a flow is not coded, a sample now and then says whether it would pay: a block in the middle of a piece.
bool CodingChoice::codes(CodingState& flow, const FlowCoding& how, const std::byte* from,
                         size_t bytes, size_t at) {
  bool able = how.coding != Coding::kOff && coding::codes(how.dtype) && bytes >= kLeastBytes &&
              bytes <= coding::kPieceBytes;
  if (!able || how.coding == Coding::kOn) return flow.codes = able;
  if (!flow.codes) {
    if (at < flow.next_sample) return false;
    size_t sample = std::min(bytes, coding::kBlockBytes);
    from += (bytes - sample) / 2 / sizeof(float) * sizeof(float);
    flow.ratio = static_cast<double>(coding::estimate(from, sample, how.dtype)) /
                 static_cast<double>(sample);
  }
  flow.codes = pays(flow.ratio, how.bytes_per_ns);
  if (!flow.codes) flow.next_sample = at + kPiecesPerSample * bytes;
  return flow.codes;
}

size_t CodingChoice::encode(CodingState& flow, std::byte* to, const std::byte* from, size_t bytes,
                            Dtype dtype) {
  uint64_t began = now_ns();
  size_t coded = coding::encode_piece(to, from, bytes, dtype);
  encode_.count(bytes, now_ns() - began);
  flow.ratio = (flow.ratio + static_cast<double>(coded) / static_cast<double>(bytes)) / 2;
  if (coded <= coding::most_worth(bytes)) return coded;
  std::memcpy(to, from, bytes);
  return bytes;
}

bool CodingChoice::decode(std::byte* to, size_t bytes, const std::byte* from, size_t coded) {
  uint64_t began = now_ns();
  bool decoded = from == to ? coding::decode_in_place(to, bytes, coded)
                            : coding::decode_piece(to, bytes, from, coded);
  decode_.count(bytes, now_ns() - began);
  return decoded;
}

// Most ranks send as much as they receive. As if nothing travelled while a rank codes: where the kernel's work sets the
// pace of the network, the code takes its time from that. On two cores that carried 4.3 Gbit/s each way, coded fp32 of 16
// MiB took 1.04 to 1.25 times the time when only the slower of network and processor counted.
bool CodingChoice::pays(double ratio, double bytes_per_ns) {
  double raw = 1 / bytes_per_ns;
  double code = encode_.average() + decode_.average();
  bool pays = (ratio * raw + code) * kLeastGain <= raw;
  last_ = {last_.number + 1, pays, ratio, bytes_per_ns, 1 / code};
  if (pays) return true;
  encode_.forget();
  decode_.forget();
  return false;
}

}  // namespace smddp
