#include "network/model.h"

#include <cstdio>

namespace smddp {

Result<NetworkModel> parse_network_model(const std::string& text) {
  double latency_us = 0, overhead_us = 0, gigabytes = 0;
  char rest = 0;
  int read = std::sscanf(text.c_str(), "%lf%*1[:,]%lf%*1[:,]%lf%c", &latency_us, &overhead_us,
                         &gigabytes, &rest);
  if (read != 3 || !(latency_us > 0) || !(overhead_us > 0) || !(gigabytes > 0)) {
    return Status(
        Code::kInvalid,
        "curve in SMDDP_DEBUG is \"" + text +
            "\"; it may be auto, measure, default, or three numbers above 0: latency in us, "
            "processor us per message, GB/s of a host (20:4:1.25)");
  }
  return NetworkModel{latency_us * 1e3, overhead_us * 1e3, gigabytes};
}

std::string text_of(const NetworkModel& network) {
  char text[96];
  std::snprintf(text, sizeof text, "%.9g,%.9g,%.9g", network.latency_ns / 1e3,
                network.overhead_ns / 1e3, network.bytes_per_ns);
  return text;
}

}  // namespace smddp
