// What is known of a network interface by its name. Called where one is chosen: by the transport and by liveness.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace smddp {

// Between commas; of an empty text one item, which is empty.
inline std::vector<std::string> split_list(const std::string& list) {
  std::vector<std::string> items;
  for (size_t from = 0; from <= list.size();) {
    size_t comma = std::min(list.find(',', from), list.size());
    items.push_back(list.substr(from, comma - from));
    from = comma + 1;
  }
  return items;
}

// Bridges that container and machine emulators make have addresses that no other host can reach.
inline bool is_host_bridge(const std::string& interface) {
  for (const char* prefix : {"docker", "virbr", "br-", "veth", "lxc", "podman", "cni"}) {
    if (interface.starts_with(prefix)) return true;
  }
  return false;
}

// Whether `list` is "^docker0,lo", as NCCL and Gloo read it, and `name` begins with one of its names.
inline bool leaves_out(const std::string& list, const std::string& name) {
  if (!list.starts_with('^')) return false;
  for (const std::string& item : split_list(list.substr(1))) {
    if (!item.empty() && name.starts_with(item)) return true;
  }
  return false;
}

}  // namespace smddp
