#include "intranode/neighbors.h"

#include <algorithm>
#include <utility>

namespace smddp::intranode {

Result<std::shared_ptr<Neighbor>> Neighbors::open(int pid, uint64_t token, int presence_fd,
                                                  int wake_fd) {
  if (auto known = by_token_[token].lock()) return known;
  std::erase_if(by_token_, [](const auto& entry) { return entry.second.expired(); });
  auto opened = Neighbor::open(pid, token, presence_fd, wake_fd);
  if (!opened) return opened.status();
  std::shared_ptr<Neighbor> neighbor = std::move(opened.value());
  by_token_[token] = neighbor;
  return neighbor;
}

void Neighbors::watch_deaths(std::vector<pollfd>& fds) {
  size_t first = fds.size();
  std::vector<std::shared_ptr<Neighbor>> watched;
  for (auto& [token, weak] : by_token_) {
    auto neighbor = weak.lock();
    if (!neighbor || neighbor->death_fd() < 0 || neighbor->dead()) continue;
    fds.push_back({neighbor->death_fd(), POLLIN, 0});
    watched.push_back(std::move(neighbor));
  }
  if (watched.empty() || poll(&fds[first], watched.size(), 0) <= 0) return;
  for (size_t i = 0; i < watched.size(); ++i) {
    if ((fds[first + i].revents & POLLIN) == 0) continue;
    watched[i]->mark_dead();
    fds[first + i].fd = -1;  // ppoll() ignores the entry
  }
}

bool Neighbors::any_polls_on(int core) const {
  return std::any_of(by_token_.begin(), by_token_.end(), [&](const auto& entry) {
    auto neighbor = entry.second.lock();
    return neighbor != nullptr && neighbor->polls_on(core);
  });
}

}  // namespace smddp::intranode
