// The memory of a rank that one operation reads and writes: its own streams, and its peers', which only read. It
// tells which operations have to keep their order. It knows addresses only. DeviceOperation fills it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "collectives/blocks.h"

namespace smddp {

class Footprint {
 public:
  void read(const Extent& extent) { add(reads_, extent); }
  void write(const Extent& extent) { add(writes_, extent); }
  // To be called once, after all of it.
  void close();
  // Whether one of the two writes what the other reads or writes.
  bool overlaps(const Footprint& other) const;

 private:
  using Spans =
      std::vector<std::pair<uintptr_t, uintptr_t>>;  // from, to; sorted and apart once closed
  static void add(Spans& to, const Extent& extent);
  static bool overlap(const Spans& a, const Spans& b);

  Spans reads_, writes_;
};

}  // namespace smddp
