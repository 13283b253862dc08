// What the flight recorder keeps of operations, and what a group says of itself.
#include "recorder/flight_recorder.h"

#include <thread>

#include "common/clock.h"
#include "world.h"

namespace smddp {
namespace {

using recorder::FlightRecorder;
using recorder::Mark;
using recorder::Record;
using recorder::State;

TEST(FlightRecorder, KeepsTheLatestInTheOrderOfTheirCalls) {
  FlightRecorder ring(3);
  std::vector<Mark> marks;
  for (uint64_t i = 1; i <= 5; ++i) marks.push_back(ring.begin({.sequence = i, .called_ns = i}));
  for (const Mark& mark : marks) {
    mark.start(7, ring.text("shm"));
    mark.end(9, true);
  }
  std::vector<Record> records = ring.records();
  ASSERT_EQ(records.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(records[i].id, i + 3);
    EXPECT_EQ(records[i].call.sequence, i + 3);
    EXPECT_EQ(records[i].state, State::kDone);
    EXPECT_EQ(records[i].first_byte_ns, 9u);
    EXPECT_EQ(ring.text(records[i].path), "shm");
  }
}

TEST(FlightRecorder, ForgottenOperationsChangeNothing) {
  FlightRecorder ring(1), none(0);
  Mark old = ring.begin({.sequence = 1}), fresh = ring.begin({.sequence = 2});
  old.start(5, 1);
  old.end(6, false);
  Record record = ring.records().at(0);
  EXPECT_EQ(record.call.sequence, 2u);
  EXPECT_EQ(record.state, State::kQueued);
  none.begin({.sequence = 1}).end(1, true);
  Mark().end(1, true);
  EXPECT_TRUE(none.records().empty());
}

TEST(FlightRecorder, TextsHaveOneNumberEach) {
  FlightRecorder ring(1);
  recorder::Text a = ring.text("layer 1"), b = ring.text("layer 2");
  EXPECT_NE(a, b);
  EXPECT_EQ(ring.text("layer 1"), a);
  EXPECT_EQ(ring.text(b), "layer 2");
  EXPECT_EQ(ring.text(""), 0u);
}

TEST(FlightRecorder, LabelsAreTheThreadsOwn) {
  FlightRecorder ring(2);
  FlightRecorder::set_label(ring.text("here"));
  std::thread([&] { ring.begin({}); }).join();
  ring.begin({});
  FlightRecorder::set_label(0);
  EXPECT_EQ(ring.text(ring.records()[0].label), "");
  EXPECT_EQ(ring.text(ring.records()[1].label), "here");
}

// What two writers of one entry may leave.
TEST(FlightRecorder, AnEntryWithPartsOfTwoOperationsIsNotRead) {
  recorder::Entry slot;
  Record record;
  EXPECT_FALSE(read(slot, &record)) << "it had no operation yet";
  write(slot, 5,
        {.group = 1, .operation = 2, .dtype = 3, .sequence = 4, .bytes = 6, .called_ns = 7}, 8);
  ASSERT_TRUE(read(slot, &record));
  EXPECT_EQ(record.id, 5u);
  EXPECT_EQ(record.call.bytes, 6u);
  EXPECT_EQ(record.label, 8u);
  EXPECT_EQ(record.state, State::kQueued);
  auto is_left_out_with = [&](auto& field, auto value) {
    auto before = field.exchange(value);
    bool left_out = !read(slot, &record);
    field = before;
    return left_out;
  };
  for (auto* field : {&slot.sequence, &slot.bytes, &slot.called_ns})
    EXPECT_TRUE(is_left_out_with(*field, field->load() + 1));
  for (auto* field : {&slot.group, &slot.operation, &slot.dtype, &slot.label})
    EXPECT_TRUE(is_left_out_with(*field, field->load() + 1));
  EXPECT_TRUE(is_left_out_with(slot.state, recorder::Entry::tagged(4, State::kDone)));
  EXPECT_TRUE(is_left_out_with(slot.id, uint64_t{6}));
  EXPECT_TRUE(is_left_out_with(slot.id, recorder::Entry::kPassing));
  EXPECT_TRUE(read(slot, &record));
}

// Each operation's fields are equal: a reader that mixes two of them sees that they differ. Even ones are done.
// In a ring of one entry, the writers are in it together all the time.
void check_that_operations_stay_apart(size_t entries) {
  FlightRecorder ring(entries);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (uint64_t w = 0; w < 2; ++w) {
    writers.emplace_back([&, w] {
      for (uint64_t i = w + 1; !stop; i += 2) {
        Mark mark = ring.begin(
            {.group = static_cast<recorder::Text>(i), .sequence = i, .bytes = i, .called_ns = i});
        if (i % 2 == 0) mark.end(i, true);
        if (i % 64 == w) std::this_thread::yield();
      }
    });
  }
  size_t seen = 0;
  for (uint64_t until = now_ns() + 300'000'000; now_ns() < until;) {
    for (const Record& r : ring.records()) {
      ++seen;
      ASSERT_EQ(r.call.sequence, r.call.bytes);
      ASSERT_EQ(r.call.sequence, r.call.called_ns);
      ASSERT_EQ(static_cast<recorder::Text>(r.call.sequence), r.call.group);
      ASSERT_TRUE(r.state == State::kQueued || r.call.sequence % 2 == 0);
    }
    std::this_thread::yield();
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  EXPECT_GT(seen, 0u);
}

TEST(FlightRecorder, ReadersNeverSeePartsOfTwoOperations) {
  check_that_operations_stay_apart(1);
  check_that_operations_stay_apart(4);
}

// The records of the group `name` of this process.
std::vector<Record> records_of(const std::string& name) {
  FlightRecorder& recorder = FlightRecorder::process();
  std::vector<Record> found;
  for (const Record& record : recorder.records()) {
    if (recorder.text(record.call.group) == name) found.push_back(record);
  }
  return found;
}

TEST(GroupRecords, SayWhenAnOperationWasCalledStartedAndEnded) {
  run_world("AAB", [](RankContext& c) {
    std::vector<float> in(1 << 20, 1.0f), out(3 << 20);
    ASSERT_TRUE(c.run(gather_of(in, out, c.ranks)).ok());
    EXPECT_EQ(c.group.state().complete, 1u);
    EXPECT_FALSE(c.group.state().oldest);
  });
  std::vector<Record> records = records_of("test");
  ASSERT_EQ(records.size(), 3u);
  FlightRecorder& recorder = FlightRecorder::process();
  for (const Record& r : records) {
    EXPECT_EQ(recorder.text(r.call.operation), "all_gather");
    EXPECT_EQ(r.call.sequence, 1u);
    EXPECT_EQ(r.call.bytes, 12u << 20);
    EXPECT_TRUE(says(recorder.text(r.path), "fabric"));
    EXPECT_EQ(r.state, State::kDone);
    EXPECT_LE(r.call.called_ns, r.started_ns);
    EXPECT_LE(r.started_ns, r.first_byte_ns);
    EXPECT_LT(r.first_byte_ns, r.ended_ns) << "the first of 12 MiB comes before the last";
  }
}

TEST(GroupConnections, SayWhetherARankWasContactedAndWhenItsLastMessageCame) {
  using In = Connection::State;
  std::atomic<int> looked{0};
  run_world("AAB", [&](RankContext& c) {
    EXPECT_TRUE(c.group.state().connections.empty()) << "they cost a look at each process";
    for (const Connection& to : c.group.state(true).connections) {
      bool local = (to.rank < 2) == (c.rank < 2);
      EXPECT_EQ(to.state, local ? In::kConnected : In::kNew) << c.rank << " to " << to.rank;
      EXPECT_FALSE(to.last_message_ns);
    }
    for (++looked; looked < 3;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::vector<float> in(1 << 20, 1.0f), out(3 << 20);
    ASSERT_TRUE(c.run(gather_of(in, out, c.ranks)).ok());
    size_t connected = 0;
    for (const Connection& to : c.group.state(true).connections) {
      connected += to.state == In::kConnected;
      if (to.path == "shared memory") continue;
      EXPECT_TRUE(says(to.path, " on "));
      EXPECT_EQ(to.why, "");
      EXPECT_EQ(to.last_message_ns.has_value(), to.state == In::kConnected);
      EXPECT_LT(to.last_message_ns.value_or(0), 100'000'000'000u);
    }
    EXPECT_GE(connected, 1u);
  });
}

// Rank 2 has called nothing: ranks 0 and 1 say that they wait for it, while they do and once it has broken.
TEST(GroupRecords, SayWhoIsAwaited) {
  std::atomic<int> ready{0};
  run_world("AAB",
            [&](RankContext& c) {
              if (c.rank == 2) {
                while (ready < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                GroupState idle = c.group.state();
                EXPECT_EQ(idle.submitted, 0u);
                EXPECT_EQ(idle.hosts, (std::vector<std::string>{"host-A", "host-A", "host-B"}));
                return;
              }
              std::vector<float> in(100, 1.0f), out(300);
              auto op = gather_of(in, out, c.ranks);
              c.group.submit(op, {}, false);
              auto check = [&] {
                GroupState state = c.group.state();
                ASSERT_TRUE(state.oldest);
                EXPECT_EQ(state.oldest->sequence, 1u);
                bool awaits = false;
                for (const AwaitedRank& awaited : state.oldest->awaited)
                  awaits |= awaited.rank == 2;
                if (c.rank == 0) EXPECT_TRUE(awaits) << "rank 0 is the one that rank 2 sends to";
                EXPECT_EQ(state.submitted, 1u);
                EXPECT_EQ(state.complete, 0u);
              };
              c.engine.wait(*op, std::chrono::milliseconds(300));
              check();
              ++ready;
              c.engine.wait(*op);
              EXPECT_EQ(op->status().code() == Code::kOk, false);
              check();
            },
            {.timeout_seconds = 2});
  std::vector<Record> records = records_of("test");
  ASSERT_GE(records.size(), 2u);
  for (size_t i = records.size() - 2; i < records.size(); ++i)
    EXPECT_EQ(records[i].state, State::kFailed);
}

}  // namespace
}  // namespace smddp
