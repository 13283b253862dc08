// Which library, provider and interface an endpoint opens, and the error if there is none.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "debug_setting.h"
#include "fabric_endpoints.h"
#include "transport/ofi/address.h"
#include "transport/ofi/loader.h"
#include "transport/ofi/offer.h"

namespace smddp::ofi {
namespace {

// ---- opening

std::string refusal(const Options& options) {
  Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open(options);
  EXPECT_FALSE(endpoint.ok());
  if (endpoint.ok()) return "";
  EXPECT_EQ(endpoint.status().code(), Code::kUnavailable);
  return endpoint.status().message();
}

TEST(Opening, SomeTcpProviderWorks) {
  Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open(loopback(""));
  ASSERT_TRUE(endpoint.ok()) << endpoint.status().message();
  EXPECT_TRUE(says(endpoint.value()->facts().description, "tcp"));
}

TEST(Opening, WhatIsNamedAndCannotBeOpenedIsAnErrorWithTheRemedy) {
  const std::string offer = "on offer: ", tcp = "tcp;ofi_rxm on ";
  const std::pair<Options, std::vector<std::string>> cases[] = {
      {{"/nonexistent/libfabric.so.1", "", "lo"},
       {"/nonexistent/libfabric.so.1", "apt install libfabric1"}},
      {{"libm.so.6", "", "lo"}, {"not a libfabric"}},
      {loopback("carrier_pigeon"), {"'carrier_pigeon'", offer, tcp}},
      {{"", "", "nic7"}, {"'nic7'", offer, tcp}},
      {{"", "tcp;ofi_rxm", "lo,nic7"}, {"'lo,nic7'"}},
      {{"", "tcp;ofi_rxm", "lo,"}, {"'lo,'"}},
      {{"", "tcp;ofi_rxm", "lo,lo,lo,lo,lo,lo,lo,lo,lo"}, {"'lo,lo,lo,lo,lo,lo,lo,lo,lo'"}}};
  for (const auto& [options, all] : cases) {
    std::string why = refusal(options);
    for (const std::string& words : all) EXPECT_TRUE(says(why, words));
  }
}

TEST(Opening, PackagedLibraryComesBeforeTheSystemsUnlessThereIsAnRdmaDevice) {
  using Paths = std::vector<std::string>;
  EXPECT_EQ(library_candidates({}, "", false), Paths({"libfabric.so.1"}));
  EXPECT_EQ(library_candidates({}, "", true), Paths({"libfabric.so.1"}));
  EXPECT_EQ(library_candidates({}, "/p", false), Paths({"/p", "libfabric.so.1"}));
  EXPECT_EQ(library_candidates({}, "/p", true), Paths({"libfabric.so.1", "/p"}));
  EXPECT_EQ(library_candidates({"/efa", "/efa64"}, "/p", false),
            Paths({"/efa", "/efa64", "/p", "libfabric.so.1"}));
  EXPECT_EQ(library_candidates({"/efa"}, "/p", true), Paths({"/efa", "libfabric.so.1", "/p"}));
}

TEST(Opening, VerbsIsAskedOnlyWhereItMayHaveADevice) {
  auto filter = provider_filter(false, "");
  ASSERT_EQ(filter.size(), 1u);
  EXPECT_EQ(filter[0].name, "FI_PROVIDER");
  EXPECT_EQ(filter[0].value, "^verbs");
  EXPECT_EQ(provider_filter(false, "tcp").size(), 1u);
  EXPECT_TRUE(provider_filter(false, "verbs;ofi_rxm").empty());
  EXPECT_TRUE(provider_filter(true, "").empty());
}

TEST(Opening, LibraryNamedInTheEnvironment) {
  Variable library("SMDDP_LIBFABRIC", "/nonexistent/libfabric.so.1");
  std::string why = refusal(loopback(""));
  EXPECT_TRUE(says(why, "SMDDP_LIBFABRIC names /nonexistent"));
}

TEST(Opening, InterfaceByAddress) {
  Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open({"", "", "127.0.0.1"});
  ASSERT_TRUE(endpoint.ok()) << endpoint.status().message();
  EXPECT_TRUE(says(endpoint.value()->facts().description, "(127.0.0.1)"));
}

// ---- ranking, on invented hosts

NicOffer on_host(const std::string& provider, const std::string& interface,
                 const std::string& address) {
  NicOffer offer;
  offer.provider = provider;
  offer.domain = offer.interface = interface;
  offer.address = address;
  offer.ipv6 = address.find(':') != std::string::npos;
  offer.loopback = address.starts_with("127.") || address == "::1";
  offer.link_local = address.starts_with("fe80:") || address.starts_with("169.254.");
  return offer;
}

std::vector<std::string> ranked(const std::vector<NicOffer>& offers,
                                const std::string& provider = "",
                                const std::string& interface = "") {
  std::vector<std::string> texts;
  for (size_t i : rank_offers(offers, provider, interface)) texts.push_back(offers[i].text());
  return texts;
}

using Texts = std::vector<std::string>;

TEST(Ranking, HardwareBeforeTcpBeforeTheRest) {
  std::vector<NicOffer> offers;
  for (const char* provider : {"udp;ofi_rxd", "sockets", "net", "tcp;ofi_rxm", "tcp",
                               "verbs;ofi_rxm", "efa", "newcomer"}) {
    offers.push_back(on_host(provider, "eth0", "192.0.2.1"));
  }
  EXPECT_EQ(ranked(offers),
            (Texts{"efa on eth0 (192.0.2.1)", "verbs;ofi_rxm on eth0 (192.0.2.1)",
                   "tcp on eth0 (192.0.2.1)", "tcp;ofi_rxm on eth0 (192.0.2.1)",
                   "net on eth0 (192.0.2.1)", "newcomer on eth0 (192.0.2.1)",
                   "sockets on eth0 (192.0.2.1)", "udp;ofi_rxd on eth0 (192.0.2.1)"}));
}

TEST(Ranking, ReachComesBeforeProvider) {
  std::vector<NicOffer> offers = {
      on_host("tcp", "lo", "127.0.0.1"),       on_host("tcp", "eth0", "fe80::1"),
      on_host("tcp", "docker0", "172.17.0.1"), on_host("tcp", "eth0", "2001:db8::1"),
      on_host("tcp", "eth0", "192.0.2.1"),     on_host("udp;ofi_rxd", "eth1", "198.51.100.1")};
  EXPECT_EQ(ranked(offers),
            (Texts{"tcp on eth0 (192.0.2.1)", "tcp on eth0 (2001:db8::1)",
                   "udp;ofi_rxd on eth1 (198.51.100.1)", "tcp on docker0 (172.17.0.1)",
                   "tcp on eth0 (fe80::1)", "tcp on lo (127.0.0.1)"}));
}

TEST(Ranking, LoopbackIfThereIsNothingElse) {
  EXPECT_EQ(ranked({on_host("tcp", "lo", "::1"), on_host("tcp", "lo", "127.0.0.1")}),
            (Texts{"tcp on lo (127.0.0.1)", "tcp on lo (::1)"}));
}

TEST(Ranking, InterfaceByDomainNameAddressOrEfaDevice) {
  NicOffer efa;
  efa.provider = "efa";
  efa.domain = "rdmap0s6-rdm";
  NicOffer verbs = on_host("verbs;ofi_rxm", "eth1", "198.51.100.1");
  verbs.domain = "mlx5_0";
  std::vector<NicOffer> offers = {efa, verbs, on_host("tcp", "eth0", "192.0.2.1"),
                                  on_host("tcp", "lo", "127.0.0.1")};
  EXPECT_EQ(ranked(offers, "", "lo"), (Texts{"tcp on lo (127.0.0.1)"}));
  EXPECT_EQ(ranked(offers, "", "192.0.2.1"), (Texts{"tcp on eth0 (192.0.2.1)"}));
  EXPECT_EQ(ranked(offers, "", "eth1"), (Texts{"verbs;ofi_rxm on mlx5_0 (198.51.100.1)"}));
  EXPECT_EQ(ranked(offers, "", "mlx5_0"), (Texts{"verbs;ofi_rxm on mlx5_0 (198.51.100.1)"}));
  EXPECT_EQ(ranked(offers, "", "rdmap0s6"), (Texts{"efa on rdmap0s6-rdm"}));
  EXPECT_EQ(ranked(offers, "", "ib"), Texts{});
}

TEST(Ranking, ProviderByWholeOrCoreName) {
  std::vector<NicOffer> offers = {on_host("tcp;ofi_rxm", "eth0", "192.0.2.1"),
                                  on_host("verbs;ofi_rxm", "eth0", "192.0.2.1")};
  EXPECT_EQ(ranked(offers, "tcp"), (Texts{"tcp;ofi_rxm on eth0 (192.0.2.1)"}));
  EXPECT_EQ(ranked(offers, "verbs;ofi_rxm"), (Texts{"verbs;ofi_rxm on eth0 (192.0.2.1)"}));
  EXPECT_EQ(ranked(offers, "tc"), Texts{});
  offers.push_back(on_host("tcp", "eth0", "192.0.2.1"));
  EXPECT_EQ(ranked(offers, "tcp"), (Texts{"tcp on eth0 (192.0.2.1)"}));
}

TEST(Ranking, ProvidersThatStayInsideAHostOnlyByName) {
  NicOffer shm;
  shm.provider = shm.domain = "shm";
  EXPECT_EQ(ranked({shm}), Texts{});
  EXPECT_EQ(ranked({shm}, "shm"), (Texts{"shm on shm"}));
}

TEST(Ranking, OffersWithLongMessagesBeforeThoseWithShortOnes) {
  NicOffer direct, whole;
  direct.provider = whole.provider = "efa";
  direct.domain = "a";
  whole.domain = "b";
  direct.small_messages = true;
  EXPECT_EQ(ranked({direct, whole}), (Texts{"efa on b", "efa on a"}));
}

// ---- rails, on invented hosts

NicOffer nic(const std::string& provider, const std::string& domain) {
  NicOffer offer;
  offer.provider = provider;
  offer.domain = domain;
  return offer;
}

std::vector<Texts> sets(const std::vector<NicOffer>& offers, const std::string& interfaces = "",
                        size_t most = 8) {
  std::vector<Texts> all;
  for (const std::vector<size_t>& set : rail_sets(offers, "", interfaces, most)) {
    all.emplace_back();
    for (size_t i : set) all.back().push_back(offers[i].text());
  }
  return all;
}

TEST(RailSets, AllRealNicsInTheOrderOfTheirNames) {
  std::vector<NicOffer> offers = {nic("efa", "rdmap16s27-rdm"), nic("efa", "rdmap0s7-rdm"),
                                  on_host("tcp", "eth0", "192.0.2.1"), nic("efa", "rdmap0s6-rdm"),
                                  nic("efa", "rdmap0s6-rdm")};
  std::vector<Texts> found = sets(offers);
  ASSERT_GE(found.size(), 2u);
  EXPECT_EQ(found[0],
            (Texts{"efa on rdmap0s6-rdm", "efa on rdmap0s7-rdm", "efa on rdmap16s27-rdm"}));
  EXPECT_EQ(found[1], (Texts{"efa on rdmap16s27-rdm"}));
  EXPECT_EQ(found.back(), (Texts{"tcp on eth0 (192.0.2.1)"}));
  EXPECT_EQ(sets(offers, "", 2)[0], (Texts{"efa on rdmap0s6-rdm", "efa on rdmap0s7-rdm"}));
}

TEST(RailSets, OnlyNicsOfTheBestReach) {
  NicOffer far = on_host("verbs;ofi_rxm", "eth1", "198.51.100.1");
  NicOffer near = on_host("verbs;ofi_rxm", "eth2", "169.254.3.4");
  far.domain = "mlx5_0";
  near.domain = "mlx5_1";
  EXPECT_EQ(sets({near, far})[0], (Texts{"verbs;ofi_rxm on mlx5_0 (198.51.100.1)"}));
}

TEST(RailSets, OneInterfaceOfTcp) {
  std::vector<NicOffer> offers = {on_host("tcp", "eth0", "192.0.2.1"),
                                  on_host("tcp", "eth1", "192.0.2.2")};
  EXPECT_EQ(sets(offers)[0], (Texts{"tcp on eth0 (192.0.2.1)"}));
}

// As in NCCL_SOCKET_IFNAME.
TEST(RailSets, InterfacesByTheirBeginningOrAllButSome) {
  std::vector<NicOffer> offers = {
      on_host("tcp", "docker0", "172.17.0.1"), on_host("tcp", "eth10", "192.0.2.10"),
      on_host("tcp", "eth1", "192.0.2.1"), on_host("tcp", "ib0", "198.51.100.1"),
      on_host("tcp", "lo", "127.0.0.1")};
  EXPECT_EQ(sets(offers, "eth1"), (std::vector<Texts>{{"tcp on eth1 (192.0.2.1)"}}));
  EXPECT_EQ(sets(offers, "ib,eth1"),
            (std::vector<Texts>{{"tcp on ib0 (198.51.100.1)", "tcp on eth1 (192.0.2.1)"}}));
  EXPECT_EQ(sets(offers, "198.51.")[0], (Texts{"tcp on ib0 (198.51.100.1)"}));
  EXPECT_EQ(sets(offers, "^eth,docker0,lo"), (std::vector<Texts>{{"tcp on ib0 (198.51.100.1)"}}));
  EXPECT_EQ(sets(offers, "^eth1")[0], (Texts{"tcp on ib0 (198.51.100.1)"}));
  EXPECT_EQ(sets({nic("efa", "rdmap0s6-rdm"), nic("efa", "rdmap0s7-rdm")}, "^rdmap0s7")[0],
            (Texts{"efa on rdmap0s6-rdm"}));
  EXPECT_TRUE(sets(offers, "^eth,docker,ib,lo").empty());
}

TEST(RailSets, TheInterfacesOfAListAreOfOneProvider) {
  std::vector<NicOffer> offers = {on_host("net", "eth0", "192.0.2.1"),
                                  on_host("tcp", "eth0", "192.0.2.1"),
                                  on_host("net", "eth1", "192.0.2.2")};
  EXPECT_EQ(sets(offers, "eth0,192.0.2.2"),
            (std::vector<Texts>{{"net on eth0 (192.0.2.1)", "net on eth1 (192.0.2.2)"}}));
  EXPECT_EQ(sets(offers, "eth1,eth1")[0],
            (Texts{"net on eth1 (192.0.2.2)", "net on eth1 (192.0.2.2)"}));
  for (const char* list : {"eth0,eth2", "eth0,", ",eth0", "eth2"}) {
    EXPECT_TRUE(sets(offers, list).empty()) << list;
  }
  EXPECT_TRUE(sets(offers, "eth0,eth1", 1).empty());
}

// ---- addresses

std::vector<uint8_t> ipv4(const char* text, uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  EXPECT_EQ(::inet_pton(AF_INET, text, &address.sin_addr), 1);
  std::vector<uint8_t> bytes(sizeof address);
  std::memcpy(bytes.data(), &address, sizeof address);
  return bytes;
}

TEST(Address, WildcardTakesTheSourceAndKeepsThePort) {
  std::vector<uint8_t> source = ipv4("192.0.2.7", 0);
  std::vector<uint8_t> name = ipv4("0.0.0.0", 4711);
  replace_wildcard(name, source.data(), source.size());
  EXPECT_EQ(name, ipv4("192.0.2.7", 4711));
  name = ipv4("192.0.2.9", 4711);
  replace_wildcard(name, source.data(), source.size());
  EXPECT_EQ(name, ipv4("192.0.2.9", 4711));
  std::vector<uint8_t> opaque(32, 0);  // an EFA address is not a sockaddr
  replace_wildcard(opaque, source.data(), source.size());
  EXPECT_EQ(opaque, std::vector<uint8_t>(32, 0));
}

TEST(Address, ReadsIp) {
  std::vector<uint8_t> local = ipv4("127.0.0.1", 1), linked = ipv4("169.254.3.4", 1);
  EXPECT_TRUE(describe_ip(local.data(), local.size()).loopback);
  EXPECT_TRUE(describe_ip(linked.data(), linked.size()).link_local);
  EXPECT_EQ(describe_ip(linked.data(), linked.size()).text, "169.254.3.4");
  EXPECT_EQ(describe_ip(nullptr, 0).text, "");
}

}  // namespace
}  // namespace smddp::ofi
