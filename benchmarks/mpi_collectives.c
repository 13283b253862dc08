// One rank of an MPI program that runs collectives in turns (see turns.h): mpi_collectives PIPES
//
// bf16: MPI has no such type before 5.0, so an element is an MPI_UINT16_T, and this file defines
// the MPI_Op: unpack to fp32 (a shift), add, round to nearest even. The loop has no branch, so the
// compiler makes vector code of it (-O3 -march=native); a library's own bf16 sum does the same
// work. The operation is declared commutative, so the library may choose any algorithm, except
// those that it keeps for predefined types (in hardware, in shared memory).
#include <mpi.h>
#include <stdlib.h>

#include "turns.h"

struct world {
  const struct turn_program* program;
  MPI_Op add_bf16;
};

static void add_bf16(void* in, void* inout, int* count, MPI_Datatype* type) {
  const uint16_t* restrict from = in;
  uint16_t* restrict to = inout;
  (void)type;
  for (int i = 0; i < *count; ++i) {
    union {
      uint32_t u;
      float f;
    } a = {(uint32_t)from[i] << 16}, b = {(uint32_t)to[i] << 16};
    a.f += b.f;
    to[i] = (uint16_t)((a.u + 0x7fff + ((a.u >> 16) & 1)) >> 16);
  }
}

// MPI has no coalesced operations; nonblocking calls, all waited for at once, are the nearest.
static int gather_tensors(const struct turn_case* c, MPI_Datatype type, int ranks) {
  MPI_Request requests[TURN_TENSORS];
  char *from = c->part, *to = c->whole;
  for (size_t t = 0; t < c->tensors; ++t) {
    int count = (int)c->counts[t];
    size_t bytes = c->counts[t] * turn_size_of(c->dtype);
    int status = MPI_Iallgather(from, count, type, to, count, type, MPI_COMM_WORLD, &requests[t]);
    if (status != MPI_SUCCESS) return status;
    from += bytes;
    to += bytes * (size_t)ranks;
  }
  return MPI_Waitall((int)c->tensors, requests, MPI_STATUSES_IGNORE);
}

static int call(void* context, const struct turn_case* c) {
  struct world* world = context;
  int bf16 = c->dtype == TURN_BF16;
  MPI_Datatype type = bf16 ? MPI_UINT16_T : MPI_FLOAT;
  MPI_Op op = bf16 ? world->add_bf16 : MPI_SUM;
  int count = (int)c->count, ranks;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (c->op == TURN_ALL_GATHER_64) return gather_tensors(c, type, ranks);
  if (c->op == TURN_ALL_GATHER) {
    return MPI_Allgather(c->part, count, type, c->whole, count, type, MPI_COMM_WORLD);
  }
  if (c->op == TURN_MESSAGE) {
    int partner = turn_partner(world->program);
    return turn_sends(world->program, c->calls)
               ? MPI_Send(c->whole, count * ranks, type, partner, 0, MPI_COMM_WORLD)
               : MPI_Recv(c->whole, count * ranks, type, partner, 0, MPI_COMM_WORLD,
                          MPI_STATUS_IGNORE);
  }
  if (c->op == TURN_REDUCE_SCATTER) {
    return MPI_Reduce_scatter_block(c->whole, c->part, count, type, op, MPI_COMM_WORLD);
  }
  return MPI_Allreduce(MPI_IN_PLACE, c->whole, count * ranks, type, op, MPI_COMM_WORLD);
}

static int barrier(void* context) {
  (void)context;
  return MPI_Barrier(MPI_COMM_WORLD);
}

int main(int argc, char** argv) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length, status, rank, ranks;
  struct world world;
  MPI_Init(&argc, &argv);
  if (argc != 2) {
    fprintf(stderr, "usage: mpi_collectives PIPES\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Op_create(add_bf16, 1, &world.add_bf16);
  MPI_Get_library_version(version, &length);
  // Keeps the first line, without characters that JSON would escape.
  for (char* c = version; *c != '\0'; ++c) {
    if (*c == '"' || *c == '\\' || *c == '\t') *c = ' ';
    if (*c == '\n' || *c == ',') *c = '\0', --c;
  }
  struct turn_program program = {rank, ranks, version, &world, call, barrier, NULL, NULL};
  world.program = &program;
  status = turn_serve(&program, argv[1]);
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Op_free(&world.add_bf16);
  MPI_Finalize();
  return 0;
}
