// One rank of the core, without torch, that runs collectives in turns (see turns.h).
//
//     RANK=0 WORLD_SIZE=2 SMDDP_HOST_ID=a core_collectives PIPES STORE [shared|async|coded]
//
// PIPES is the directory with the named pipes of all ranks, STORE an empty directory that all ranks
// can read and write. With `shared` the buffers lie in memory that the ranks of a host share. With `async` no
// thread waits in the engine: its background thread carries each call out, and the caller sleeps meanwhile. With
// `coded` data is coded between hosts where that pays.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "file_store.h"
#include "group/group.h"
#include "intranode/arena.h"
#include "turns.h"

namespace smddp {
namespace {

struct World {
  Engine& engine;
  Group& group;
  Store& store;
  bool async, coded;
  const turn_program* program = nullptr;
  std::unique_ptr<Group> messages[2] = {};  // from the lower half of the ranks, and to it
};

// Wakes a thread that sleeps on it, outside the engine.
class Noticed : public Operation {
 public:
  void sleep_until_over() { over_.wait(false); }

 private:
  void on_complete() override {
    Operation::on_complete();
    over_ = true;
    over_.notify_one();
  }
  std::atomic<bool> over_{false};
};

// Adds the block of every rank: an extent per tensor, in a buffer that holds tensor after tensor.
void add_parts(Blocks& blocks, const turn_case& what, int ranks) {
  size_t size = turn_size_of(what.dtype);
  for (int r = 0; r < ranks; ++r) {
    auto* at = static_cast<std::byte*>(what.whole);
    for (size_t t = 0; t < what.tensors; ++t) {
      size_t bytes = what.counts[t] * size;
      blocks.add(at + static_cast<size_t>(r) * bytes, bytes);
      at += static_cast<size_t>(ranks) * bytes;
    }
    blocks.end_block();
  }
}

void add_part(Blocks& blocks, const turn_case& what) {
  auto* at = static_cast<std::byte*>(what.part);
  for (size_t t = 0; t < what.tensors; ++t) {
    size_t bytes = what.counts[t] * turn_size_of(what.dtype);
    blocks.add(at, bytes);
    at += bytes;
  }
  blocks.end_block();
}

std::shared_ptr<Noticed> operation_of(const turn_case& what, int ranks) {
  auto op = std::make_shared<Noticed>();
  op->element_size = turn_size_of(what.dtype);
  op->digest = what.count;
  op->dtype = what.dtype == TURN_FP32 ? Dtype::kFloat32 : Dtype::kBFloat16;
  op->tensors = static_cast<uint32_t>(what.tensors);
  if (what.op == TURN_ALL_GATHER || what.op == TURN_ALL_GATHER_64) {
    op->collective = Collective::kAllGather;
    add_part(op->input, what);
    add_parts(op->output, what, ranks);
    return op;
  }
  op->reduce_op = ReduceOp::kSum;
  add_parts(op->input, what, ranks);
  if (what.op == TURN_REDUCE_SCATTER) {
    op->collective = Collective::kReduceScatter;
    add_part(op->output, what);
  } else {
    op->collective = Collective::kAllReduce;
    op->output = op->input;
  }
  return op;
}

int fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  return 1;
}

int finish(World& world, Group& group, const std::shared_ptr<Noticed>& op) {
  Tuning tuning;
  if (world.coded) tuning.coding = Coding::kAuto;
  group.submit(op, tuning, world.async);
  if (world.async) op->sleep_until_over();
  world.engine.wait(*op);  // for a moment, if it is over
  return op->status().ok() ? 0 : fail(op->status().message());
}

// As csrc/torch/point_to_point.cc does it: a group of two for each direction.
int message(World& world, const turn_case& what) {
  const turn_program& program = *world.program;
  const bool sends = turn_sends(&program, what.calls);
  const bool upwards = sends == (2 * program.rank < program.ranks);
  std::unique_ptr<Group>& group = world.messages[upwards ? 0 : 1];
  if (!group) {
    const Rank partner = turn_partner(&program);
    std::vector<Rank> pair{std::min(program.rank, partner), std::max(program.rank, partner)};
    const std::string label = "message/" + std::to_string(pair[0]) + (upwards ? "/up" : "/down");
    if (!upwards) std::swap(pair[0], pair[1]);
    Status made = world.group.subgroup(world.store, label, pair, false).into(group);
    if (!made) return fail(made.message());
  }
  auto op = std::make_shared<Noticed>();
  op->collective = sends ? Collective::kSend : Collective::kReceive;
  op->root = 1;
  op->element_size = turn_size_of(what.dtype);
  const size_t bytes = what.count * op->element_size * static_cast<size_t>(program.ranks);
  Blocks& other = sends ? op->output : op->input;
  other.end_block();
  other.end_block();
  Blocks& mine = sends ? op->input : op->output;
  if (sends) mine.end_block();
  mine.add(what.whole, bytes);
  mine.end_block();
  if (!sends) mine.end_block();
  return finish(world, *group, op);
}

int call(void* context, const turn_case* what) {
  auto& world = *static_cast<World*>(context);
  if (what->op == TURN_MESSAGE) return message(world, *what);
  return finish(world, world.group, operation_of(*what, world.group.ranks()));
}

// A rank leaves when it has a byte of every rank.
int barrier(void* context) {
  auto& world = *static_cast<World*>(context);
  auto ranks = static_cast<size_t>(world.group.ranks());
  std::vector<std::byte> bytes(ranks + 1);
  auto op = std::make_shared<Noticed>();
  op->collective = Collective::kBarrier;
  op->input.add(&bytes[ranks], 1);
  op->input.end_block();
  for (size_t r = 0; r < ranks; ++r) {
    op->output.add(&bytes[r], 1);
    op->output.end_block();
  }
  return finish(world, world.group, op);
}

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : -1;
}

void* map_shared(void*, turn_op, turn_buffer, size_t bytes) {
  return intranode::Arena::process().allocate(bytes);
}

void unmap_shared(void*, turn_op, turn_buffer, void* at, size_t) {
  intranode::Arena::process().free(at);
}

int run(const char* pipes, const char* directory, const std::string& mode) {
  int rank = number("RANK"), ranks = number("WORLD_SIZE");
  if (rank < 0 || ranks <= rank)
    return fail("RANK and WORLD_SIZE must hold this rank and the number of ranks");
  auto process = Process::create();
  if (!process.ok()) return fail(process.status().message());
  FileStore store(directory, std::chrono::seconds(120));
  Group::Options options;
  options.name = "benchmark";
  options.timeout_ns = 120'000'000'000ull;
  auto group = Group::create(*process.value(), store, rank, ranks, options);
  if (!group.ok()) return fail(group.status().message());
  World world{process.value()->engine(), *group.value(), store, mode == "async", mode == "coded"};
  bool shared = mode == "shared";
  turn_program program{rank,
                       ranks,
                       "core",
                       &world,
                       call,
                       barrier,
                       shared ? map_shared : nullptr,
                       shared ? unmap_shared : nullptr};
  world.program = &program;
  int status = turn_serve(&program, pipes);
  for (auto& messages : world.messages) messages.reset();
  group.value().reset();
  return status;
}

}  // namespace
}  // namespace smddp

int main(int argc, char** argv) {
  std::string mode = argc == 4 ? argv[3] : "";
  if (argc != 3 && mode != "shared" && mode != "async" && mode != "coded")
    return smddp::fail("usage: core_collectives PIPES STORE [shared|async|coded]");
  return smddp::run(argv[1], argv[2], mode);
}
