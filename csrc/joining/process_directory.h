// What the ranks of a job have told each other of their processes when the group of all of them was made. Ranks of a
// further group that stand in the same directory publish their places in it (Reference), and not once more what
// their processes are. A directory never changes: directories of the same number have the same contents on all ranks.
// Knows neither who is alive nor what changed since, no store, and not who reads what. The engine keeps one; the
// exchange of a group reads it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "joining/rank_info.h"

namespace smddp {

class ProcessDirectory {
 public:
  // Of the group `key`, of all ranks of the job.
  ProcessDirectory(const JobKey& key, const std::vector<RankInfo>& infos);
  uint64_t number() const { return number_; }  // tells it from others, on all ranks alike
  // What the processes at `places` were. kInternal if there is no such place.
  Result<std::vector<ProcessInfo>> look_up(const std::vector<int>& places) const;

 private:
  const uint64_t number_;
  const std::vector<uint8_t> table_;  // a packed table: a process keeps it for the time of its job
};

// A directory, and what this process was when it was made.
struct OwnPlace {
  std::shared_ptr<const ProcessDirectory> directory;  // nullptr: there is none
  int place = -1;
  ProcessInfo process;
  // Whether what it says of this process, which is `now`, is still true.
  bool describes(const ProcessInfo& now) const { return directory && process == now; }
};

// What the ranks of a group publish of themselves: all of it or, where a directory describes the rank, its place
// there. All ranks find alike from the values whether each rank can read all of them.
class RankValues {
 public:
  RankValues(int rank, OwnPlace place) : rank_(rank), place_(std::move(place)) {}

  // What this rank, which is `mine`, publishes.
  Blob describe(const RankInfo& mine);
  // Whether that is a reference; then `whole` is what it refers to.
  bool refers() const { return refers_; }
  const Blob& whole() const { return whole_; }

  // The ranks that some rank of the group can't read: those that refer, unless all refer to one directory. Then
  // each rank has it, as it refers to it itself.
  static std::vector<int> unclear(const std::vector<Blob>& values);
  bool can_read(const Blob& value) const;
  Result<std::vector<RankInfo>> read_all(const std::vector<Blob>& values) const;

 private:
  const int rank_;
  const OwnPlace place_;
  bool refers_ = false;
  Blob whole_;
};

}  // namespace smddp
