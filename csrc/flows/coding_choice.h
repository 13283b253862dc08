// Whether the pieces of a flow, chunks and messages, are coded before they cross to another host, and how fast this
// process codes. Must not know flows or messages. FragmentFlows asks it; one per group, under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/types.h"

namespace smddp {

// Which pieces are coded: none, all of a type that can be coded, or those for which it pays. Ranks need not agree, as each
// piece says how it comes.
enum class Coding : uint8_t { kOff, kOn, kAuto };

// Bytes that went to other hosts, and those that they stood for.
struct SentBytes {
  uint64_t sent = 0, raw = 0;
  SentBytes& operator+=(const SentBytes& more) {
    sent += more.sent;
    raw += more.raw;
    return *this;
  }
};

class CodingChoice;

// What the pieces of a fragment's flows are.
struct FlowCoding {
  Coding coding;
  Dtype dtype;          // of the elements on the wire; kBytes: several, or none that is known
  double bytes_per_ns;  // of the network, for this rank
  CodingChoice& choice;
};

// Of one flow.
struct CodingState {
  bool codes = false;      // its pieces are coded for now
  double ratio = 1;        // to which they shrink: the last ones, or a sample
  size_t next_sample = 0;  // from which byte of it on one is taken, while none is coded
};

// What one answer of pays() rests on. Rates are in bytes per nanosecond.
struct CodingAnswer {
  uint64_t number = 0;  // of the answers so far; 0: there is none
  bool pays = false;
  double ratio = 1;    // of the coded bytes to the raw ones
  double network = 0;  // for this rank
  double code = 0;     // coding and decoding, one after the other
};

class CodingChoice {
 public:
  // Whether the next piece of a flow is coded, the `bytes` bytes at `from`, which begin at byte `at` of it.
  bool codes(CodingState& flow, const FlowCoding& how, const std::byte* from, size_t bytes,
             size_t at);
  // Codes a piece into `to`, which has coding::most_coded(bytes) bytes, or copies it if it does not shrink by 1/16.
  // How many bytes there are: `bytes` if it is copied.
  size_t encode(CodingState& flow, std::byte* to, const std::byte* from, size_t bytes, Dtype dtype);
  // As coding::decode_piece(), or coding::decode_in_place() if `from` is `to`.
  bool decode(std::byte* to, size_t bytes, const std::byte* from, size_t coded);

  // Whether coding is expected to make a flow at least 5% faster, if its pieces shrink to `ratio` of their bytes and
  // this rank has `bytes_per_ns` of the network.
  bool pays(double ratio, double bytes_per_ns);
  const CodingAnswer& last() const { return last_; }

 private:
  // A moving average, in nanoseconds per raw byte.
  class Speed {
   public:
    explicit Speed(double usual) : usual_(usual), average_(usual) {}
    double average() const { return average_; }
    void count(size_t bytes, uint64_t ns);
    // Goes back some way to the usual speed, so that a slow time is not remembered for ever.
    void forget() { average_ += (usual_ - average_) / 16; }

   private:
    double usual_, average_;
  };
  // Until pieces have been timed: AVX2.
  Speed encode_{0.1}, decode_{0.05};
  CodingAnswer last_;
};

}  // namespace smddp
