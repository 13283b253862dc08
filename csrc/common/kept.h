// What a device may still use when its owner gives it up.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace smddp {

// Keeps `object` until the process ends. By any thread.
inline void keep(std::shared_ptr<void> object) {
  struct Kept {
    std::mutex mutex;
    std::vector<std::shared_ptr<void>> objects;
  };
  static auto* kept = new Kept();  // never destroyed
  std::lock_guard lock(kept->mutex);
  kept->objects.push_back(std::move(object));
}

}  // namespace smddp
