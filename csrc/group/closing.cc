#include "group/closing.h"

namespace smddp {

bool Closing::begin(uint64_t now_ns) {
  if (began_ns_ != 0) return false;
  began_ns_ = now_ns;
  fragments_.for_each([](Fragment& fragment) { fragment.stop(); });
  return true;
}

bool Closing::progress(uint64_t now_ns) {
  bool late = now_ns >= began_ns_ + kLongestNs;
  told_ = told_ || tell_peers() || late;
  if (fragments_.empty()) return false;
  return late || fragments_.none_of([](const Fragment& fragment) { return !fragment.closed(); });
}

bool Closing::tell_peers() {
  bool all = true;
  for (Rank peer : remote_.ranks()) {
    if (remote_.is_silent(peer)) continue;
    bool last = fragments_.none_of([=](const Fragment& f) { return f.may_overtake(peer); });
    all &= last && remote_.tell_closed(peer);
  }
  return all;
}

void Closing::close_flows() {
  fragments_.for_each([](Fragment& fragment) { fragment.close_flows(); });
}

bool Closing::holds(const std::shared_ptr<Task>& task, Status why) {
  if (fragments_.empty()) return false;
  held_.push(task, std::move(why));
  return true;
}

void Closing::on_written(const wire::Header& header, const std::byte* payload) {
  // What a peer says wrongly now is of no consequence: the group is broken already.
  if (Fragment* fragment = fragments_.find(header.seq)) (void)fragment->on_message(header, payload);
}

}  // namespace smddp
