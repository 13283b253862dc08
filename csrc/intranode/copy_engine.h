// Collectives of the ranks of a host on their devices' streams: copies by copy engines, sums by a
// kernel that reads the peers' memory, and flags that one stream sets and another stream waits for. The
// CPU only submits the work. The file knows the device only by device/device.h, and knows neither torch
// nor the network. DeviceGroup calls it.
//
// Every rank has a page of flags in memory that CPU and devices see. The page has one word per peer and
// phase. The peer's stream sets the word to 1; this rank's stream waits for the 1 and sets the word back
// to 0. So no flag counts operations, and submitted work can be submitted again unchanged, as the replay
// of a CUDA graph does. A flag is always back at 0 before it is set again: a rank sets a flag at its peer
// again only in a later operation, after the peer's `done` of this one, and the peer's stream sets `done`
// after it has set the other flags back. For `done` itself, the peer's next `ready` or `prepared` proves
// that it is back at 0. Each part of an operation that is prepared on its own has a flag of its own.
// With something between sums and moves (submit()), the sums of an operation may come before the moves of
// earlier ones: they have a stream and flags of their own, `ready` and `summed`, of which each proves that the
// other is back at 0.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/device.h"
#include "intranode/copy_engine_memory.h"
#include "intranode/shared.h"

namespace smddp::intranode {

class CopyEngine {
 public:
  // The work of one rank, in terms of the extents that the ranks offer. A Sum adds
  // [offset, offset + bytes) of `extent` of all ranks, in the order of the ranks, into `destination`. A
  // Move copies that part of the extent of rank `from` into `destination`, after the sums of that rank if there
  // are any, and once that rank has prepared part `part` of the operation.
  struct Sum {
    size_t extent, offset, bytes;
    std::byte* destination;
    size_t part = 0;
  };
  struct Move {
    int from;
    size_t extent, offset, bytes;
    std::byte* destination;
    size_t part = 0;
  };
  static constexpr size_t kMostParts = 4, kMostRanks = 32;
  static_assert(kMostRanks <= kernels::kMostSources);
  struct Plan {
    std::vector<Sum> sums;
    std::vector<Move> moves;
    size_t parts = 1;
    bool on_lanes = false;   // even if its moves have few bytes
    kernels::Reduction how;  // of each sum, without its memory
  };

  // This process is number `index` of the host's `ranks`. The engine submits to `main`, and to the device's
  // lanes, which wait for `main` before their copies and for which `main` waits.
  static Result<std::unique_ptr<CopyEngine>> create(device::Device& device, device::Stream main,
                                                    int index, int ranks);
  ~CopyEngine();

  int flags_descriptor() const { return own_.fd.get(); }
  // Maps the flags of rank `index`, which is process `pid`.
  Status join(int index, int pid, int flags_descriptor);

  using Copies = std::vector<device::Device::Copy>;
  // A plan with addresses of this process.
  class Work {
   private:
    friend class CopyEngine;
    bool sums_ = false, moves_ = false;
    std::vector<std::vector<kernels::Reduction>> reductions_;  // by part
    std::vector<std::vector<Copies>> copies_;  // by part, and by the rank that they read
    bool on_lanes_ = false;                    // the copies, and not on the group's stream
  };
  // Maps the memory of the peers that the plan reads; submits nothing. `offers` has one entry per rank, by
  // index.
  static Result<Work> resolve(const Plan& plan, const std::vector<MemoryOffer>& offers,
                              Imports& imports);
  // What is between the sums and the moves calls each of the two for each of the plan's parts, in their order.
  struct Stages {
    // Submits the sums of the next part to a stream, which is the same for all operations of the group.
    std::function<Status(device::Stream)> sum = [](device::Stream) { return Status(); };
    // Submits the moves of the next part. `main` holds what prepares the part.
    std::function<Status()> move = [] { return Status(); };
  };
  using Between = std::function<Status(const Stages&)>;
  // The offered memory must not be freed until `main` has finished this work. The plans of all ranks have the
  // same parts, and all or none of them sums and moves; only the rank that they belong to differs. After the work
  // `main` marks `number`, and after an error it does not.
  Status submit(const Work& work, uint32_t number) { return submit(work, main_, lanes_, number); }
  // `between` submits more. The sums do not come after what `main` holds.
  Status submit_around(const Work& work, uint32_t number, const Between& between);
  // Submits the work to `stream`, which records a graph, and to streams of this engine that nothing else uses:
  // `main` and the lanes stay out of the recording, and so does what others submit to them.
  Status record(const Work& work, device::Stream stream);

  // After this, `main` sets a word in host memory to `number`. reached() compares with that word and does
  // not call the device. Numbers grow; they may wrap.
  Status mark(uint32_t number);
  bool reached(uint32_t number) const;

  // Every rank calls operations 1, 2, 3 and so on. call() tells the peers that this rank calls `number`, and then
  // takes the time, which it writes to its encoded offer. called() is true if all peers have told; those that have
  // not take their times later.
  void call(uint32_t number, std::byte* offer);
  bool called(uint32_t number) const;

  // Ends the waits of all streams of this rank, whatever its peers do. The caller repeats the call until
  // the streams are empty. After the first call nothing may be submitted any more.
  void release();
  // give_up() tells the peers that this rank gave the group up, and why. gave_up() returns the reason of a peer that
  // has given up, if there is one. Any thread may call them; a rank's first reason stays.
  void give_up(const std::string& reason);
  std::optional<std::string> gave_up() const;

 private:
  enum Phase : size_t { kReady, kSummed, kDone, kPrepared, kPhases = kPrepared + kMostParts };
  // One cache line per word, as peers write them.
  struct Flags {
    struct alignas(64) Word {
      uint32_t value;
    };
    Word word[kPhases][kMostRanks];
    Word reached;  // set by the owner's stream, read by the owner's CPU
    // Used only by CPUs, not by streams. kGivenUp: the owner gave up, and `reason` is set.
    alignas(64) uint32_t given_up;
    char reason[kReasonBytes];
    uint32_t called;
  };
  static constexpr uint32_t kGivingUp = 1, kGivenUp = 2;
  static constexpr size_t kPageBytes = (sizeof(Flags) + 4095) / 4096 * 4096;
  struct Lane {
    device::Stream stream = nullptr;
    device::Event end = nullptr;
  };

  CopyEngine(device::Device& device, device::Stream main, int index, int ranks)
      : device_(device), main_(main), index_(index), ranks_(ranks) {}
  Status open();
  Status open_lanes(std::vector<Lane>& lanes, bool own);
  Status submit(const Work& work, device::Stream main, const std::vector<Lane>& lanes,
                std::optional<uint32_t> number);
  // Steps with flags that come one after the other on a stream: one command.
  using Steps = std::vector<device::FlagStep>;
  void signal(Steps& steps, size_t phase, int peer) const;
  void signal_all(Steps& steps, size_t phase) const;
  void await_all(Steps& steps, size_t phase) const;
  Status flush(device::Stream stream, Steps& steps);
  device::FlagStep mark_of(uint32_t number) const {
    return {device::FlagStep::Kind::kWrite, &own_flags_->reached.value, number};
  }
  static Status resolve_sums(const Plan& plan, const std::vector<MemoryOffer>& offers,
                             Imports& imports, Work& work);
  static Status resolve_moves(const Plan& plan, const std::vector<MemoryOffer>& offers,
                              Imports& imports, Work& work);
  Status sum(const Work& work, size_t part, device::Stream stream);
  Status sum_early(const Work& work, size_t part, device::Stream stream);
  Status move(device::Stream stream, const Copies& copies, bool recorded);
  Status move_few(const Work& work, device::Stream main, bool recorded, Steps& steps);
  Status move_all(const Work& work, size_t part, device::Stream main,
                  const std::vector<Lane>& lanes);
  void await_lanes(device::Stream main, const std::vector<Lane>& lanes);

  device::Device& device_;
  const device::Stream main_;
  const int index_, ranks_;
  Shared own_;
  Flags* own_flags_ = nullptr;  // address on the device
  std::vector<Mapping> mappings_;
  std::vector<Flags*> peers_;  // addresses on the device, by index
  std::vector<Lane> lanes_, recorded_lanes_;
  device::Event begin_ = nullptr, summed_ = nullptr;
};

}  // namespace smddp::intranode
