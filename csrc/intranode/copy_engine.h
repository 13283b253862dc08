// Collectives of the ranks of a host on their devices' streams: copies by copy engines, sums by a
// kernel that reads the peers' memory, and flags that one stream sets and another waits for. The host
// only submits.
//
// Every rank has a page of flags in memory that host and devices see: per peer and phase one word,
// which the peer's stream sets to 1, and which this rank's stream waits for and sets back to 0. So
// nothing in it counts operations, and what was submitted can be submitted again as it is, which is
// what replaying a CUDA graph does. No flag is set before it was set back: a rank sets a flag at its
// peer again only in a later operation, after the peer's `done` of this one, and the peer's stream
// sets `done` after it has set the others back. For `done` itself the peer's next `ready` or `prepared`
// says that.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "device/device.h"
#include "intranode/copy_engine_memory.h"
#include "intranode/shared.h"

namespace smddp::intranode {

class CopyEngine {
 public:
  // What one rank does, in terms of the extents that the ranks offer. `sums`: [offset, offset + bytes)
  // of `extent` of all ranks, summed in their order into `destination`. `moves`: that part of one
  // rank's into `destination`, after its sums, if there are any.
  struct Sum {
    size_t extent, offset, bytes;
    std::byte* destination;
  };
  struct Move {
    int from;
    size_t extent, offset, bytes;
    std::byte* destination;
  };
  struct Plan {
    std::vector<Sum> sums;
    std::vector<Move> moves;
    Dtype dtype = Dtype::kBytes;
    ReduceOp op = ReduceOp::kNone;
    int divisor = 1;
    int blocks = 1;  // of a kernel, at most
  };

  // This process is number `index` of the host's `ranks`. Submits to `main`, and to streams of its own
  // that start and end there.
  static Result<std::unique_ptr<CopyEngine>> create(device::Device& device, Imports& imports,
                                                    device::Stream main, int index, int ranks);
  ~CopyEngine();

  int flags_descriptor() const { return own_.fd.get(); }
  // Maps the flags of rank `index`, which is process `pid`.
  Status join(int index, int pid, int flags_descriptor);

  // Submits it. Offers by index; nothing of what they name may be freed until `main` is past it. The
  // plans of all ranks have the same sums and moves but for whose they are. `between`, where there is
  // one, submits more to `main`, after the sums and before the moves.
  Status submit(const Plan& plan, const std::vector<Offer>& offers,
                const std::function<Status()>& between = {});

  // Lets go of every stream that waits here, whatever its peers do; to be called again until the
  // streams are empty. Nothing can be submitted any more.
  void release();
  // Tells the peers why this rank gave the group up; what a peer said, or nullptr.
  void give_up(const std::string& reason);
  const char* gave_up(int index) const;

 private:
  enum Phase { kReady, kPrepared, kDone, kPhases };
  // A cache line each: peers write them.
  struct Flags {
    struct alignas(64) Word {
      uint32_t value;
    };
    Word word[kPhases][kernels::kMostSources];
    // Of the host alone: 1 once `reason` says why the owner gave up.
    alignas(64) uint32_t given_up;
    char reason[kReasonBytes];
  };
  static constexpr size_t kPageBytes = (sizeof(Flags) + 4095) / 4096 * 4096;
  static constexpr size_t kLanes = 4;
  struct Lane {
    device::Stream stream = nullptr;
    device::Event end = nullptr;
  };

  CopyEngine(device::Device& device, Imports& imports, device::Stream main, int index, int ranks)
      : device_(device), imports_(imports), main_(main), index_(index), ranks_(ranks) {}
  Status open();
  Status signal(device::Stream stream, Phase phase, int peer);
  Status await(device::Stream stream, Phase phase, int peer);
  Status sum(const Plan& plan, const std::vector<Offer>& offers);
  Status move(device::Stream stream, const Plan& plan, const Offer& offer, int from);

  device::Device& device_;
  Imports& imports_;
  const device::Stream main_;
  const int index_, ranks_;
  Shared own_;
  Flags* own_flags_ = nullptr;  // as the device sees them
  std::vector<Mapping> mappings_;
  std::vector<Flags*> peers_;  // as the device sees them, by index
  std::vector<Lane> lanes_;
  device::Event begin_ = nullptr;
};

}  // namespace smddp::intranode
