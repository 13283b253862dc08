// Providers that need hardware (efa, verbs), over a stubbed libfabric.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "fabric_flow.h"
#include "stub_fabric.h"

namespace smddp::ofi {
namespace {

using Lines = std::vector<std::string>;

class Stubbed : public testing::Test {
 protected:
  void SetUp() override {
    void* library = ::dlopen(STUB_FABRIC, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << ::dlerror();
    auto find = reinterpret_cast<stub::State* (*)()>(::dlsym(library, "stub_state"));
    ASSERT_NE(find, nullptr);
    stub_ = find();
    *stub_ = {};
  }
  void TearDown() override {
    EXPECT_EQ(stub_->violations, Lines());
    EXPECT_EQ(stub_->objects, 0u) << "left open";
  }
  TestEndpoint open_endpoint(uint32_t id, const std::string& interface = "", bool gpus = false) {
    return ofi::open_endpoint(id, {STUB_FABRIC, "", interface, "", gpus});
  }
  // As the provider pins pages, memory of the caller stays registered only while it is used.
  void exchange(TestEndpoint& a, TestEndpoint& b) {
    const size_t own = stub_->registrations;
    ofi::exchange(a, b);
    EXPECT_EQ(stub_->registrations, own);
    EXPECT_GT(a.endpoint->counters().registrations, 0u);
    EXPECT_GT(stub_->overtaken, 50u) << "all came in order";
    EXPECT_GT(stub_->busy, 50u);
  }

  stub::State* stub_ = nullptr;
};

TEST_F(Stubbed, SetUpInTheOrderThatEfaAsksFor) {
  stub_->settings.domains = {"rdmap0s6-rdm"};
  TestEndpoint a = open_endpoint(0);
  EXPECT_EQ(stub_->calls, (Lines{"fi_endpoint rdmap0s6-rdm", "fi_ep_bind cq", "fi_ep_bind av",
                                 "fi_setopt FI_OPT_EFA_RNR_RETRY 7",
                                 "fi_getopt FI_OPT_EFA_EMULATED_WRITE", "fi_enable"}));
  EXPECT_TRUE(a.endpoint->facts().writes);
  EXPECT_STREQ(std::getenv("FI_EFA_FORK_SAFE"), "1");
  EXPECT_STREQ(std::getenv("RDMAV_FORK_SAFE"), "1");
  EXPECT_STREQ(std::getenv("RDMAV_HUGEPAGES_SAFE"), "1");
}

TEST_F(Stubbed, WithEmulatedWritesThereAreOnlyMessages) {
  stub_->settings.emulates_writes = true;
  EXPECT_FALSE(open_endpoint(0).endpoint->facts().writes);
  auto wanted = Endpoint::open({STUB_FABRIC, "", "", "writes"});
  ASSERT_FALSE(wanted.ok());
  EXPECT_TRUE(says(wanted.status(), "transfer of SMDDP_DEBUG"));
}

TEST_F(Stubbed, LibraryTooOldToSayWhetherWritesAreEmulated) {
  stub_->settings.knows_efa_options = false;
  EXPECT_FALSE(open_endpoint(0).endpoint->facts().writes);
}

TEST_F(Stubbed, MessagesOnly) {
  stub_->settings.messages_only = true;
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  EXPECT_FALSE(a.endpoint->facts().writes);
  ofi::exchange(a, b);
}

TEST_F(Stubbed, UnknownTransfer) {
  auto endpoint = Endpoint::open({STUB_FABRIC, "", "", "pigeons"});
  ASSERT_FALSE(endpoint.ok());
  EXPECT_EQ(endpoint.status().code(), Code::kInvalid);
  EXPECT_TRUE(says(endpoint.status(), "'pigeons'"));
}

TEST_F(Stubbed, WritesOutOfOrderOverAllNics) {
  stub_->settings.domains = {"rdmap16s27-rdm", "rdmap0s6-rdm", "rdmap0s7-rdm"};
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  EXPECT_TRUE(a.endpoint->facts().description.starts_with(
      "efa on rdmap0s6-rdm, rdmap0s7-rdm, rdmap16s27-rdm, libfabric"))
      << a.endpoint->facts().description;
  exchange(a, b);
  uint64_t all =
      std::accumulate(stub_->bytes_of_domain.begin(), stub_->bytes_of_domain.end(), uint64_t{0});
  for (uint64_t bytes : stub_->bytes_of_domain) EXPECT_GT(bytes, all / 4);
}

TEST_F(Stubbed, OneNicMeetsThree) {
  stub_->settings.domains = {"a", "b", "c"};
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1, "b");
  EXPECT_TRUE(b.endpoint->facts().description.starts_with("efa on b, libfabric"));
  exchange(a, b);
}

// The provider may let a message overtake a write: so a chunk is told of once it has been delivered.
TEST_F(Stubbed, WritesOfAProviderWithoutOrderCompleteWhenTheyAreDelivered) {
  EXPECT_FALSE(open_endpoint(0).endpoint->facts().ordered);
  stub_->settings.orders_messages = true;
  EXPECT_FALSE(open_endpoint(0).endpoint->facts().ordered) << "over two NICs";
  stub_->settings.domains = {"a"};
  EXPECT_TRUE(open_endpoint(0).endpoint->facts().ordered);
}

// A provider for which FI_RX_CQ_DATA has to be offered.
TEST_F(Stubbed, ImmediateDataMayTakeAReceive) {
  stub_->settings.provider = "verbs;ofi_rxm";
  stub_->settings.domains = {"mlx5_0", "mlx5_1"};
  stub_->settings.consumes_receives = true;
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  EXPECT_TRUE(a.endpoint->facts().writes);
  exchange(a, b);
}

// A stranger's writes with immediate data take receives, which must come back.
TEST_F(Stubbed, WritesOfAStrangerLeaveAllReceives) {
  stub_->settings.provider = "verbs;ofi_rxm";
  stub_->settings.domains = {"mlx5_0"};
  for (bool consumes : {true, false}) {
    stub_->settings.consumes_receives = consumes;
    TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
    Peer to_b = introduce(a, b);
    stub_->foreign_writes = 1000;
    drive({&a, &b}, [&] { return stub_->foreign_writes == 0; });
    drive({&a, &b}, [&] {
      if (a.sent[to_b] < 100) a.send(to_b, 100);
      return b.inbox.messages == 100;
    });
    EXPECT_EQ(a.endpoint->counters().foreign_writes + b.endpoint->counters().foreign_writes, 1000u);
  }
}

// A message that the provider has refused is soon tried again: the endpoint sleeps for a moment only.
TEST_F(Stubbed, MessagesThatWaitShortenTheSleepAndAreFreedWithTheirPeer) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  Peer to_b = introduce(a, b);
  EXPECT_LT(a.endpoint->sleep_limit_ms(), 0);
  stub_->settings.busy_one_in = 1;
  EXPECT_TRUE(a.send(to_b, 100));
  stub_->settings.busy_one_in = UINT_MAX;
  EXPECT_TRUE(a.send(to_b, 100));
  EXPECT_EQ(a.endpoint->counters().messages_sent, 0u) << "the first one goes first";
  stub_->settings.busy_one_in = 1;
  int posted = 2;
  while (a.send(to_b, 100)) ++posted;
  EXPECT_GT(posted, 5);
  EXPECT_FALSE(a.endpoint->idle());
  EXPECT_GT(a.endpoint->sleep_limit_ms(), 0);
  a.endpoint->give_up(to_b, "asked to");
  EXPECT_TRUE(a.endpoint->idle());
  stub_->settings.busy_one_in = 5;
  settle({&a, &b}, kSecond / 100);
  EXPECT_LT(a.endpoint->sleep_limit_ms(), 0);
  Peer again = introduce(a, b);
  for (int i = 0; i < posted; ++i) EXPECT_TRUE(a.send(again, 100)) << i;
  drive({&a, &b}, [&] { return a.endpoint->idle(); });
}

// With several rails, and message buffers of the endpoint's own: no two registrations have one key.
TEST_F(Stubbed, KeysThatTheCallerChoosesCanNotBeGuessed) {
  stub_->settings.provider_keys = false;
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  exchange(a, b);
}

// The same memory sent to many at once is registered once for all of them.
TEST_F(Stubbed, SharesARegistrationWhileItIsUsed) {
  stub_->settings.domains = {"a"};
  stub_->settings.busy_one_in = UINT_MAX;  // each attempt would register anew
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1), c = open_endpoint(2);
  Peer to_b = introduce(a, b), to_c = introduce(a, c);
  Flow one(1000, 1000, 1), two(1000, 1000, 1);
  ASSERT_TRUE(one.open(b, introduce(b, a)));
  ASSERT_TRUE(two.open(c, introduce(c, a)));
  two.source = one.source;
  auto start = [&](Flow& flow, Peer to) {
    while (!a.endpoint->write(to, flow.grant, 0, one.source.data(), 1000, flow.batches.pending())) {
    }
    flow.sent = 1;
  };
  start(one, to_b);
  start(two, to_c);
  EXPECT_EQ(a.endpoint->counters().registrations, 1u);
  EXPECT_GE(a.endpoint->counters().registration_hits, 1u);
  drive({&a, &b, &c}, [&] {
    one.tell(a, to_b);
    two.tell(a, to_c);
    return one.over() && two.over();
  });
}

// Each peer may hold as many buffers as are free, so seven hold all but one of them. The stub refuses
// messages from memory that is not registered.
TEST_F(Stubbed, AllMessageBuffersLieInTheirMemory) {
  TestEndpoint a = open_endpoint(0);
  std::vector<TestEndpoint> others;
  std::vector<MessageBuffer*> held;
  for (uint32_t id = 1; id <= 7; ++id) {
    Peer to = introduce(a, others.emplace_back(open_endpoint(id)));
    for (bool control : {false, true}) {
      while (MessageBuffer* buffer = a.endpoint->acquire(to, control)) {
        write_message(buffer->data, buffer->capacity, {0, a.sent[to]++});
        held.push_back(buffer);
      }
    }
  }
  EXPECT_GT(held.size(), 80u);
  for (MessageBuffer* buffer : held) a.endpoint->post(buffer, buffer->capacity);
  std::vector<TestEndpoint*> all{&a};
  for (TestEndpoint& other : others) all.push_back(&other);
  drive(all, [&] {
    size_t messages = 0;
    for (TestEndpoint& other : others) messages += other.inbox.messages;
    return messages == held.size() && a.endpoint->idle();
  });
}

// If no more memory can be pinned, a chunk waits for those in flight, and a region is refused.
TEST_F(Stubbed, LimitOnPinnedMemory) {
  stub_->settings.domains = {"a"};
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  Flow flow(100 * 5000, 5000, 1), refused(100, 100, 2);
  ASSERT_TRUE(flow.open(b, to_a));
  stub_->settings.pinned_limit = stub_->registrations + 1;
  drive({&a, &b}, [&] {
    flow.send(a, to_b);
    return flow.over();
  });
  stub_->settings.pinned_limit = stub_->registrations;
  EXPECT_FALSE(refused.open(b, to_a));
  EXPECT_TRUE(a.inbox.lost.empty());
}

TEST_F(Stubbed, ErrorCompletionLosesThePeerAndSaysWhy) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1), c = open_endpoint(2);
  Peer to_b = introduce(a, b), to_c = introduce(a, c), c_to_a = introduce(c, a);
  // More than sockets hold: some of it is still to be sent when the first chunks have arrived.
  Flow flow(4000 * 5000, 5000, 1), other(100 * 5000, 5000, 2);
  ASSERT_TRUE(flow.open(b, introduce(b, a)));
  drive({&a, &b}, [&] {
    flow.send(a, to_b);
    // Enough are under way for all failures: none is left for c.
    return flow.arrived > 5 && flow.pending() > 5;
  });
  stub_->fail_operations = 3;
  ASSERT_TRUE(other.open(c, c_to_a));
  drive({&a, &b}, [&] {
    flow.send(a, to_b);
    return flow.pending() == 0 && flow.sent == flow.chunks() && stub_->fail_operations == 0;
  });
  drive({&a, &c}, [&] {
    other.send(a, to_c);
    return other.over();
  });
  ASSERT_EQ(a.inbox.lost.size(), 1u);
  const std::string& why = a.inbox.lost[to_b];
  EXPECT_TRUE(says(why, "the stub's own reason"));
  EXPECT_TRUE(says(why, "efa on rdmap0s"));
  EXPECT_EQ(a.inbox.loss, Code::kPeerLost);
}

TEST_F(Stubbed, AnErrorThatIsALimitOfThisProcessIsToldApart) {
  for (int error : {EMFILE, ENFILE, ENOMEM}) {
    TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
    Peer to_b = introduce(a, b);
    stub_->error = error;
    stub_->fail_operations = 1;
    EXPECT_TRUE(a.send(to_b, 100));
    drive({&a, &b}, [&] { return !a.inbox.lost.empty(); });
    EXPECT_EQ(a.inbox.loss, Code::kUnavailable) << a.inbox.lost[to_b];
  }
}

// ---- memory of GPUs

constexpr MemoryOwner gpu(int ordinal) { return {MemoryOwner::Kind::kCuda, ordinal}; }

class StubbedGpus : public Stubbed {
 protected:
  void SetUp() override {
    Stubbed::SetUp();
    stub_->settings.device_memory = true;
    stub_->settings.domains = {"a", "b", "c"};
  }
  TestEndpoint open_gpu_endpoint(uint32_t id) { return open_endpoint(id, "", true); }
  static void lend(TestEndpoint& user, std::vector<std::byte>& memory, const MemoryOwner& owner) {
    Status lent = user.endpoint->lend(memory.data(), memory.size(), owner);
    EXPECT_TRUE(lent.ok()) << lent.message();
  }
  // Drives the endpoints until all chunks have been written and no flush has begun.
  void write_without_flush(Flow& flow, TestEndpoint& a, TestEndpoint& b, Peer to_b) {
    drive({&a, &b}, [&] {
      flow.send_chunks(a, to_b);
      return flow.sent == flow.chunks() && flow.pending() == 0;
    });
    stub_->settings.busy_one_in = 1;
    flow.on_written(static_cast<uint32_t>(flow.sent));
    EXPECT_FALSE(flow.complete());
    settle({&a, &b}, kSecond / 100);
    EXPECT_FALSE(flow.complete());
    EXPECT_EQ(b.endpoint->sleep_limit_ms(), 1);
  }
};

// In the stub a GPU sees what a NIC has written into its memory only after a read by that NIC.
TEST_F(StubbedGpus, TheLastChunkIsToldAfterAFlushReadByEveryNic) {
  TestEndpoint a = open_gpu_endpoint(0), b = open_gpu_endpoint(1);
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  Flow flow(200 * 5000 + 7, 5000, 1);
  flow.seen_at_once = false;
  lend(a, flow.source, gpu(2));
  lend(b, flow.memory, gpu(5));
  size_t own = stub_->registrations;
  for (int turn = 0; turn < 3; ++turn) {
    flow.reset();
    ASSERT_TRUE(flow.open(b, to_a));
    drive({&a, &b}, [&] {
      flow.send(a, to_b);
      return flow.over() && b.endpoint->idle();
    });
    flow.check_margins();
    flow.close();
  }
  // Lent memory is registered once on each NIC, to send from or to receive into.
  EXPECT_EQ(stub_->registrations, own + 6);
  std::sort(stub_->gpus.begin(), stub_->gpus.end());
  EXPECT_EQ(stub_->gpus, (std::vector<int>{2, 2, 2, 5, 5, 5}));
  a.endpoint->take_back(flow.source.data());
  b.endpoint->take_back(flow.memory.data());
  EXPECT_EQ(stub_->registrations, own);
}

TEST_F(StubbedGpus, ARegistrationThatIsUsedOutlivesTheLoan) {
  TestEndpoint a = open_gpu_endpoint(0), b = open_gpu_endpoint(1);
  Peer to_a = introduce(b, a);
  Flow flow(5000, 5000, 1);
  lend(b, flow.memory, gpu(0));
  size_t own = stub_->registrations;
  ASSERT_TRUE(flow.open(b, to_a));
  size_t used = stub_->registrations;
  EXPECT_EQ(used, own + 3);
  b.endpoint->take_back(flow.memory.data());
  EXPECT_EQ(stub_->registrations, used);
  flow.close();
  EXPECT_EQ(stub_->registrations, own);
}

TEST_F(StubbedGpus, AFlushThatFailsLosesTheSender) {
  TestEndpoint a = open_gpu_endpoint(0), b = open_gpu_endpoint(1);
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  Flow flow(40 * 5000, 5000, 1);
  flow.seen_at_once = false;
  lend(b, flow.memory, gpu(0));
  ASSERT_TRUE(flow.open(b, to_a));
  write_without_flush(flow, a, b, to_b);
  stub_->settings.busy_one_in = 5;
  stub_->fail_operations = 1;
  drive({&a, &b}, [&] { return !b.inbox.lost.empty() && b.endpoint->idle(); });
  EXPECT_TRUE(says(b.inbox.lost[to_a], "could not be flushed"));
  EXPECT_FALSE(flow.complete());
}

TEST_F(StubbedGpus, ARegionMayBeClosedBeforeItIsFlushed) {
  TestEndpoint a = open_gpu_endpoint(0), b = open_gpu_endpoint(1);
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  Flow flow(40 * 5000, 5000, 1), next(40 * 5000, 5000, 2);
  flow.seen_at_once = next.seen_at_once = false;
  lend(b, flow.memory, gpu(0));
  lend(b, next.memory, gpu(0));
  ASSERT_TRUE(flow.open(b, to_a));
  write_without_flush(flow, a, b, to_b);
  flow.close();
  stub_->settings.busy_one_in = 5;
  ASSERT_TRUE(next.open(b, to_a));
  drive({&a, &b}, [&] {
    next.send(a, to_b);
    return next.over() && b.endpoint->idle();
  });
  EXPECT_FALSE(flow.complete());
  // Its sender still knows its key: key and registration stay valid until the endpoint closes.
  b.endpoint->take_back(flow.memory.data());
}

TEST_F(StubbedGpus, OnlyIfTheProviderReachesThemAndMovesChunksByWrites) {
  std::vector<std::byte> memory(4096);
  stub_->settings.device_memory = false;
  TestEndpoint without = open_gpu_endpoint(0);
  Status able = without.endpoint->reaches(gpu(0));
  EXPECT_EQ(able.code(), Code::kUnavailable);
  EXPECT_TRUE(says(able, "FI_HMEM"));
  EXPECT_EQ(without.endpoint->lend(memory.data(), memory.size(), gpu(0)).code(),
            Code::kUnavailable);
  EXPECT_TRUE(without.endpoint->reaches({}).ok());
  stub_->settings.device_memory = true;
  EXPECT_FALSE(open_endpoint(1).endpoint->reaches(gpu(0)).ok()) << "was not asked for";
  EXPECT_TRUE(open_gpu_endpoint(1).endpoint->reaches(gpu(0)).ok());
  stub_->settings.needs_cuda = true;
  EXPECT_FALSE(open_gpu_endpoint(1).endpoint->reaches(gpu(0)).ok());
  stub_->settings.needs_cuda = false;
  stub_->settings.messages_only = true;
  EXPECT_FALSE(open_gpu_endpoint(2).endpoint->reaches({}).ok());
}

}  // namespace
}  // namespace smddp::ofi
