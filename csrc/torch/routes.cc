#include "torch/routes.h"

#include <algorithm>

namespace smddp {
namespace {

constexpr std::array<const char*, 6> kNames{"smddp", "fallback", "nccl", "gloo", "auto", "default"};

bool leads_away(Route route, c10::DeviceType device) {
  return route == Route::kFallback || route == (device == c10::kCUDA ? Route::kNccl : Route::kGloo);
}

Route route_of(const RouteSteps& steps, c10::DeviceType device, uint64_t bytes) {
  auto step = std::find_if(steps.begin(), steps.end(),
                           [&](const RouteStep& s) { return bytes <= s.up_to; });
  Route route = step == steps.end() ? Route::kSmddp : step->route;
  if (route != Route::kDefault) return route;
  return device == c10::kCUDA ? Route::kMeasured : Route::kSmddp;
}

}  // namespace

const char kRouted[] = "smddp.routes chose it";

std::optional<Route> parse_route(const std::string& name) {
  auto known = std::find(kNames.begin(), kNames.end(), name);
  if (known == kNames.end()) return std::nullopt;
  return static_cast<Route>(known - kNames.begin());
}

std::string text_of(const RouteTable& table) {
  std::string text;
  for (const RouteSteps& steps : table) {
    for (const RouteStep& step : steps)
      text += std::to_string(step.up_to) + kNames[static_cast<size_t>(step.route)] + ",";
    text += ";";
  }
  return text;
}

bool Routes::any(Collective collective, c10::DeviceType device) const {
  const RouteSteps& steps = table_[static_cast<size_t>(collective)];
  return steps.size() > 1 || (!steps.empty() && route_of(steps, device, 0) != Route::kSmddp);
}

bool Routes::leads_away(Collective collective, c10::DeviceType device, uint64_t bytes,
                        bool may_measure) {
  auto index = static_cast<size_t>(collective);
  if (index >= table_.size() || table_[index].empty()) return false;
  if (measuring_ == std::this_thread::get_id())
    return smddp::leads_away(forced_.value_or(Route::kSmddp), device);
  Route route = route_of(table_[index], device, bytes);
  if (route == Route::kMeasured) {
    if (!may_measure) return false;
    const RouteSteps* steps = measured(collective, device);
    route = steps != nullptr ? route_of(*steps, device, bytes) : Route::kSmddp;
  }
  return smddp::leads_away(route, device);
}

void Routes::force(std::optional<Route> route) {
  if (measuring_ == std::this_thread::get_id()) forced_ = route;
}

const RouteSteps* Routes::measured(Collective collective, c10::DeviceType device) {
  std::lock_guard lock(mutex_);
  auto key = std::make_pair(collective, device);
  auto known = measured_.find(key);
  if (known != measured_.end()) return &known->second;
  measuring_ = std::this_thread::get_id();
  struct End {
    Routes& routes;
    ~End() {
      routes.forced_.reset();
      routes.measuring_ = std::thread::id();
    }
  } end{*this};
  std::optional<RouteSteps> steps = measure_(collective, device);
  if (!steps) return nullptr;
  return &measured_.try_emplace(key, std::move(*steps)).first->second;
}

}  // namespace smddp
