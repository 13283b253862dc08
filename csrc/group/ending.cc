#include "group/ending.h"

#include <algorithm>
#include <utility>

namespace smddp {

void Ending::begin(uint64_t now_ns) {
  if (began_ns_ == 0) began_ns_ = now_ns;
}

void Ending::add(std::unique_ptr<Fragment> fragment) {
  fragment->stop();
  fragments_.push_back(std::move(fragment));
}

bool Ending::progress(uint64_t now_ns) {
  bool late = now_ns >= began_ns_ + kLongestNs;
  told_ = told_ || tell_peers() || late;
  if (fragments_.empty()) return false;
  return late || std::all_of(fragments_.begin(), fragments_.end(),
                             [](const auto& fragment) { return fragment->over(); });
}

bool Ending::tell_peers() {
  bool all = true;
  for (Rank peer : remote_.ranks()) {
    bool early = std::any_of(fragments_.begin(), fragments_.end(),
                             [&](const auto& fragment) { return fragment->may_overtake(peer); });
    all &= !early && remote_.tell_over(peer);
  }
  return all;
}

void Ending::on_written(const wire::Header& header) {
  for (auto& fragment : fragments_) {
    // What a peer says wrongly now is of no consequence: the group is broken already.
    if (fragment->seq() == header.seq) (void)fragment->on_message(header, nullptr);
  }
}

}  // namespace smddp
