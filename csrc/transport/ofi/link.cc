#include "transport/ofi/link.h"

#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstdio>

#include "common/file_descriptor.h"

namespace smddp::fabric {
namespace {

std::string hardware_address(int socket, ifreq request) {
  if (::ioctl(socket, SIOCGIFHWADDR, &request) != 0) return {};
  const char* at = request.ifr_hwaddr.sa_data;
  char text[24];
  std::snprintf(text, sizeof text, " %02hhx:%02hhx:%02hhx:%02hhx:%02hhx:%02hhx", at[0], at[1],
                at[2], at[3], at[4], at[5]);
  return text;
}

std::string link_rate(int socket, ifreq request) {
  ethtool_cmd settings{};
  settings.cmd = ETHTOOL_GSET;
  request.ifr_data = reinterpret_cast<char*>(&settings);
  if (::ioctl(socket, SIOCETHTOOL, &request) != 0) return {};
  return " " + std::to_string(ethtool_cmd_speed(&settings)) + " Mbit/s";
}

}  // namespace

std::string describe_link(const Choice& choice) {
  std::string text = choice.offer.domain;
  const fid_nic* nic = choice.info->nic;
  if (nic != nullptr && nic->link_attr != nullptr)
    text += " " + std::to_string(nic->link_attr->speed) + " bit/s";
  const std::string& interface = choice.offer.interface;
  FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (interface.empty() || interface.size() >= IFNAMSIZ || !socket) return text;
  ifreq request{};
  interface.copy(request.ifr_name, IFNAMSIZ - 1);
  return text + " " + interface + hardware_address(socket.get(), request) +
         link_rate(socket.get(), request);
}

}  // namespace smddp::fabric
