#include "group/fragment_queue.h"

namespace smddp {

Fragment* FragmentQueue::advance() {
  if (waiting_.empty() || in_flight_.size() >= size_t{kFragmentsInFlight}) return nullptr;
  in_flight_.push_back(std::move(waiting_.front()));
  waiting_.pop_front();
  return in_flight_.back().get();
}

Fragment* FragmentQueue::find(uint64_t seq) const {
  for (const auto& fragment : in_flight_) {
    if (fragment->seq() == seq) return fragment.get();
  }
  return nullptr;
}

void FragmentQueue::on_start(Rank source, uint64_t from, const wire::Header& header) const {
  for (const auto& fragment : in_flight_) {
    if (fragment->seq() >= from && fragment->seq() <= header.seq)
      fragment->on_start(source, header.type);
  }
}

bool FragmentQueue::has_sent_all(Rank target, uint64_t seq) const {
  const Fragment* fragment = find(seq);
  return fragment != nullptr ? fragment->flows().has_sent_all(target) : seq < first_incomplete();
}

}  // namespace smddp
