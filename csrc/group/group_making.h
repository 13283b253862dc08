// Makes the groups of a simulation, whose ranks share one thread: in steps of which none waits for another
// rank, and without a store. First begin() for every rank, then join() for every rank with all that begin()
// has told, then finish() for every rank. Group::create() takes the same steps for a real rank.
#pragma once

#include <memory>
#include <vector>

#include "joining/exchange.h"
#include "group/group.h"

namespace smddp {

class GroupMaking {
 public:
  static Result<std::unique_ptr<GroupMaking>> begin(Engine& engine, Rank rank, int ranks,
                                                    const Group::Options& options);
  ~GroupMaking();
  const RankInfo& info() const;
  // `infos`: of all ranks. They are lent for the call, so that the ranks of a simulation share them.
  Status join(std::vector<RankInfo>& infos);
  Result<std::unique_ptr<Group>> finish();

 private:
  struct State;
  explicit GroupMaking(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace smddp
