#include "gpu/footprint.h"

#include <algorithm>

namespace smddp {

void Footprint::add(Spans& to, const Extent& extent) {
  auto from = reinterpret_cast<uintptr_t>(extent.address);
  if (extent.bytes > 0) to.emplace_back(from, from + extent.bytes);
}

void Footprint::close() {
  for (Spans* spans : {&reads_, &writes_}) {
    std::sort(spans->begin(), spans->end());
    Spans apart;
    for (const auto& span : *spans) {
      if (apart.empty() || span.first > apart.back().second) {
        apart.push_back(span);
      } else {
        apart.back().second = std::max(apart.back().second, span.second);
      }
    }
    *spans = std::move(apart);
  }
}

bool Footprint::overlap(const Spans& a, const Spans& b) {
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    if (x->second <= y->first) {
      ++x;
    } else if (y->second <= x->first) {
      ++y;
    } else {
      return true;
    }
  }
  return false;
}

bool Footprint::overlaps(const Footprint& other) const {
  return overlap(writes_, other.writes_) || overlap(writes_, other.reads_) ||
         overlap(reads_, other.writes_);
}

}  // namespace smddp
