// A rank's side of a benchmark in turns, for the rank programs in C and C++. It is in C so that the
// mpicc of every MPI compiles it, and knows no library that is measured.
//
// A rank reads command lines from its own named pipe, executes each together with the other ranks,
// and answers each with one line of JSON on another pipe:
//
//     check OP DTYPE BYTES             runs the operation once and compares every element
//     run OP DTYPE BYTES ITERATIONS    barrier, then that many calls back to back
//     free                             frees the buffers
//     quit
//
// BYTES is the size of AllGather's output, ReduceScatter's input, or AllReduce's buffer. The
// operation message is a message between rank r and rank r + half of the ranks, whose direction changes at every call. The
// operation all_gather_64 is one coalesced AllGather of TURN_TENSORS tensors, whose sizes are fixed
// (calls/cases.py has the same rule), so BYTES follows from them. Between turns a rank is blocked
// in read(2). A library that spins while it waits (most MPIs do) then takes no CPU time from the
// turns of other competitors. A broadcast of the command through the library would take it.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { TURN_TENSORS = 64 };
enum turn_op {
  TURN_ALL_GATHER,
  TURN_REDUCE_SCATTER,
  TURN_ALL_REDUCE,
  TURN_MESSAGE,
  TURN_ALL_GATHER_64
};
enum turn_dtype { TURN_FP32, TURN_BF16 };
enum turn_buffer { TURN_WHOLE, TURN_PART };

// The buffers of one call: `part` holds `count` elements, `whole` holds `count` elements per rank.
// In a coalesced operation they hold one tensor after the other: tensor t has counts[t] elements in
// `part`, and in `whole` counts[t] elements per rank, rank by rank. Every other operation has one
// tensor.
struct turn_case {
  enum turn_op op;
  enum turn_dtype dtype;
  size_t count;
  void *whole, *part;
  size_t tensors, counts[TURN_TENSORS];
  long calls;  // before this one
};

struct turn_program {
  int rank, ranks;
  const char* version;  // of the library that is measured
  void* context;        // argument of the functions below; call and barrier return 0 on success
  int (*call)(void* context, const struct turn_case* what);  // blocks until its result is complete
  int (*barrier)(void* context);
  // For a program whose buffers cannot be ordinary memory; null otherwise.
  void* (*map)(void* context, enum turn_op op, enum turn_buffer which, size_t bytes);
  void (*unmap)(void* context, enum turn_op op, enum turn_buffer which, void* at, size_t bytes);
};

static inline size_t turn_size_of(enum turn_dtype dtype) { return dtype == TURN_FP32 ? 4 : 2; }

static inline double turn_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// CPU time of the whole process so far, all threads.
static inline double turn_cpu(void) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
         1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

// The other rank of a message, and whether this one sends. The message is `whole` on both.
static inline int turn_partner(const struct turn_program* p) {
  return (p->rank + p->ranks / 2) % p->ranks;
}

static inline int turn_sends(const struct turn_program* p, long calls) {
  return (calls + (2 * p->rank >= p->ranks)) % 2 == 0;
}

// --- data: small integers, whose sum has the same bits in every order of summation ---------------

static inline void turn_put(void* at, size_t i, enum turn_dtype dtype, int value) {
  union {
    float f;
    uint32_t u;
  } bits;
  bits.f = (float)value;
  if (dtype == TURN_FP32) {
    ((float*)at)[i] = bits.f;
  } else {
    ((uint16_t*)at)[i] = (uint16_t)(bits.u >> 16);
  }
}

static inline int turn_get(const void* at, size_t i, enum turn_dtype dtype) {
  union {
    float f;
    uint32_t u;
  } bits;
  if (dtype == TURN_FP32) {
    bits.f = ((const float*)at)[i];
  } else {
    bits.u = (uint32_t)((const uint16_t*)at)[i] << 16;
  }
  return (int)bits.f;
}

// Element i (of the part for AllGather, of the whole otherwise) on a rank. The sums of 16 ranks are
// below 256, and bf16 represents them exactly.
static inline int turn_value(size_t i, int rank) { return (int)((i + 3 * (size_t)rank) % 7); }

static inline int turn_sum(size_t i, int ranks) {
  int sum = 0;
  for (int r = 0; r < ranks; ++r) sum += turn_value(i, r);
  return sum;
}

static inline void turn_fill(const struct turn_program* p, const struct turn_case* c) {
  size_t all = c->count * (size_t)p->ranks;
  if (c->op == TURN_ALL_GATHER || c->op == TURN_ALL_GATHER_64) {
    for (size_t i = 0; i < c->count; ++i) turn_put(c->part, i, c->dtype, turn_value(i, p->rank));
    memset(c->whole, 0xff, all * turn_size_of(c->dtype));
  } else {
    for (size_t i = 0; i < all; ++i) turn_put(c->whole, i, c->dtype, turn_value(i, p->rank));
    memset(c->part, 0xff, c->count * turn_size_of(c->dtype));
  }
}

static inline int turn_is_right(const struct turn_program* p, const struct turn_case* c) {
  size_t n = c->count, all = n * (size_t)p->ranks;
  int sums[7];
  for (int i = 0; i < 7; ++i) sums[i] = turn_sum((size_t)i, p->ranks);
  if (c->op == TURN_REDUCE_SCATTER) {
    for (size_t i = 0; i < n; ++i) {
      if (turn_get(c->part, i, c->dtype) != sums[(i + n * (size_t)p->rank) % 7]) return 0;
    }
    return 1;
  }
  if (c->op == TURN_MESSAGE) {
    int from = turn_sends(p, c->calls - 1) ? p->rank : turn_partner(p);
    for (size_t i = 0; i < all; ++i) {
      if (turn_get(c->whole, i, c->dtype) != turn_value(i, from)) return 0;
    }
    return 1;
  }
  if (c->op == TURN_ALL_REDUCE) {
    for (size_t i = 0; i < all; ++i) {
      if (turn_get(c->whole, i, c->dtype) != sums[i % 7]) return 0;
    }
    return 1;
  }
  for (size_t t = 0, first = 0, i = 0; t < c->tensors; first += c->counts[t++]) {
    for (int r = 0; r < p->ranks; ++r) {
      for (size_t j = 0; j < c->counts[t]; ++j, ++i) {
        if (turn_get(c->whole, i, c->dtype) != turn_value(first + j, r)) return 0;
      }
    }
  }
  return 1;
}

// The elements of the file `data`.bf16 or `data`.fp32, again and again.
static inline void turn_fill_from(void* at, size_t bytes, enum turn_dtype dtype, const char* data) {
  char path[4096];
  snprintf(path, sizeof path, "%s.%s", data, dtype == TURN_FP32 ? "fp32" : "bf16");
  FILE* file = fopen(path, "rb");
  size_t n = 1;
  for (size_t done = 0; file != NULL && done < bytes && n > 0; done += n) {
    n = fread((char*)at + done, 1, bytes - done, file);
    rewind(file);
  }
  if (file == NULL || n == 0) {
    fprintf(stderr, "%s can't be read\n", path);
    exit(1);
  }
  fclose(file);
}

// What is timed: zeros, or what TURN_DATA says: weights (normally distributed, of a standard deviation of 0.02),
// random bits, or the path of a file without its end. The same elements again and again, as nothing depends on more.
static inline void turn_fill_timed(void* at, size_t bytes, enum turn_dtype dtype) {
  static unsigned char elements[1 << 18];
  const char* data = getenv("TURN_DATA");
  memset(at, 0, bytes);
  if (data == NULL) return;
  if (data[0] == '/') {
    turn_fill_from(at, bytes, dtype, data);
    return;
  }
  uint64_t state = 88172645463325252ull;
  for (size_t i = 0; i < sizeof elements / turn_size_of(dtype); ++i) {
    float sum = 0;
    for (int k = 0; k < 12; ++k) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      sum += (float)(state >> 40) * 0x1p-24f;
    }
    uint32_t bits;
    float weight = (sum - 6) * 0.02f;
    memcpy(&bits, &weight, sizeof bits);
    if (strcmp(data, "weights") != 0) bits = (uint32_t)(state >> 32);
    if (dtype == TURN_FP32) {
      memcpy(elements + 4 * i, &bits, 4);
    } else {
      uint16_t half = (uint16_t)(bits >> 16);
      memcpy(elements + 2 * i, &half, 2);
    }
  }
  for (size_t done = 0; done < bytes; done += sizeof elements) {
    size_t n = bytes - done < sizeof elements ? bytes - done : sizeof elements;
    memcpy((char*)at + done, elements, n);
  }
}

// --- buffers -------------------------------------------------------------------------------------

static inline void* turn_map(const struct turn_program* p, enum turn_op op, enum turn_buffer which,
                             size_t bytes) {
  if (p->map != NULL) return p->map(p->context, op, which, bytes);
  void* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? NULL : at;
}

static inline void turn_unmap_one(const struct turn_program* p, enum turn_op op,
                                  enum turn_buffer which, void* at, size_t bytes) {
  if (at == NULL) return;
  if (p->unmap != NULL) {
    p->unmap(p->context, op, which, at, bytes);
  } else {
    munmap(at, bytes);
  }
}

static inline void turn_unmap(struct turn_case* c, const struct turn_program* p) {
  size_t bytes = c->count * turn_size_of(c->dtype);
  turn_unmap_one(p, c->op, TURN_WHOLE, c->whole, bytes * (size_t)p->ranks);
  turn_unmap_one(p, c->op, TURN_PART, c->part, bytes);
  memset(c, 0, sizeof *c);
}

static inline size_t turn_count(size_t bytes, enum turn_dtype dtype, int ranks) {
  size_t count = bytes / turn_size_of(dtype) / (size_t)ranks;
  return count > 0 ? count : 1;
}

// Bytes of tensor t of a coalesced operation: from 1 KiB to 4 MiB, large ones beside small ones.
static inline size_t turn_tensor_bytes(size_t t) { return (size_t)1024 << (5 * t % 13); }

// The buffers of the last case are kept for the next turn of the same case.
static inline int turn_prepare(struct turn_case* c, const struct turn_program* p, const char* op,
                               const char* dtype, size_t bytes) {
  struct turn_case next;
  memset(&next, 0, sizeof next);
  next.op = strcmp(op, "all_gather") == 0       ? TURN_ALL_GATHER
            : strcmp(op, "reduce_scatter") == 0 ? TURN_REDUCE_SCATTER
            : strcmp(op, "all_reduce") == 0     ? TURN_ALL_REDUCE
            : strcmp(op, "message") == 0        ? TURN_MESSAGE
                                                : TURN_ALL_GATHER_64;
  next.dtype = strcmp(dtype, "fp32") == 0 ? TURN_FP32 : TURN_BF16;
  next.tensors = next.op == TURN_ALL_GATHER_64 ? TURN_TENSORS : 1;
  for (size_t t = 0; t < next.tensors; ++t) {
    size_t of_tensor = next.tensors == 1 ? bytes : turn_tensor_bytes(t);
    next.counts[t] = turn_count(of_tensor, next.dtype, p->ranks);
    next.count += next.counts[t];
  }
  if (c->whole != NULL && c->op == next.op && c->dtype == next.dtype && c->count == next.count) {
    return 0;
  }
  turn_unmap(c, p);
  size_t part = next.count * turn_size_of(next.dtype);
  next.whole = turn_map(p, next.op, TURN_WHOLE, part * (size_t)p->ranks);
  next.part = turn_map(p, next.op, TURN_PART, part);
  *c = next;
  if (c->whole == NULL || c->part == NULL) return 1;
  // Touches the pages before anything is timed. In-place sums of zeros stay zeros.
  turn_fill_timed(c->whole, part * (size_t)p->ranks, c->dtype);
  turn_fill_timed(c->part, part, c->dtype);
  return 0;
}

// --- turns ---------------------------------------------------------------------------------------

static int turn_ascending(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static inline int turn_call(const struct turn_program* p, struct turn_case* c) {
  int failed = p->call(p->context, c);
  ++c->calls;
  return failed;
}

static inline int turn_check(const struct turn_program* p, struct turn_case* c, FILE* answers) {
  turn_fill(p, c);
  if (p->barrier(p->context) != 0 || turn_call(p, c) != 0) return 1;
  fprintf(answers, "{\"right\": %s}\n", turn_is_right(p, c) ? "true" : "false");
  turn_fill_timed(c->whole, c->count * (size_t)p->ranks * turn_size_of(c->dtype), c->dtype);
  turn_fill_timed(c->part, c->count * turn_size_of(c->dtype), c->dtype);
  return 0;
}

static inline int turn_run(const struct turn_program* p, struct turn_case* c, long iterations,
                           FILE* answers, double idle) {
  double* took = (double*)malloc((size_t)iterations * sizeof *took);
  if (took == NULL) return 1;
  memset(took, 0, (size_t)iterations * sizeof *took);
  if (p->barrier(p->context) != 0) return 1;
  double cpu = turn_cpu(), begin = turn_now(), last = begin;
  for (long i = 0; i < iterations; ++i) {
    if (turn_call(p, c) != 0) return 1;
    double now = turn_now();
    took[i] = now - last;
    last = now;
    // Sums in place would grow without bound. What this takes is not timed.
    if (i % 16 == 15 && c->op == TURN_ALL_REDUCE && getenv("TURN_DATA") != NULL) {
      turn_fill_timed(c->whole, c->count * (size_t)p->ranks * turn_size_of(c->dtype), c->dtype);
      last = turn_now();
      begin += last - now;
    }
  }
  cpu = turn_cpu() - cpu;
  qsort(took, (size_t)iterations, sizeof *took, turn_ascending);
  fprintf(answers,
          "{\"bytes\": %zu, \"iterations\": %ld, \"seconds\": %.9f, \"min\": %.9f, "
          "\"median\": %.9f, \"p90\": %.9f, \"cpu\": %.6f, \"idle_cpu\": %.6f}\n",
          c->count * (size_t)p->ranks * turn_size_of(c->dtype), iterations, last - begin, took[0],
          took[iterations / 2], took[(long)(0.9 * (double)(iterations - 1))], cpu, idle);
  free(took);
  return 0;
}

static inline int turn_open(const char* directory, int rank, const char* what, int flags) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%d.%s", directory, rank, what);
  int fd = open(path, flags | O_CLOEXEC);
  if (fd < 0) fprintf(stderr, "%s: %s\n", path, strerror(errno));
  return fd;
}

// Serves the pipes DIRECTORY/RANK.commands and DIRECTORY/RANK.answers until the command quit or the
// end of the driver. Returns the exit status of the process.
static inline int turn_serve(const struct turn_program* p, const char* directory) {
  int in = turn_open(directory, p->rank, "commands", O_RDONLY);
  int out = turn_open(directory, p->rank, "answers", O_WRONLY);
  if (in < 0 || out < 0) return 1;
  FILE *commands = fdopen(in, "r"), *answers = fdopen(out, "w");
  struct turn_case c;
  memset(&c, 0, sizeof c);
  char line[256], verb[16], op[32], dtype[16];
  fprintf(answers, "{\"version\": \"%s\"}\n", p->version);
  fflush(answers);
  for (double cpu = turn_cpu(); fgets(line, sizeof line, commands) != NULL; cpu = turn_cpu()) {
    double idle = turn_cpu() - cpu;  // CPU time of this process while it waited for the line
    size_t bytes = 0;
    long iterations = 1;
    int fields = sscanf(line, "%15s %31s %15s %zu %ld", verb, op, dtype, &bytes, &iterations);
    int failed = 0;
    if (fields == 1 && strcmp(verb, "quit") == 0) break;
    if (fields == 1 && strcmp(verb, "free") == 0) {
      turn_unmap(&c, p);
      fprintf(answers, "{}\n");
    } else if (fields >= 4 && iterations > 0) {
      failed = turn_prepare(&c, p, op, dtype, bytes) ||
               (strcmp(verb, "check") == 0 ? turn_check(p, &c, answers)
                                           : turn_run(p, &c, iterations, answers, idle));
    } else {
      failed = 1;
    }
    if (failed) {
      fprintf(stderr, "rank %d: this command failed: %s", p->rank, line);
      return 1;
    }
    fflush(answers);
  }
  turn_unmap(&c, p);
  return 0;
}
