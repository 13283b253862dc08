// How the ranks of a group come to know one another: each tells what it is, every rank reads that of all, and all
// find alike whether they agree: on the job's secret and the routes, and that every rank has a fabric if there are
// several hosts. A rank that could not know that there are several hosts says nothing of its fabric in the first
// exchange; only such ranks publish it in a second one.
//
// A rank that fails publishes why, so that the others fail at once, with the same sentence.
//
// Knows no engine, and nothing of how ranks reach one another afterwards. GroupBuilder calls it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "joining/group_options.h"
#include "joining/info_exchange.h"
#include "joining/process_directory.h"
#include "joining/store.h"
#include "topology/members.h"

namespace smddp {

class Joining {
 public:
  // All references must outlive it. `look`, `place`: as of InfoExchange.
  Joining(Store& store, Rank rank, int ranks, const GroupOptions& options, InfoExchange::Look look,
          OwnPlace place)
      : store_(store),
        rank_(rank),
        ranks_(ranks),
        options_(options),
        exchange_(store, rank, ranks, {options.timeout_ns, options.few_ranks}, std::move(look),
                  std::move(place)) {}

  // What this rank tells, but for what its engine, its segments and the network are. `token`: its process's.
  Status describe(uint64_t token, RankInfo* mine);
  // Tells `mine` and waits for the information of all ranks. In the place of it, in a simulation, learn().
  Status exchange(RankInfo mine);
  void learn(std::vector<RankInfo> infos);
  // The rest is called after that. All ranks find alike that two of them differ.
  Status agree();
  // Every rank's fabric address into its information, or why there can be no group. `open`: opens this rank's.
  Status exchange_fabrics(const std::function<FabricAddress()>& open);
  // The first rank of each host says, under `topic`, that its host has come so far, and what `find` has found.
  // Every rank waits for all hosts. What `agree` makes of all that was found, by host.
  Result<std::string> agree_among_hosts(const char* topic, const std::function<std::string()>& find,
                                        const InfoExchange::Agree& agree);
  // All hosts have joined. Removes from the store what no rank reads any more, and returns this rank's place in the
  // directory of the job's processes, if the group is that of the whole job.
  std::optional<OwnPlace> conclude();
  std::vector<std::string> take_last_keys() { return exchange_.take_last_keys(); }
  // The error of the group, of which `why` is this rank's; tells it to the other ranks.
  Status fail(const Status& why) noexcept;
  // As fail(), for an error that all ranks of the group find by themselves, and alike.
  Status found_alike(Status why) {
    alike_ = alike_ || !why;
    return why;
  }

  const std::vector<RankInfo>& infos() const { return infos_; }  // by rank
  const RankInfo& info(Rank rank) const { return infos_[static_cast<size_t>(rank)]; }
  std::vector<RankInfo> take_infos() { return std::move(infos_); }
  const JobKey& key() const { return key_; }  // the group's
  siphash::Key key_of_messages() const;       // after agree()
  const Members& members() const { return *members_; }
  const Topology& topology() const { return members_->topology(); }

 private:
  Status describe_secret(RankInfo* mine);
  Status agree_on_secret();
  Status agree_on_routes() const;

  Store& store_;
  const Rank rank_;
  const int ranks_;
  const GroupOptions& options_;
  InfoExchange exchange_;
  bool alike_ = false;  // all ranks have found the error
  std::vector<RankInfo> infos_;
  JobKey key_{};
  std::optional<siphash::Key> secret_;  // the job's
  std::optional<Members> members_;
};

// This rank can't join the group for the reason `why`, which the other ranks are told. The error of the
// group: another rank's, if that one has failed first.
Status tell_failure(Store& store, Rank rank, const GroupOptions& options,
                    const Status& why) noexcept;

}  // namespace smddp
