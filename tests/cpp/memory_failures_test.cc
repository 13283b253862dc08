// An allocator that fails: every allocation of the core in turn. The operation or the group fails, on all
// ranks and within a moment; the engine goes on, and a new group works.
#include <atomic>
#include <cstdlib>
#include <new>

#include "world.h"

namespace {

// Counts down with each allocation of a thread that is not exempt; the allocation that finds 0 fails, and so
// do the next `in_a_row` - 1.
std::atomic<int64_t> left{INT64_MAX};
std::atomic<int64_t> in_a_row{1};
std::atomic<int64_t> failed{0};
// The tests' own allocations don't fail: threads of the engines are the only ones that are not exempt at
// first.
thread_local int exempt = 0;

void* allocate(size_t size, size_t align) {
  if (exempt == 0 && left.load(std::memory_order_relaxed) != INT64_MAX) {
    int64_t now = left.fetch_sub(1);
    if (now <= 0 && now > -in_a_row) {
      ++failed;
      throw std::bad_alloc();
    }
  }
  void* memory = align <= alignof(std::max_align_t)
                     ? std::malloc(size)
                     : std::aligned_alloc(align, (size + align - 1) / align * align);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t size) { return allocate(size, 0); }
void* operator new[](size_t size) { return allocate(size, 0); }
void* operator new(size_t size, std::align_val_t align) {
  return allocate(size, static_cast<size_t>(align));
}
void* operator new[](size_t size, std::align_val_t align) {
  return allocate(size, static_cast<size_t>(align));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace smddp {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Exempt {
  Exempt() { ++exempt; }
  ~Exempt() { --exempt; }
};
struct NotExempt {
  NotExempt() { --exempt; }
  ~NotExempt() { ++exempt; }
};

// Ranks as threads, whose groups and operations lie apart from the test's own allocations.
struct RankState {
  std::unique_ptr<Process> process;
  std::unique_ptr<Group> group;
  std::vector<int> in, out;
  std::shared_ptr<Operation> op;
};

class Ranks {
 public:
  explicit Ranks(const std::string& layout) : layout_(layout), ranks_(layout.size()) {
    for (RankState& rank : ranks_) rank.process = std::move(Process::create().value());
  }
  size_t size() const { return ranks_.size(); }
  RankState& operator[](size_t i) { return ranks_[i]; }

  // Calls f(i) on a thread for each rank, exempt.
  template <class F>
  void each(F&& f) {
    on_threads(static_cast<int>(ranks_.size()), [&](int rank) {
      Exempt here;
      f(static_cast<size_t>(rank));
    });
  }
  void make_groups(MemoryStore& store) {
    each([&](size_t i) {
      Group::Options options{
          .name = "test", .timeout_ns = 20'000'000'000, .host = std::string("host-") + layout_[i]};
      CountingStore view(store, std::to_string(groups_) + "/");
      auto group = Group::create(*ranks_[i].process, view, static_cast<int>(i),
                                 static_cast<int>(ranks_.size()), options);
      ASSERT_TRUE(group.ok()) << group.status().message();
      ranks_[i].group = std::move(group.value());
    });
    ++groups_;
  }
  void prepare(Collective collective, size_t count) {
    auto n = static_cast<int>(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      RankState& rank = ranks_[i];
      bool gathers = collective == Collective::kAllGather;
      // Peers may still write into the memory of an operation that has failed.
      if (rank.op && !rank.op->status()) {
        kept_.push_back(std::move(rank.in));
        kept_.push_back(std::move(rank.out));
      }
      rank.in.assign(gathers ? count : count * ranks_.size(), static_cast<int>(i) + 1);
      rank.out.assign(gathers ? count * ranks_.size() : count, -1);
      rank.op = gathers ? gather_of(rank.in, rank.out, n)
                        : scatter_of(rank.in, rank.out, n, Dtype::kInt32, ReduceOp::kSum);
    }
  }
  void expect_result(size_t i) {
    const RankState& rank = ranks_[i];
    if (rank.op->collective == Collective::kAllGather) {
      for (size_t at = 0; at < rank.out.size(); ++at)
        ASSERT_EQ(rank.out[at], static_cast<int>(at / rank.in.size()) + 1) << at;
    } else {
      auto n = static_cast<int>(ranks_.size());
      for (int value : rank.out) ASSERT_EQ(value, n * (n + 1) / 2);
    }
  }

 private:
  std::string layout_;
  std::vector<RankState> ranks_;
  std::vector<std::vector<int>> kept_;
  int groups_ = 0;
};

struct Case {
  const char* layout;
  Collective collective;
  size_t count;
  int64_t in_a_row;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.layout << " " << name_of(c.collective) << " " << c.count << " x" << c.in_a_row;
}

class FailingAllocator : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, FailingAllocator,
                         testing::Values(Case{"AA", Collective::kAllGather, 1 << 10, 1},
                                         Case{"AA", Collective::kReduceScatter, 1 << 18, 1},
                                         Case{"AB", Collective::kAllGather, 1 << 10, 1},
                                         Case{"AB", Collective::kAllGather, 1 << 18, 1},
                                         Case{"AAB", Collective::kReduceScatter, 1 << 18, 1},
                                         Case{"AB", Collective::kAllGather, 1 << 18, 20},
                                         Case{"AAB", Collective::kReduceScatter, 1 << 18, 100}));

// Fails the n-th allocation of an operation, for all n until it needs no more.
TEST_P(FailingAllocator, EndsTheOperationEverywhereAndTheEngineGoesOn) {
  Exempt test;
  const Case& c = GetParam();
  MemoryStore store;
  Ranks ranks(c.layout);
  ranks.make_groups(store);
  int64_t failures = 0;
  in_a_row = c.in_a_row;
  for (int64_t n = 0, without = 0; n < 400 && without < 5; ++n) {
    ranks.prepare(c.collective, c.count);
    failed = 0;
    left = n;
    ranks.each([&](size_t i) {
      RankState& rank = ranks[i];
      NotExempt core;
      rank.group->submit(rank.op, {}, i == 0);
      ASSERT_TRUE(rank.process->engine().wait(*rank.op, seconds(10))) << "allocation " << n;
    });
    left = INT64_MAX;
    without = failed == 0 ? without + 1 : 0;
    bool broken = false;
    for (size_t i = 0; i < ranks.size(); ++i) {
      Status status = ranks[i].op->status();
      if (status) {
        ranks.expect_result(i);
      } else {
        ++failures;
        EXPECT_TRUE(says(status, "out of memory"));
      }
      broken = broken || !ranks[i].group->status();
    }
    if (HasFatalFailure()) return;
    if (!broken) continue;
    ranks.each([&](size_t i) { ranks[i].group.reset(); });
    ranks.make_groups(store);
  }
  EXPECT_GT(failures, 0);
  ranks.each([&](size_t i) { ranks[i].group.reset(); });
}

// What on_complete() throws becomes the operation's status, on whichever thread it runs.
struct Throwing : Operation {
  void on_complete() override { throw std::bad_alloc(); }
};

TEST(Callbacks, AnExceptionInOneBecomesTheStatusOfItsTask) {
  for (bool background : {false, true}) {
    run_world("AA", [&](RankContext& c) {
      std::vector<int> in(10, c.rank), out(20);
      auto op = std::make_shared<Throwing>();
      static_cast<Operation&>(*op).collective = Collective::kAllGather;
      auto plain = gather_of(in, out, c.ranks);
      op->element_size = plain->element_size;
      op->digest = plain->digest;
      op->input = plain->input;
      op->output = plain->output;
      c.group.submit(op, {}, background);
      for (int i = 0; i < 1000 && background && !op->complete(); ++i)
        std::this_thread::sleep_for(milliseconds(10));
      ASSERT_TRUE(c.engine.wait(*op, seconds(10)));
      EXPECT_EQ(op->status().message(), "out of memory");
      EXPECT_TRUE(c.run(gather_of(in, out, c.ranks)).ok()) << "the group goes on";
    });
  }
}

}  // namespace
}  // namespace smddp
