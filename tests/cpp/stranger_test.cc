// A stranger attacks ranks while they work: every result stays right, nothing hangs, and what was refused
// is counted. The stranger can reach the ranks' ports; it can't see or change their packets.
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <numeric>
#include <random>
#include <span>

#include "joining/job_secret.h"
#include "transport/ofi/address.h"
#include "transport/ofi/endpoint.h"
#include "transport/ofi/provider.h"
#include "transport/wire.h"
#include "world.h"

namespace smddp {
namespace {

// A process that is no member of the job: it knows where a rank's endpoint listens, and the constants of
// the protocol. It speaks libfabric itself, so it may do what the endpoint's own classes never do.
// This is one endpoint of it, connected to one rank. A provider that refuses what it sends may break the
// connection: then works() is false, and the stranger opens another.
class Stranger {
 public:
  explicit Stranger(const std::vector<uint8_t>& victim,
                    const ofi::Options& options = ofi::options_from_env()) {
    auto library = ofi::load_library(options.library);
    if (!library) return;
    library_ = library.value();
    auto choices = ofi::choose(library_, options);
    if (!choices) return;
    choices_ = std::move(choices.value());
    works_ = open(*choices_[0][0].info, victim);
  }
  ~Stranger() {
    for (fid* object : {of(ep_), of(cq_), of(av_), of(domain_), of(fabric_)}) {
      if (object != nullptr) ::fi_close(object);
    }
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  bool works() const { return works_; }
  uint64_t sent() const { return sent_; }

  // A write of `bytes` bytes with immediate data, by a key that was never granted.
  void write(uint32_t immediate, size_t bytes, uint64_t address, uint64_t key) {
    count(::fi_writedata(ep_, memory_.data(), bytes, nullptr, immediate, to_, address, key, this));
  }
  // A write of no bytes, whose key no provider checks, with immediate data.
  void write_nothing(uint32_t immediate) {
    fi_msg_rma message = {nullptr, nullptr, 0, to_, nullptr, 0, this, immediate};
    count(::fi_writemsg(ep_, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION));
  }
  void send(std::span<const std::byte> message) {
    std::memcpy(memory_.data(), message.data(), message.size());
    count(::fi_send(ep_, memory_.data(), message.size(), nullptr, to_, this));
  }
  // Lets the provider move; false once it has answered with an error.
  bool progress() {
    fi_cq_data_entry entries[16];
    for (int i = 0; i < 4; ++i) {
      ssize_t n = ::fi_cq_read(cq_, entries, 16);
      if (n == -FI_EAGAIN) break;
      if (n >= 0) {
        outstanding_ -= static_cast<size_t>(n);
        continue;
      }
      fi_cq_err_entry error = {};
      (void)::fi_cq_readerr(cq_, &error, 0);
      works_ = false;
      break;
    }
    return works_;
  }
  size_t outstanding() const { return outstanding_; }

 private:
  template <class T>
  static fid* of(T* object) {
    return object == nullptr ? nullptr : &object->fid;
  }
  void count(ssize_t rc) {
    sent_ += rc == 0;
    outstanding_ += rc == 0;
    if (rc != 0 && rc != -FI_EAGAIN) works_ = false;
  }
  bool open(fi_info& info, const std::vector<uint8_t>& victim) {
    fi_av_attr av = {};
    av.type = info.domain_attr->av_type == FI_AV_MAP ? FI_AV_MAP : FI_AV_TABLE;
    fi_cq_attr cq = {};
    cq.format = FI_CQ_FORMAT_DATA;
    if (library_.fabric(info.fabric_attr, &fabric_, nullptr) != 0 ||
        ::fi_domain(fabric_, &info, &domain_, nullptr) != 0 ||
        ::fi_av_open(domain_, &av, &av_, nullptr) != 0 ||
        ::fi_cq_open(domain_, &cq, &cq_, nullptr) != 0 ||
        ::fi_endpoint(domain_, &info, &ep_, nullptr) != 0 ||
        ::fi_ep_bind(ep_, &cq_->fid, FI_TRANSMIT | FI_RECV) != 0 ||
        ::fi_ep_bind(ep_, &av_->fid, 0) != 0 || ::fi_enable(ep_) != 0) {
      return false;
    }
    size_t size = 0;
    (void)::fi_getname(&ep_->fid, nullptr, &size);
    auto published = ofi::unpack_address(info, victim, size);
    return published.ok() &&
           ::fi_av_insert(av_, published.value().names[0].data(), 1, &to_, 0, nullptr) == 1;
  }

  ofi::Library library_;
  std::vector<ofi::RailChoices> choices_;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* av_ = nullptr;
  fid_cq* cq_ = nullptr;
  fid_ep* ep_ = nullptr;
  fi_addr_t to_ = FI_ADDR_UNSPEC;
  std::vector<std::byte> memory_ = std::vector<std::byte>(256 << 10, std::byte{0x5a});
  size_t outstanding_ = 0;
  uint64_t sent_ = 0;
  bool works_ = false;
};

// `make attack` sets more.
double attack_seconds() {
  const char* set = std::getenv("SMDDP_TEST_ATTACK_SECONDS");
  return set == nullptr ? 1 : std::atof(set);
}

struct Setting {
  const char* provider;
  const char* layout;
};

// What the stranger has found out about the ranks.
struct Victims {
  explicit Victims(size_t ranks) : addresses(ranks), ready(static_cast<ptrdiff_t>(ranks) + 1) {}
  std::vector<std::vector<uint8_t>> addresses;  // of their endpoints
  JobKey key{};                                 // of their group
  siphash::Key message_key;                     // for replays only: no stranger knows it
  std::barrier<> ready;
  std::atomic<bool> over{false};
};

using Attack = std::function<void(Stranger&, std::mt19937&, const Victims&)>;

void attack(Victims& victims, const Attack& step, std::atomic<uint64_t>& sent) {
  std::mt19937 random(11);
  std::vector<std::unique_ptr<Stranger>> strangers(victims.addresses.size());
  while (!victims.over) {
    for (size_t i = 0; i < strangers.size(); ++i) {
      if (!strangers[i] || !strangers[i]->works())
        strangers[i] = std::make_unique<Stranger>(victims.addresses[i]);
      if (!strangers[i]->works()) continue;
      uint64_t before = strangers[i]->sent();
      if (strangers[i]->outstanding() < 64) step(*strangers[i], random, victims);
      sent += strangers[i]->sent() - before;
      strangers[i]->progress();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Operations of all kinds, of sizes that travel in messages and in chunks. Counts those whose results are
// wrong.
struct CheckedWork {
  explicit CheckedWork(RankContext& context) : c(context) {}

  // In a group that is made while strangers send, and left again.
  bool gather_in_new_group() {
    std::vector<Rank> everyone(static_cast<size_t>(c.ranks));
    std::iota(everyone.begin(), everyone.end(), 0);
    auto group = c.group.subgroup(c.store, "turn" + std::to_string(turn), everyone);
    if (!passed(group.status())) return false;
    std::vector<uint32_t> in(30'000, value(static_cast<size_t>(c.rank), 0));
    std::vector<uint32_t> out(in.size() * everyone.size());
    auto operation = gather_of(in, out, c.ranks);
    group.value()->submit(operation, {}, false);
    c.engine.wait(*operation);
    if (!passed(operation->status())) return false;
    for (size_t r = 0; r < everyone.size(); ++r)
      wrong += out[r * in.size() + in.size() - 1] != value(r, 0);
    ++turn;
    return true;
  }
  bool gather(size_t count) {
    auto ranks = static_cast<size_t>(c.ranks);
    std::vector<uint32_t> in(count), out(count * ranks, 0xdeadbeef);
    for (size_t i = 0; i < count; ++i) in[i] = value(static_cast<size_t>(c.rank), i);
    if (!passed(c.run(gather_of(in, out, c.ranks)))) return false;
    bool right = true;
    for (size_t r = 0; r < ranks; ++r) {
      for (size_t i = 0; i < count; ++i) right = right && out[r * count + i] == value(r, i);
    }
    wrong += !right;
    ++turn;
    return true;
  }
  bool reduce(size_t count) {
    std::vector<float> data(count), expected(count, 0.0f);
    for (size_t i = 0; i < count; ++i) {
      for (int r = 0; r < c.ranks; ++r) expected[i] += term(r, i);
      data[i] = term(c.rank, i);
    }
    if (!passed(c.run(all_reduce_of(data, c.ranks, Dtype::kFloat32, ReduceOp::kSum)))) return false;
    wrong += data != expected;
    ++turn;
    return true;
  }
  bool passed(const Status& status) {
    ++operations;
    if (!status) failure = status.message();
    return status.ok();
  }
  uint32_t value(size_t rank, size_t i) const {
    return static_cast<uint32_t>(rank * 7919 + i * 31 + turn);
  }
  float term(int rank, size_t i) const {
    return static_cast<float>((static_cast<size_t>(rank) + 1) * (i % 97 + turn % 13));
  }

  RankContext& c;
  size_t turn = 0;
  int operations = 0, wrong = 0;
  std::string failure;
};

class UnderAttack : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    ::setenv("SMDDP_FABRIC_PROVIDER", GetParam().provider, 1);
    auto endpoint = ofi::Endpoint::open(ofi::options_from_env());
    if (!endpoint) GTEST_SKIP() << endpoint.status().message();
    if (!endpoint.value()->facts().description.starts_with(std::string(GetParam().provider) +
                                                           " on ")) {
      GTEST_SKIP() << "found " << endpoint.value()->facts().description;
    }
    // It crashes in its own code at times, in fi_recv after a truncation error (docs/security.md).
    crashes_at_messages_ =
        std::string(GetParam().provider) == "udp;ofi_rxd" &&
        endpoint.value()->facts().description.find("libfabric 1.17") != std::string::npos;
  }
  void TearDown() override { ::unsetenv("SMDDP_FABRIC_PROVIDER"); }

  // ofi_rxd, under the load of many messages, loses one with a truncation error at times, and a connection with
  // it (docs/security.md): then operations end with an error that names the rank. No other provider does that.
  static bool may_end_so(const std::string& failure) {
    bool loses = std::string(GetParam().provider) == "udp;ofi_rxd";
    auto says = [&](const char* words) { return failure.find(words) != std::string::npos; };
    return failure.empty() ||
           (loses && (says("the connection to it broke") || says("its process has ended") ||
                      says("no data from rank")));
  }
  static constexpr const char* kCrash =
      "libfabric 1.17 crashes in fi_recv after a truncation error";
  bool crashes_at_messages_ = false;

  // Works for attack_seconds(), and until there has been `enough` of the attack. Returns how much was refused.
  uint64_t withstand(
      const Attack& step, const std::function<bool()>& enough = [] { return true; }) {
    std::string layout = GetParam().layout;
    Victims victims(layout.size());
    std::atomic<uint64_t> sent{0}, refused{0};
    std::atomic<int> operations{0}, wrong{0};
    std::thread stranger([&] {
      victims.ready.arrive_and_wait();
      attack(victims, step, sent);
    });
    run_world(layout,
              [&](RankContext& c) {
                CheckedWork work(c);
                victims.addresses[static_cast<size_t>(c.rank)] =
                    c.process.open_fabric()->facts().address;
                ASSERT_TRUE(work.gather(300));  // every pair of ranks has exchanged messages
                if (c.rank == 0) {
                  RankInfo first = decode<RankInfo>(c.store.written["rank_info/0"]).value();
                  victims.key = first.key;
                  victims.message_key = message_key(first.drawn, first.key);
                }
                victims.ready.arrive_and_wait();
                bool good = true;
                // All ranks do the same number of turns: the first tells the others when to stop.
                std::vector<int> more(1, 1), all(static_cast<size_t>(c.ranks));
                for (uint64_t until = now_ns() + static_cast<uint64_t>(attack_seconds() * 1e9);
                     good && more[0] == 1;) {
                  good = work.gather(300) && work.gather(9000) && work.gather(120'000) &&
                         work.gather(600'000) && work.reduce(5000) && work.reduce(700'000) &&
                         (work.turn % 5 != 0 || work.gather_in_new_group());
                  more[0] = now_ns() < until || !enough() ? 1 : 0;
                  good = good && c.run(gather_of(more, all, c.ranks)).ok();
                  more[0] = all[0];
                }
                EXPECT_TRUE(may_end_so(work.failure)) << work.failure;
                operations += work.operations;
                wrong += work.wrong;
                refused += c.process.refused();
              },
              {.timeout_seconds = 20});
    victims.over = true;
    stranger.join();
    EXPECT_EQ(wrong, 0) << "of " << operations << " operations";
    EXPECT_GT(sent, 0u);
    std::printf("%d operations, %d wrong; %llu sent by the stranger, %llu refused\n",
                operations.load(), wrong.load(), static_cast<unsigned long long>(sent.load()),
                static_cast<unsigned long long>(refused.load()));
    return refused;
  }
};

INSTANTIATE_TEST_SUITE_P(Providers, UnderAttack,
                         testing::Values(Setting{"tcp;ofi_rxm", "AB"},
                                         Setting{"tcp;ofi_rxm", "AAB"}, Setting{"tcp", "AB"},
                                         Setting{"tcp", "AAB"}, Setting{"udp;ofi_rxd", "AB"}),
                         [](const auto& param) {
                           std::string name =
                               std::string(param.param.provider) + "_" + param.param.layout;
                           for (char& c : name) c = c == ';' ? '_' : c;
                           return name;
                         });

template <class T>
T random_value(std::mt19937& random) {
  T value;
  auto* bytes = reinterpret_cast<std::byte*>(&value);
  for (size_t i = 0; i < sizeof value; ++i) bytes[i] = static_cast<std::byte>(random());
  return value;
}

std::vector<std::byte> message_of(const wire::Header& header, const void* payload) {
  std::vector<std::byte> message(sizeof header + header.bytes);
  std::memcpy(message.data(), &header, sizeof header);
  std::memcpy(message.data() + sizeof header, payload, header.bytes);
  return message;
}

// Valid in all but the keyed hash: of the group, between its ranks, of fragments that are under way.
TEST_P(UnderAttack, ForgedMessages) {
  if (crashes_at_messages_) GTEST_SKIP() << kCrash;
  uint64_t refused =
      withstand([](Stranger& stranger, std::mt19937& random, const Victims& victims) {
        uint64_t ranks = victims.addresses.size();
        auto header = random_value<wire::Header>(random);
        header.magic = wire::kMagic;
        header.type = static_cast<wire::Type>(1 + random() % 5);
        if (random() % 4 != 0) header.key = victims.key;
        header.seq = random() % 400;
        header.source = static_cast<uint32_t>(random() % ranks);
        header.target = static_cast<uint32_t>(random() % ranks);
        header.offset = random() % 2 == 0 ? 0 : random() % (1 << 20);
        header.counter = random() % 400;
        auto grant = random_value<wire::Grant>(random);
        header.bytes = header.type == wire::Type::kReady && random() % 2 == 0 ? 0 : sizeof grant;
        stranger.send(message_of(header, &grant));
      });
  EXPECT_GT(refused, 0u);
}

// An abort that was valid once, as far as a receiver can tell: its counter has been used.
TEST_P(UnderAttack, ReplayedMessages) {
  if (crashes_at_messages_) GTEST_SKIP() << kCrash;
  withstand([](Stranger& stranger, std::mt19937&, const Victims& victims) {
    wire::Header header{};
    header.magic = wire::kMagic;
    header.type = wire::Type::kAbort;
    header.key = victims.key;
    header.source = 0;
    header.target = static_cast<uint32_t>(victims.addresses.size() - 1);
    header.bytes = 5;
    header.mac = wire::mac_of(victims.message_key, header, "again");
    stranger.send(message_of(header, "again"));
  });
}

// As the chunks of earlier versions were numbered: region, then chunk.
uint32_t guess(std::mt19937& random) { return (random() % 4) << 20 | random() % 8; }

// As many as a job of dozens of ranks has, each with a message that makes no sense.
TEST_P(UnderAttack, ConnectionsHeldOpen) {
  if (crashes_at_messages_) GTEST_SKIP() << kCrash;
  std::vector<std::unique_ptr<Stranger>> held;
  std::atomic<size_t> connections{0};
  auto step = [&](Stranger& stranger, std::mt19937& random, const Victims& victims) {
    std::vector<std::byte> nonsense(1 + random() % 300, std::byte{0x33});
    if (held.size() < 40) {
      held.push_back(
          std::make_unique<Stranger>(victims.addresses[random() % victims.addresses.size()]));
      if (held.back()->works()) held.back()->send(nonsense);
      connections = held.size();
    }
    for (auto& each : held) each->progress();
    stranger.send(nonsense);
  };
  withstand(step, [&] { return connections > 10; });
}

// Regions and chunks have small numbers, which a stranger can guess. A write without bytes opens no memory,
// so that no key is needed for it.
TEST_P(UnderAttack, WritesWithoutBytes) {
  if (std::string(GetParam().provider) == "udp;ofi_rxd") {
    GTEST_SKIP() << "libfabric 1.17 crashes in the stranger's own call";
  }
  uint64_t refused = withstand([](Stranger& stranger, std::mt19937& random, const Victims&) {
    for (int i = 0; i < 16; ++i) stranger.write_nothing(guess(random));
  });
  EXPECT_GT(refused, 0u) << "they are counted";
}

// The provider refuses these, and breaks the stranger's connection.
TEST_P(UnderAttack, WritesByGuessedKeys) {
  withstand([](Stranger& stranger, std::mt19937& random, const Victims&) {
    stranger.write(guess(random), 4096, random() % 8, random() % 64);
  });
}

}  // namespace
}  // namespace smddp
