// Tests of the code that calls NVIDIA's driver, with a stub in place of the driver: every call, its order
// and its arguments, and how the code uses the results. The tests show nothing about a real GPU.
#include "device/cuda_device.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <barrier>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "debug_setting.h"
#include "device/cuda_api.h"
#include "device/cuda_kernels.h"
#include "device/cuda_report.h"
#include "device/gdr_flags.h"
#include "device/unix_sockets.h"
#include "device_job.h"

namespace smddp {
namespace {

using device::Allocation;
using device::Device;

// Set before the driver is opened.
const DebugSetting stub_is_the_driver("libcuda", STUB_CUDA);
const DebugSetting stub_is_gdrcopy("libgdrapi", STUB_GDR);

enum Kind { kMalloc, kExpandable, kPrivate };

template <class F>
F stub(const char* name) {
  static void* library = dlopen(STUB_CUDA, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<F>(dlsym(library, name));
}
std::byte* allocate(size_t bytes, Kind kind, void* at = nullptr) {
  return static_cast<std::byte*>(
      stub<void* (*)(size_t, int, void*)>("stub_allocate")(bytes, kind, at));
}
// Reserves an address range, for pieces side by side.
std::byte* reserve(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return static_cast<std::byte*>(at);
}
void free_memory(void* at) { stub<void (*)(void*)>("stub_free")(at); }
int calls(const char* name) { return stub<int (*)(const char*)>("stub_calls")(name); }
size_t mapped() { return stub<size_t (*)()>("stub_mapped")(); }

size_t open_descriptors() {
  auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

std::unique_ptr<Device> gpu() {
  auto opened = device::open_cuda_device(0);
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  return opened ? std::move(opened.value()) : nullptr;
}

TEST(CudaDevice, OpensOrSaysWhyItCannot) {
  ASSERT_TRUE(gpu());
  auto none = device::open_cuda_device(1);
  ASSERT_FALSE(none.ok());
  EXPECT_TRUE(says(none.status(), "cuDeviceGet failed"));
  EXPECT_TRUE(says(none.status(), "error text of the stub"));
}

TEST(CudaDevice, OneHardwareQueueForAllStreamsIsRefused) {
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  auto refused = device::open_cuda_device(0);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
  EXPECT_TRUE(gpu());
  ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  ASSERT_FALSE(refused.ok());
  EXPECT_TRUE(says(refused.status(), "CUDA_DEVICE_MAX_CONNECTIONS is 1"));
}

// What nvcc writes for several architectures: a header, and an entry for each, in CUDA's own order.
struct FatbinHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatbinEntry {
  uint16_t kind, version;  // 1: PTX, 2: machine code
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t unused[3], architecture;
};

TEST(CudaKernels, AreMachineCodeForThreeArchitecturesAndPtxForNewerOnes) {
  if (device::cuda_kernels() == nullptr) GTEST_SKIP() << "this build had no nvcc";
  auto at = static_cast<const std::byte*>(device::cuda_kernels());
  FatbinHeader header;
  memcpy(&header, at, sizeof header);
  ASSERT_EQ(header.magic, 0xba55ed50u);
  at += header.header_bytes;
  std::multiset<uint32_t> machine_code, ptx;
  for (const std::byte* end = at + header.bytes; at < end;) {
    FatbinEntry entry;
    memcpy(&entry, at, sizeof entry);
    (entry.kind == 1 ? ptx : machine_code).insert(entry.architecture);
    at += entry.header_bytes + entry.bytes;
  }
#if defined(NVCC_KNOWS_SM_100)
  EXPECT_EQ(machine_code, (std::multiset<uint32_t>{80, 90, 100}));
#else
  EXPECT_EQ(machine_code, (std::multiset<uint32_t>{80, 90}));
#endif
  EXPECT_EQ(ptx, std::multiset<uint32_t>{90});
}

TEST(CudaReport, ReportsDriverAndDevices) {
  auto report = value_of(device::cuda_report());
  EXPECT_EQ(report.version, "12.0");
  EXPECT_EQ(report.devices, std::vector<std::string>{"stub (6 multiprocessors)"});
  EXPECT_TRUE(report.apart.empty());
}

// Another thread of the process may record a graph at any time.
TEST(CudaDevice, NoCallInvalidatesARecording) {
  auto device = gpu();
  {
    device::Stream stream = device->create_stream().value();
    device::Event event = device->create_event().value();
    void* memory = device->allocate(4096).value();
    auto flags = value_of(device->create_flags());
    auto pinned = device->Device::create_flags();  // in host memory
    ASSERT_TRUE(pinned.ok());
    EXPECT_TRUE(device->done(event).ok());
    EXPECT_TRUE(device->synchronize(stream).ok());
    device->free(memory);
    device->destroy_event(event);
    device->destroy_stream(stream);
  }
  EXPECT_EQ(stub<int (*)()>("stub_strict_calls")(), 0);
}

// Copies 8 times 100 bytes; the calls of the driver that this took, one by one and in batches.
std::pair<int, int> calls_of_copies(Device& device) {
  int single = calls("cuMemcpyAsync"), batches = calls("cuMemcpyBatchAsync");
  device::Stream stream = device.create_stream().value();
  auto* memory = static_cast<std::byte*>(device.allocate(4096).value());
  std::vector<Device::Copy> all;
  for (size_t i = 0; i < 8; ++i) {
    std::memset(memory + i * 100, static_cast<int>(i + 1), 100);
    all.push_back({memory + 2048 + i * 100, memory + i * 100, 100});
  }
  EXPECT_TRUE(device.copies(stream, all).ok());
  EXPECT_TRUE(device.synchronize(stream).ok());
  EXPECT_EQ(std::memcmp(memory + 2048, memory, 800), 0);
  device.free(memory);
  device.destroy_stream(stream);
  return {calls("cuMemcpyAsync") - single, calls("cuMemcpyBatchAsync") - batches};
}

TEST(CudaDevice, CopiesInOneBatchWhereTheDriverCan) {
  auto device = gpu();
  using Calls = std::pair<int, int>;
  auto refuse = stub<void (*)(bool)>("stub_refuse_batches");
  EXPECT_EQ(calls_of_copies(*device), Calls(0, 1));
  refuse(true);
  EXPECT_EQ(calls_of_copies(*device), Calls(8, 1));
  refuse(false);
  auto be_older = stub<void (*)(bool)>("stub_be_older");
  be_older(true);
  auto older = device::cuda::load_api(STUB_CUDA);
  be_older(false);
  ASSERT_TRUE(older.ok()) << older.status().message();
  EXPECT_EQ(older.value().cuMemcpyBatchAsync, nullptr);
  auto newer = value_of(device::cuda::load_api(STUB_CUDA));
  EXPECT_NE(newer.cuMemcpyBatchAsync, nullptr);
}

TEST(CudaDevice, SharesMemoryOfEachKind) {
  auto owner = gpu(), reader = gpu();
  for (Kind kind : {kMalloc, kExpandable}) {
    std::byte* memory = allocate(10000, kind);
    auto exported = value_of(owner->export_memory(memory + 5000, 10));
    ASSERT_EQ(exported.size(), 1u);
    const Allocation& a = exported[0];
    EXPECT_EQ(a.base, reinterpret_cast<uintptr_t>(memory));
    EXPECT_EQ(a.bytes, 12288u);
    size_t before = mapped();
    auto here = value_of(reader->import_memory(a, getpid()));
    EXPECT_NE(here, memory);
    memory[77] = std::byte{42};
    EXPECT_EQ(static_cast<std::byte*>(here)[77], std::byte{42});
    EXPECT_EQ(mapped(), before + 1);
    reader->release_memory(a, here);
    EXPECT_EQ(mapped(), before);
    free_memory(memory);
  }
  std::byte* memory = allocate(4096, kPrivate);
  auto refused = owner->export_memory(memory, 1);
  ASSERT_FALSE(refused.ok());
  EXPECT_TRUE(says(refused.status(), "PYTORCH_CUDA_ALLOC_CONF"));
  free_memory(memory);
}

// As Docker's default rules do.
void refuse_to_take_descriptors_in_this_thread() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 438, 0, 1),  // pidfd_getfd
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog filter{std::size(program), program};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

TEST(CudaDevice, ExpandableSegmentsAreSharedWherePidfdGetfdIsRefused) {
  auto owner = gpu(), reader = gpu();
  std::byte* memory = allocate(8192, kExpandable);
  Allocation a = owner->export_memory(memory, 10).value()[0];
  std::thread([&] {
    refuse_to_take_descriptors_in_this_thread();
    auto here = value_of(reader->import_memory(a, getpid()));
    memory[77] = std::byte{42};
    EXPECT_EQ(static_cast<std::byte*>(here)[77], std::byte{42});
    reader->release_memory(a, here);
    // What the server does not know is not taken from the process by its number: that may be another file's.
    Allocation other = a;
    other.id += 1000;
    EXPECT_FALSE(reader->import_memory(other, getpid()).ok());
    other.handle[3] ^= 1;
    auto unreached = reader->import_memory(other, getpid());
    ASSERT_FALSE(unreached.ok());
    EXPECT_TRUE(says(unreached.status(), "network namespace"));
  }).join();
  // Where the owner's socket is out of reach, the system call is.
  Allocation unreached = a;
  unreached.handle[3] ^= 1;
  auto here = reader->import_memory(unreached, getpid());
  if (here) {
    reader->release_memory(a, here.value());
  } else {
    EXPECT_TRUE(says(here.status(), "taking it"));  // a container's rules
  }
  free_memory(memory);
}

TEST(CudaDevice, ARecallEndsThePeersMappingsAndTheOwnersHandles) {
  auto owner = gpu(), reader = gpu();
  intranode::Imports imports(*reader);
  for (Kind kind : {kMalloc, kExpandable}) {
    std::byte* memory = allocate(8192, kind);
    size_t before = mapped(), open = open_descriptors();
    Allocation a = owner->export_memory(memory, 10).value()[0];
    ASSERT_TRUE(imports.find(getpid(), a).ok());
    EXPECT_EQ(mapped(), before + 1);
    EXPECT_EQ(owner->recall(memory - 4096, 4096), 0u);
    EXPECT_EQ(mapped(), before + 1);
    EXPECT_EQ(owner->recall(memory, 8192), 0u);
    EXPECT_EQ(mapped(), before);
    if (kind == kExpandable) EXPECT_LE(open_descriptors(), open + 3);  // sockets, once
    EXPECT_EQ(imports.statistics().mapped, 0u);
    free_memory(memory);
  }
  EXPECT_EQ(stub<int (*)()>("stub_strict_calls")(), 0);
}

// The owner frees nothing that a peer may still have mapped: it asks again as long as the memory lives.
TEST(CudaDevice, MemoryOfAPeerThatDoesNotAnswerIsRecalledAgain) {
  auto before = device::recall_limit_ms.exchange(100);
  auto owner = gpu();
  std::byte* memory = allocate(8192, kMalloc);
  auto silent =
      value_of(device::connect_to("recalls", owner->export_memory(memory, 1).value()[0].owner));
  EXPECT_EQ(owner->recall(memory, 8192), 1u);
  EXPECT_EQ(owner->recall(memory, 8192), 1u);
  silent = {};
  EXPECT_EQ(owner->recall(memory, 8192), 0u);
  EXPECT_EQ(owner->recall(memory, 8192), 0u);
  free_memory(memory);
  device::recall_limit_ms = before;
}

TEST(CudaDevice, MemoryThatTakesAnAddressAgainIsExportedAnew) {
  auto owner = gpu(), reader = gpu();
  std::byte* at = reserve(8192);
  for (Kind kind : {kMalloc, kExpandable}) {
    uint64_t before = 0;
    size_t open = 0;
    for (int turn = 0; turn < 4; ++turn) {
      std::byte* memory = allocate(8192, kind, at);
      memory[5] = static_cast<std::byte>(turn);
      auto exported = value_of(owner->export_memory(memory, 100));
      const Allocation& a = exported[0];
      EXPECT_NE(a.id, std::exchange(before, a.id));
      auto here = value_of(reader->import_memory(a, getpid()));
      EXPECT_EQ(static_cast<std::byte*>(here)[5], static_cast<std::byte>(turn));
      reader->release_memory(a, here);
      // What the owner keeps open keeps the memory allocated.
      size_t now = open_descriptors();
      if (turn > 0) EXPECT_EQ(now, open);
      open = now;
      free_memory(memory);
    }
  }
}

TEST(CudaDevice, KnownMemoryTakesOneQuestionToTheDriver) {
  auto owner = gpu();
  auto calls = stub<int (*)(const char*)>("stub_calls");
  for (Kind kind : {kMalloc, kExpandable}) {
    std::byte* memory = allocate(8192, kind);
    auto exported = value_of(owner->export_memory(memory, 8192));
    int asked = calls("cuPointerGetAttribute"), ranges = calls("cuMemGetAddressRange");
    auto again = value_of(owner->export_memory(memory + 100, 1));
    EXPECT_EQ(calls("cuPointerGetAttribute"), asked + 1);
    EXPECT_EQ(calls("cuMemGetAddressRange"), ranges);
    EXPECT_EQ(again[0].id, exported[0].id);
    free_memory(memory);
  }
}

// torch maps 20 MiB at once for it. What is offered goes to all ranks of the host in each call.
TEST(CudaDevice, AnOfferOfALargeTensorIsShort) {
  constexpr size_t kPiece = 20 << 20, kPieces = 5;
  auto owner = gpu();
  std::byte* at = reserve(kPieces * kPiece);
  for (size_t i = 0; i < kPieces; ++i) allocate(kPiece, kExpandable, at + i * kPiece);
  Extent tensor{at + 512, (kPieces - 1) * kPiece};
  size_t room = intranode::MemoryOffer::encoded_bytes({tensor.bytes});
  EXPECT_LT(room, 2048u);
  std::vector<std::byte> wire(room);
  intranode::MemoryOffer::make(*owner, {}, {tensor}).encode(wire.data(), room);
  EXPECT_EQ(value_of(intranode::MemoryOffer::decode(wire.data(), room)).refusal(), "");
  for (size_t i = 0; i < kPieces; ++i) free_memory(at + i * kPiece);
}

TEST(CudaDevice, APieceOfAnOfferEndsWhereTheNextOneBegins) {
  auto owner = gpu(), reader = gpu();
  std::byte* first = allocate(8192, kExpandable, reserve(16384));
  std::byte* second = allocate(8192, kExpandable, first + 8192);
  second[0] = std::byte{42};
  auto made = intranode::MemoryOffer::make(*owner, {}, {{first + 4096, 8192}});
  std::vector<std::byte> wire(intranode::MemoryOffer::encoded_bytes({8192}));
  made.encode(wire.data(), wire.size());
  auto offer = value_of(intranode::MemoryOffer::decode(wire.data(), wire.size()));
  intranode::Imports imports(*reader);
  for (size_t offset : {size_t{0}, size_t{4096}}) {
    auto piece = value_of(offer.locate(imports, 0, offset, 8192 - offset));
    EXPECT_EQ(piece.bytes, 4096u) << offset;
    if (offset > 0) EXPECT_EQ(piece.address[0], std::byte{42});
  }
  free_memory(first);
  free_memory(second);
}

TEST(CudaDevice, ExpandableSegmentsAreExportedAsSeveralPieces) {
  auto owner = gpu();
  std::byte* first = allocate(8192, kExpandable, reserve(16384));
  std::byte* second = allocate(8192, kExpandable, first + 8192);
  auto exported = value_of(owner->export_memory(first + 4096, 8192));
  ASSERT_EQ(exported.size(), 2u);
  EXPECT_NE(exported[0].id, exported[1].id);
  EXPECT_NE(exported[0].descriptor, exported[1].descriptor);
  free_memory(second);
  second = allocate(8192, kExpandable, first + 8192);  // other memory at the same address
  auto again = value_of(owner->export_memory(first, 16384));
  EXPECT_EQ(again[0].id, exported[0].id);
  EXPECT_NE(again[1].id, exported[1].id);
  free_memory(first);
  free_memory(second);
}

TEST(Gdr, ErrorsSayWhyItCannotBeUsed) {
  auto result_of = [](const char* path) {
    DebugSetting library("libgdrapi", path);
    auto device = gpu();
    Status made = device::flags_on_gpu(*device).status();
    return made ? "opened" : made.message();
  };
  EXPECT_EQ(result_of(STUB_GDR), "opened");
  EXPECT_TRUE(says(result_of("/nowhere/libgdrapi.so.2"), "could not open GDRCopy"));
  EXPECT_TRUE(says(result_of(STUB_CUDA), "has no gdr_"));
  setenv("STUB_GDR_MAJOR", "1", 1);
  EXPECT_TRUE(says(result_of(STUB_GDR), "is version 1.4; 2.x is needed"));
  unsetenv("STUB_GDR_MAJOR");
  setenv("STUB_GDR_NO_MODULE", "1", 1);
  EXPECT_TRUE(says(result_of(STUB_GDR), "gdrdrv"));
  unsetenv("STUB_GDR_NO_MODULE");
}

TEST(CudaDevice, FlagsAreInPinnedMemoryUnlessGdrcopyIsChosen) {
  auto device = gpu();
  DebugSetting none("libgdrapi", "");
  auto flags = value_of(device->create_flags());
  EXPECT_FALSE(device->export_memory(flags->on_device(5), 4).ok());
}

TEST(CudaDevice, FlagsAreInGpuMemoryIfGdrcopyIsAvailable) {
  auto device = gpu();
  auto made = value_of(device->create_flags());
  device::HostFlags& flags = *made;
  EXPECT_TRUE(device->export_memory(flags.on_device(5), 4).ok());  // fails for pinned memory
  device::Stream stream = device->create_stream().value();
  device::Event event = device->create_event().value();
  ASSERT_TRUE(device->wait_flag(stream, flags.on_device(5), 7).ok());
  ASSERT_TRUE(device->record(event, stream).ok());
  flags.set(4, 7);
  EXPECT_FALSE(device->done(event).value());
  flags.set(5, 7);
  EXPECT_TRUE(device->synchronize(stream).ok());
  EXPECT_TRUE(device->done(event).value());
  device->destroy_event(event);
  device->destroy_stream(stream);
}

TEST(CudaDevice, RunsAllReduceBetweenHosts) {
  constexpr size_t kCount = 700'000;  // more than two chunks
  run_world("ab", [&](RankContext& context) {
    auto device = gpu();
    std::unique_ptr<std::byte, void (*)(void*)> owner(allocate(kCount * 4, kMalloc), free_memory);
    GroupRank r(context, *device);
    ASSERT_TRUE(r.group);
    auto* data = reinterpret_cast<float*>(owner.get());
    for (size_t i = 0; i < kCount; ++i) data[i] = static_cast<float>(i % 100 + context.rank);
    auto op = Job(r, true).reduce(data, kCount);
    ASSERT_TRUE(works(r.group->submit(op, r.user)));
    ASSERT_TRUE(works(r.finish(*op)));
    for (size_t i = 0; i < kCount; ++i)
      ASSERT_EQ(data[i], static_cast<float>(2 * (i % 100) + 1)) << i;
  });
}

// Commands are batched, and the context is made current once for many calls. What the group's thread asks the
// driver from time to time does not count.
void count_commands(const std::string& layout, size_t bytes, int commands_of_each) {
  const size_t ranks = layout.size();
  constexpr int kTimes = 3;
  auto commands = [&] {
    return calls("cuStreamBatchMemOp") + calls("cuStreamWaitEvent") + calls("cuEventRecord") +
           calls("cuMemcpyAsync") + calls("cuMemcpyBatchAsync");
  };
  auto switches = [&] { return calls("cuCtxPushCurrent") - calls("cuEventQuery"); };
  RankBarrier mapped(ranks), counted(ranks), done(ranks), read(ranks);
  int commands_before = 0, switches_before = 0;
  run_world(layout, [&](RankContext& context) {
    auto device = gpu();
    GroupRank r(context, *device);
    ASSERT_TRUE(r.group);
    auto me = static_cast<size_t>(context.rank);
    std::unique_ptr<std::byte, void (*)(void*)> input(allocate(bytes, kMalloc), free_memory);
    std::unique_ptr<std::byte, void (*)(void*)> output(allocate(ranks * bytes, kMalloc),
                                                       free_memory);
    std::memset(input.get(), context.rank + 1, bytes);
    Job job(r);
    auto gather = [&] {
      ASSERT_TRUE(works(r.run(job.gather(reinterpret_cast<float*>(input.get()),
                                         reinterpret_cast<float*>(output.get()), bytes / 4))));
    };
    gather();  // maps the peers' memory
    mapped.arrive_and_wait();
    if (me == 0) commands_before = commands(), switches_before = switches();
    counted.arrive_and_wait();
    for (int i = 0; i < kTimes; ++i) gather();
    done.arrive_and_wait();
    if (me == 0) {
      int operations = kTimes * static_cast<int>(ranks);
      EXPECT_EQ(commands() - commands_before, commands_of_each * operations);
      EXPECT_LE(switches() - switches_before, 9 * operations);
    }
    read.arrive_and_wait();  // the ends of groups call the driver too
    for (size_t i = 0; i < ranks * bytes; ++i)
      ASSERT_EQ(output.get()[i], static_cast<std::byte>(i / bytes + 1)) << i;
  });
}

// The caller's event and the wait for its end; of the group's stream a wait for that event, two batches of flags,
// one of copies, and the end's event. Of more bytes: an event and a wait for each stream that copies as well.
TEST(CudaDevice, AnAllGatherTakesFewCallsOfTheDriver) {
  count_commands("aa", 512 << 10, 2 + 5);
  count_commands("aaaaaaaa", 128 << 10, 2 + 5);
  count_commands("aa", 1 << 20, 2 + 11);
  count_commands("aaaaaaaa", 1 << 20, 2 + 26);
}

// A group on the CUDA device. The memory of each rank consists of pieces, of different sizes in each rank.
TEST(CudaDevice, RunsAllReduceOnMemoryInSeveralPieces) {
  constexpr size_t kCount = 5000;  // floats; 4096 bytes hold 1024
  std::barrier ended(3);
  run_world("aaa", [&](RankContext& context) {
    auto device = gpu();
    GroupRank r(context, *device);
    ASSERT_TRUE(r.group);
    // Pieces of 2, 3 and 4 pages side by side.
    size_t piece = 4096 * static_cast<size_t>(context.rank + 2);
    std::byte* memory = reserve(65536);
    for (size_t at = 0; at < 65536; at += piece)
      allocate(std::min(piece, 65536 - at), kExpandable, memory + at);
    auto* data = reinterpret_cast<float*>(memory);
    for (size_t i = 0; i < kCount; ++i) data[i] = static_cast<float>(i % 100 + context.rank);
    Status s = r.run(Job(r).reduce(data, kCount));
    ended.arrive_and_wait();  // the others need this rank's handles, also where it fails
    if (device::cuda_kernels() == nullptr) {
      EXPECT_TRUE(says(s, "this build has no kernels"));
    } else {
      ASSERT_TRUE(works(s));
      for (size_t i = 0; i < kCount; ++i)
        ASSERT_EQ(data[i], static_cast<float>(3 * (i % 100) + 3)) << i;
    }
  });
}

}  // namespace
}  // namespace smddp
