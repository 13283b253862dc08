// The bare copy: the least cost of a collective inside a host if every rank has mapped the buffers
// of the other ranks. It uses no library; the ranks are forks of one process that share an arena.
//
//     copy_collectives PIPES RANKS
//
// AllGather: every rank copies all parts, also its own, into its output. ReduceScatter: it reads
// its block of every rank's input once, sums in fp32 and writes the result once. AllReduce: the
// same in place, then it copies the blocks of the other ranks. The barriers are those without which
// a call would be wrong: one before the memory of other ranks is read, one before that memory may
// change, and in AllReduce one between its halves.
//
// The buffers of the caller that other ranks read lie in shared memory from the start, which a real
// library cannot assume. The other buffers are ordinary memory, as those of all competitors.
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "turns.h"

namespace {

constexpr size_t kSpan = size_t{1} << 33;  // addresses per rank; only touched pages take memory
constexpr int kMostRanks = 64;

struct alignas(64) Flag {
  std::atomic<uint64_t> reached;  // barriers that the rank has reached
};

struct World {
  int rank, ranks;
  Flag* flags;        // one per rank, shared
  std::byte* arena;   // kSpan per rank, shared
  int polls;          // before the rank yields its processor
  uint64_t barriers;  // so far
};

template <class T>
const T* of_rank(const World& world, int rank) {
  return reinterpret_cast<const T*>(world.arena + static_cast<size_t>(rank) * kSpan);
}

void wait_for_all(World& world) {
  world.flags[world.rank].reached.store(++world.barriers, std::memory_order_release);
  for (int r = 0; r < world.ranks; ++r) {
    for (int polls = 0; world.flags[r].reached.load(std::memory_order_acquire) < world.barriers;) {
      if (++polls < world.polls) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        sched_yield();
        polls = 0;
      }
    }
  }
}

// --- sums ----------------------------------------------------------------------------------------

struct Bf16 {
  uint16_t bits;
};

float widen(float x) { return x; }
float widen(Bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
void narrow(float x, float* to) { *to = x; }
void narrow(float x, Bf16* to) {  // to the nearest, ties to even
  auto u = std::bit_cast<uint32_t>(x);
  to->bits = static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// `to` may be one of the inputs: each element is read before it is written.
template <int kRanks, class T>
void sum_of(const T* const* inputs, T* to, size_t count) {
  std::array<const T*, kRanks> in;
  for (int r = 0; r < kRanks; ++r) in[r] = inputs[r];
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    float sum = widen(in[0][i]);
    for (int r = 1; r < kRanks; ++r) sum += widen(in[r][i]);
    narrow(sum, to + i);
  }
}

template <class T>
void sum_of_any(const T* const* inputs, int ranks, T* to, size_t count) {
  constexpr size_t kPiece = 1024;
  float sums[kPiece];
  for (size_t first = 0; first < count; first += kPiece) {
    size_t n = count - first < kPiece ? count - first : kPiece;
    for (size_t i = 0; i < n; ++i) sums[i] = widen(inputs[0][first + i]);
    for (int r = 1; r < ranks; ++r) {
      for (size_t i = 0; i < n; ++i) sums[i] += widen(inputs[r][first + i]);
    }
    for (size_t i = 0; i < n; ++i) narrow(sums[i], to + first + i);
  }
}

// Sums the block of this rank over all ranks.
template <class T>
void sum_block(const World& world, size_t count, T* to) {
  const T* inputs[kMostRanks];
  for (int r = 0; r < world.ranks; ++r) {
    inputs[r] = of_rank<T>(world, r) + static_cast<size_t>(world.rank) * count;
  }
  switch (world.ranks) {
    case 2:
      return sum_of<2>(inputs, to, count);
    case 4:
      return sum_of<4>(inputs, to, count);
    case 8:
      return sum_of<8>(inputs, to, count);
    default:
      return sum_of_any(inputs, world.ranks, to, count);
  }
}

void sum_block(const World& world, const turn_case& c, void* to) {
  if (c.dtype == TURN_FP32) {
    sum_block(world, c.count, static_cast<float*>(to));
  } else {
    sum_block(world, c.count, static_cast<Bf16*>(to));
  }
}

// --- calls ---------------------------------------------------------------------------------------

void gather(World& world, const turn_case& c) {
  auto* to = static_cast<std::byte*>(c.whole);
  size_t first = 0;
  wait_for_all(world);
  for (size_t t = 0; t < c.tensors; ++t) {
    size_t bytes = c.counts[t] * turn_size_of(c.dtype);
    for (int r = 0; r < world.ranks; ++r, to += bytes) {
      std::memcpy(to, of_rank<std::byte>(world, r) + first, bytes);
    }
    first += bytes;
  }
  wait_for_all(world);
}

void scatter_sums(World& world, const turn_case& c) {
  wait_for_all(world);
  sum_block(world, c, c.part);
  wait_for_all(world);
}

void sum_all(World& world, const turn_case& c) {
  size_t bytes = c.count * turn_size_of(c.dtype);
  auto* whole = static_cast<std::byte*>(c.whole);
  wait_for_all(world);
  sum_block(world, c, whole + static_cast<size_t>(world.rank) * bytes);
  wait_for_all(world);
  for (int i = 1; i < world.ranks; ++i) {
    int r = (world.rank + i) % world.ranks;
    size_t at = static_cast<size_t>(r) * bytes;
    std::memcpy(whole + at, of_rank<std::byte>(world, r) + at, bytes);
  }
  wait_for_all(world);
}

int call(void* context, const turn_case* c) {
  auto& world = *static_cast<World*>(context);
  if (c->op == TURN_REDUCE_SCATTER) {
    scatter_sums(world, *c);
  } else if (c->op == TURN_ALL_REDUCE) {
    sum_all(world, *c);
  } else {
    gather(world, *c);
  }
  return 0;
}

int barrier(void* context) {
  wait_for_all(*static_cast<World*>(context));
  return 0;
}

// --- memory --------------------------------------------------------------------------------------

bool is_read_by_others(turn_op op, turn_buffer which) {
  bool gathers = op == TURN_ALL_GATHER || op == TURN_ALL_GATHER_64;
  return which == (gathers ? TURN_PART : TURN_WHOLE);
}

void* map(void* context, turn_op op, turn_buffer which, size_t bytes) {
  auto& world = *static_cast<World*>(context);
  if (is_read_by_others(op, which)) {
    return bytes <= kSpan ? world.arena + static_cast<size_t>(world.rank) * kSpan : nullptr;
  }
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

void unmap(void*, turn_op op, turn_buffer which, void* at, size_t bytes) {
  if (is_read_by_others(op, which)) {
    madvise(at, bytes, MADV_REMOVE);
  } else {
    munmap(at, bytes);
  }
}

void* share(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

int serve(const char* pipes, World world) {
  turn_program program{world.rank, world.ranks, "g++ " __VERSION__, &world, call, barrier,
                       map,        unmap};
  return turn_serve(&program, pipes);
}

// When a rank fails, the others are killed, because they would wait for it.
int wait_for(const std::vector<pid_t>& ranks) {
  for (size_t left = ranks.size(); left > 0; --left) {
    int status = 0;
    wait(&status);
    if (status == 0) continue;
    for (pid_t pid : ranks) kill(pid, SIGKILL);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = argc == 3 ? std::atoi(argv[2]) : 0;
  if (ranks < 1 || ranks > kMostRanks) {
    std::fprintf(stderr, "usage: copy_collectives PIPES RANKS, at most %d\n", kMostRanks);
    return 1;
  }
  auto* flags = static_cast<Flag*>(share(sizeof(Flag) * kMostRanks));
  auto* arena = static_cast<std::byte*>(share(kSpan * static_cast<size_t>(ranks)));
  if (flags == nullptr || arena == nullptr) {
    std::perror("shared memory");
    return 1;
  }
  bool crowded = static_cast<unsigned>(ranks) > std::thread::hardware_concurrency();
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    pid_t pid = fork();
    if (pid == 0) return serve(argv[1], World{rank, ranks, flags, arena, crowded ? 1 : 1'000, 0});
    if (pid < 0) {
      std::perror("fork");
      for (pid_t child : children) kill(child, SIGKILL);
      return 1;
    }
    children.push_back(pid);
  }
  return wait_for(children);
}
