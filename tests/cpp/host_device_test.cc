// The device that threads simulate, and the order in which its users submit.
#include "device/host_device.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "device/recall.h"
#include "device/submission_order.h"
#include "device/unix_sockets.h"
#include "results.h"

namespace smddp {
namespace {

using device::HostDevice;

class Recalls : public testing::Test {
 public:
  Recalls() { device::recall_limit_ms = 500; }
  ~Recalls() override { device::recall_limit_ms = before_; }

 private:
  const int before_ = device::recall_limit_ms;
};

// A process that does not answer, as it is stopped: its mappings hold until it has ended.
TEST_F(Recalls, AProcessThatDoesNotAnswerIsAwaitedOnceAndItsMemoryHeld) {
  using Clock = std::chrono::steady_clock;
  HostDevice owner;
  void* memory[] = {owner.allocate(100).value(), owner.allocate(100).value()};
  device::Allocation a = owner.export_memory(memory[0], 1).value()[0];
  (void)owner.export_memory(memory[1], 1);
  auto silent = value_of(device::connect_to("recalls", a.owner));
  auto began = Clock::now();
  EXPECT_EQ(owner.recall(memory[0], 100), 1u);
  auto first = Clock::now() - began;
  for (int again = 0; again < 20; ++again) EXPECT_EQ(owner.recall(memory[again % 2], 100), 1u);
  EXPECT_GE(first, std::chrono::milliseconds(500));
  EXPECT_LT(Clock::now() - began, 2 * std::chrono::milliseconds(500));
  silent = {};
  EXPECT_EQ(owner.recall(memory[0], 100), 0u);
}

// A process that was late is awaited again once it has answered.
TEST_F(Recalls, AProcessThatAnswersAgainIsAwaitedAgain) {
  auto server = value_of(device::RecallServer::open());
  std::atomic<bool> stopped{true};
  std::atomic<int> forgotten{0};
  device::RecallClient client([&](int, const device::RecalledMemory&) {
    while (stopped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ++forgotten;
  });
  client.follow(getpid(), server->name());
  const device::RecalledMemory memory{1, 1};
  EXPECT_EQ(server->recall({&memory, 1}), 1u);
  stopped = false;
  while (forgotten < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it answers
  EXPECT_EQ(server->recall({&memory, 1}), 0u);
  EXPECT_EQ(forgotten, 2);
}

// More pieces than a socket has room for.
TEST_F(Recalls, ManyPiecesAreRecalledAtOnce) {
  auto server = value_of(device::RecallServer::open());
  std::vector<device::RecalledMemory> pieces, forgotten;
  for (uint64_t i = 0; i < 5000; ++i) pieces.push_back({i, i + 7});
  {
    device::RecallClient client([&](int pid, const device::RecalledMemory& piece) {
      EXPECT_EQ(pid, getpid());
      if (forgotten.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      forgotten.push_back(piece);
    });
    client.follow(getpid(), server->name());
    EXPECT_EQ(server->recall(pieces), 0u);
  }
  EXPECT_EQ(forgotten, pieces);
}

TEST(SubmissionOrder, FollowsTheCallsAndPassesThoseThatCannotStart) {
  device::SubmissionOrder order;
  auto enter = [&order] { return order.enter(0, [] { return false; }); };
  uint64_t first = enter(), second = enter(), third = enter();
  std::atomic<bool> began{false};
  std::thread later([&] {
    order.begin(second);
    began = true;
    order.end(second);
  });
  order.begin(first);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(began);
  order.end(first);
  later.join();
  uint64_t fourth = enter();
  auto from = std::chrono::steady_clock::now();
  order.begin(fourth);  // `third` never begins
  EXPECT_GE(std::chrono::steady_clock::now() - from, std::chrono::milliseconds(900));
  order.end(fourth);
  order.begin(third);
  order.end(third);
}

TEST(SubmissionOrder, FollowsTheLastCallsAndWaitsForNoneToCome) {
  device::SubmissionOrder order;
  order.set_by_last_call(true);
  std::atomic<bool> told{false}, began{false};
  auto late = order.enter(0, [&] { return told.load(); });
  auto first = order.enter(1, [] { return true; }), second = order.enter(2, [] { return true; });
  auto from = std::chrono::steady_clock::now();
  order.set_last_call(second, 10);
  std::thread later([&] {
    order.begin(second);  // once it is known whether `first` comes before it
    began = true;
    order.end(second);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(began);
  order.set_last_call(first, 9);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(began);
  order.begin(first);
  order.end(first);
  later.join();
  EXPECT_LT(std::chrono::steady_clock::now() - from, std::chrono::milliseconds(700));
  told = true;
  order.set_last_call(late, 20);
  order.begin(late);
  order.end(late);
}

TEST(HostDevice, StreamsRunInOrderAndEventsOrderStreams) {
  HostDevice gpu;
  device::Stream a = gpu.create_stream().value(), b = gpu.create_stream().value();
  device::Event event = gpu.create_event().value();
  auto* memory = static_cast<uint32_t*>(gpu.allocate(64).value());
  memory[0] = 0;
  EXPECT_TRUE(gpu.done(event).value());  // nothing recorded yet
  uint32_t gate = 0;
  std::vector<uint32_t> one(4, 1);
  ASSERT_TRUE(gpu.wait_flag(a, &gate, 1).ok());
  ASSERT_TRUE(gpu.copy(a, memory, one.data(), 16).ok());
  ASSERT_TRUE(gpu.record(event, a).ok());
  ASSERT_TRUE(gpu.wait(b, event).ok());
  ASSERT_TRUE(gpu.copy(b, memory + 4, memory, 16).ok());
  EXPECT_FALSE(gpu.done(event).value());
  EXPECT_EQ(memory[0], 0u);
  std::atomic_ref(gate).store(1);
  ASSERT_TRUE(gpu.synchronize(b).ok());
  EXPECT_TRUE(gpu.done(event).value());
  EXPECT_EQ(memory[4], 1u);
  gpu.destroy_event(event);
  gpu.destroy_stream(a);
  gpu.destroy_stream(b);
}

TEST(HostDevice, CopiesAndSumsLastAsLongAsTheyAreSetTo) {
  constexpr std::chrono::milliseconds kEach(20);
  HostDevice gpu;
  device::Stream stream = gpu.create_stream().value();
  auto* memory = static_cast<float*>(gpu.allocate(64).value());
  const float values[5] = {1, 2, 3, 4, 5};
  gpu.set_duration(kEach);
  auto began = std::chrono::steady_clock::now();
  ASSERT_TRUE(gpu.copy(stream, memory, values, sizeof values).ok());
  kernels::Reduction twice;
  twice.destination = memory + 5;
  twice.sources[0] = twice.sources[1] = memory;
  twice.sources_count = 2;
  twice.count = 5;
  ASSERT_TRUE(gpu.reduce(stream, twice).ok());
  ASSERT_TRUE(gpu.synchronize(stream).ok());
  EXPECT_GE(std::chrono::steady_clock::now() - began, 2 * kEach);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(memory[i], values[i]);
    EXPECT_EQ(memory[i + 5], 2 * values[i]);
  }
  gpu.destroy_stream(stream);
}

TEST(HostDevice, CopiesOfABatchRunInAnyOrderAndNotInARecording) {
  HostDevice gpu;
  device::Stream stream = gpu.create_stream().value();
  auto* memory = static_cast<uint32_t*>(gpu.allocate(64).value());
  memory[0] = 1;
  memory[1] = 2;
  std::atomic<int> turn{0}, first{0}, second{0};
  gpu.set_gate([&](const void* to, const void*) {
    (to == memory + 4 ? first : second) = ++turn;
    return true;
  });
  HostDevice::Copy copies[] = {{memory + 4, memory, 4}, {memory + 5, memory + 1, 4}};
  ASSERT_TRUE(gpu.copies(stream, copies).ok());
  ASSERT_TRUE(gpu.synchronize(stream).ok());
  EXPECT_EQ(memory[4], 1u);
  EXPECT_EQ(memory[5], 2u);
  EXPECT_GT(first, second);
  ASSERT_TRUE(gpu.begin_recording(stream).ok());
  EXPECT_FALSE(gpu.copies(stream, copies).ok());
  EXPECT_TRUE(gpu.one_by_one(stream, copies).ok());
  ASSERT_TRUE(gpu.end_recording(stream).ok());
  gpu.destroy_stream(stream);
}

// The rules of CUDA's stream capture.
TEST(HostDevice, RecordsWhatJoinsARecordingAndRefusesTheRest) {
  HostDevice gpu;
  device::Stream a = gpu.create_stream().value(), b = gpu.create_stream().value();
  device::Stream c = gpu.create_stream().value();
  device::Event event = gpu.create_event().value(), back = gpu.create_event().value();
  auto* memory = static_cast<uint32_t*>(gpu.allocate(64).value());
  memory[0] = 0;
  ASSERT_TRUE(gpu.record(back, b).ok());
  ASSERT_TRUE(gpu.begin_recording(a).ok());
  EXPECT_FALSE(gpu.wait(a, back).ok());  // recorded outside
  EXPECT_FALSE(gpu.synchronize(a).ok());
  ASSERT_TRUE(gpu.record(event, a).ok());
  EXPECT_FALSE(gpu.done(event).ok());
  ASSERT_TRUE(gpu.wait(b, event).ok());
  EXPECT_TRUE(gpu.capturing(b).value());
  EXPECT_FALSE(gpu.capturing(c).value());
  ASSERT_TRUE(gpu.begin_recording(c).ok());
  EXPECT_FALSE(gpu.wait(c, event).ok());  // of another recording
  ASSERT_TRUE(gpu.end_recording(c).ok());
  ASSERT_TRUE(gpu.write_flag(b, memory, 5).ok());
  EXPECT_FALSE(gpu.end_recording(a).ok());  // `b` has not joined again
  EXPECT_FALSE(gpu.capturing(b).value());

  ASSERT_TRUE(gpu.begin_recording(a).ok());
  ASSERT_TRUE(gpu.record(event, a).ok());
  ASSERT_TRUE(gpu.wait(b, event).ok());
  ASSERT_TRUE(gpu.write_flag(b, memory, 5).ok());
  ASSERT_TRUE(gpu.record(back, b).ok());
  ASSERT_TRUE(gpu.wait(a, back).ok());
  auto graph = value_of(gpu.end_recording(a));
  EXPECT_EQ(memory[0], 0u);
  ASSERT_TRUE(gpu.launch(graph, c).ok());
  ASSERT_TRUE(gpu.synchronize(c).ok());
  EXPECT_EQ(memory[0], 5u);
  for (device::Stream stream : {a, b, c}) gpu.destroy_stream(stream);
  for (device::Event each : {event, back}) gpu.destroy_event(each);
}

TEST(HostDevice, TheWorkOfADestroyedStreamGoesOn) {
  HostDevice gpu;
  auto* at = static_cast<std::byte*>(gpu.allocate(8192).value());
  at[0] = std::byte{42};
  device::Stream first = gpu.create_stream().value(), second = gpu.create_stream().value();
  device::Event copied = gpu.create_event().value();
  gpu.set_duration(std::chrono::milliseconds(20));
  ASSERT_TRUE(gpu.copy(first, at + 4096, at, 4096).ok());
  ASSERT_TRUE(gpu.record(copied, first).ok());
  gpu.destroy_stream(first);
  ASSERT_TRUE(gpu.wait(second, copied).ok());
  gpu.destroy_event(copied);
  ASSERT_TRUE(gpu.synchronize(second).ok());
  EXPECT_EQ(at[4096], std::byte{42});
  gpu.destroy_stream(second);
}

TEST(HostDevice, AStreamThatWaitsHoldsUpTheOthersOfItsHardwareQueue) {
  HostDevice gpu;
  std::vector<device::Stream> streams;
  for (size_t i = 0; i < device::HostDevice::kQueues + 1; ++i)
    streams.push_back(gpu.create_stream().value());
  uint32_t gate = 0, beside = 0, behind = 0;
  ASSERT_TRUE(gpu.wait_flag(streams.front(), &gate, 1).ok());
  ASSERT_TRUE(gpu.write_flag(streams[1], &beside, 1).ok());
  ASSERT_TRUE(gpu.write_flag(streams.back(), &behind, 1).ok());
  ASSERT_TRUE(gpu.synchronize(streams[1]).ok());
  EXPECT_EQ(beside, 1u);
  EXPECT_EQ(std::atomic_ref(behind).load(), 0u);
  std::atomic_ref(gate).store(1);
  ASSERT_TRUE(gpu.synchronize(streams.back()).ok());
  EXPECT_EQ(behind, 1u);
  for (device::Stream stream : streams) gpu.destroy_stream(stream);
}

}  // namespace
}  // namespace smddp
