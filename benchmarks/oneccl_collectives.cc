// One rank of oneCCL that runs collectives in turns (see turns.h).
//
//     RANK=0 WORLD_SIZE=2 oneccl_collectives PIPES STORE
//
// Rank 0 writes the address of oneCCL's key-value store to the file STORE/address, which all ranks
// read. oneCCL has the type bf16: it sums with the instructions that the processor has.
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "oneapi/ccl.hpp"
#include "turns.h"

// The static library calls Intel's tracing (ITT) through pointers; null pointers switch it off.
#define UNTRACED(name) void* __itt_##name##_ptr__3_0 = nullptr;
extern "C" {
UNTRACED(domain_create)
UNTRACED(event_create)
UNTRACED(event_end)
UNTRACED(event_start)
UNTRACED(metadata_add)
UNTRACED(string_handle_create)
UNTRACED(task_begin)
UNTRACED(task_end)
UNTRACED(thread_set_name)
}

namespace {

struct World {
  ccl::communicator& communicator;
};

int call(void* context, const turn_case* c) {
  auto& communicator = static_cast<World*>(context)->communicator;
  auto type = c->dtype == TURN_FP32 ? ccl::datatype::float32 : ccl::datatype::bfloat16;
  auto sum = ccl::reduction::sum;
  auto ranks = static_cast<size_t>(communicator.size());
  if (c->op == TURN_ALL_GATHER_64) {
    std::vector<ccl::event> events;
    auto *from = static_cast<char*>(c->part), *to = static_cast<char*>(c->whole);
    ccl::group_start();
    for (size_t t = 0; t < c->tensors; ++t) {
      size_t bytes = c->counts[t] * turn_size_of(c->dtype);
      events.push_back(ccl::allgather(from, to, c->counts[t], type, communicator));
      from += bytes;
      to += bytes * ranks;
    }
    ccl::group_end();
    for (ccl::event& event : events) event.wait();
  } else if (c->op == TURN_ALL_GATHER) {
    ccl::allgather(c->part, c->whole, c->count, type, communicator).wait();
  } else if (c->op == TURN_REDUCE_SCATTER) {
    ccl::reduce_scatter(c->whole, c->part, c->count, type, sum, communicator).wait();
  } else {
    ccl::allreduce(c->whole, c->whole, c->count * ranks, type, sum, communicator).wait();
  }
  return 0;
}

int barrier(void* context) {
  ccl::barrier(static_cast<World*>(context)->communicator).wait();
  return 0;
}

ccl::kvs::address_type read_address(const std::filesystem::path& file) {
  ccl::kvs::address_type address{};
  for (int i = 0; i < 6000 && !std::filesystem::exists(file); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::ifstream(file, std::ios::binary)
      .read(address.data(), static_cast<std::streamsize>(address.size()));
  return address;
}

void write_address(const std::filesystem::path& file, const ccl::kvs::address_type& address) {
  std::filesystem::path fresh = file.string() + ".part";
  std::ofstream(fresh, std::ios::binary)
      .write(address.data(), static_cast<std::streamsize>(address.size()));
  std::filesystem::rename(fresh, file);
}

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : -1;
}

int run(const char* pipes, const std::filesystem::path& store) {
  int rank = number("RANK"), ranks = number("WORLD_SIZE");
  ccl::init();
  std::filesystem::path file = store / "address";
  ccl::shared_ptr_class<ccl::kvs> kvs;
  if (rank == 0) {
    kvs = ccl::create_main_kvs();
    write_address(file, kvs->get_address());
  } else {
    kvs = ccl::create_kvs(read_address(file));
  }
  auto communicator = ccl::create_communicator(ranks, rank, kvs);
  World world{communicator};
  auto found = ccl::get_library_version();
  std::string version = std::string("oneCCL ") + std::to_string(found.major) + "." +
                        std::to_string(found.minor) + "." + std::to_string(found.update);
  turn_program program{rank, ranks, version.c_str(), &world, call, barrier, nullptr, nullptr};
  return turn_serve(&program, pipes);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: oneccl_collectives PIPES STORE\n");
    return 1;
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
