// What the ranks of a group publish of themselves: all of it or, where a directory of processes describes the rank,
// its place there (process_directory.h). All ranks find alike from the values whether each rank can read all of
// them. Knows no store, and not who reads what. The exchange of a group calls it.
#pragma once

#include <utility>
#include <vector>

#include "joining/process_directory.h"

namespace smddp {

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
