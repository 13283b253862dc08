// How the ranks of a group learn what each of them is, through the store.
//
// In a group of few ranks every rank reads what each rank has published: one round. In a larger one that would
// be the square of the ranks. There rank 0 reads it and publishes one table of all ranks and, for each host, who
// its first rank is. The first rank of each host reads the table and hands it to the other ranks of its host in
// a shared segment. So the store serves a few small values per rank, and the table once per host.
//
// A rank that stands in a directory of the job's processes publishes its place there (joining/process_directory.h). If
// some rank can't read that, as a new process in its place has no directory, all that have referred publish the
// whole: in a small group each rank sees it from the values, in a larger one rank 0 asks for it.
//
// Those for which ranks of other hosts wait, rank 0 and the first rank of each host, count in the store meanwhile
// (joining/heartbeat.h). A rank that waits looks whether the rank that it waits for lives, once it knows what
// that one is. Knows no engine and no topology but for who is first on its host. Joining and the simulator's
// count of a start-up call it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/types.h"
#include "intranode/shared.h"
#include "joining/heartbeat.h"
#include "joining/process_directory.h"
#include "joining/rank_info.h"
#include "joining/store.h"

namespace smddp {

class InfoExchange {
 public:
  struct Options {
    uint64_t timeout_ns;
    int few_ranks;  // a group of at most so many
    std::chrono::milliseconds heartbeat = kHeartbeat;
  };
  // An error if the rank, which is `info`, has ended or is silent. `host`: that of this rank.
  using Look = std::function<Status(Rank, const RankInfo& info, const std::string& host)>;

  InfoExchange(Store& store, Rank rank, int ranks, const Options& options, Look look,
               OwnPlace place = {})
      : store_(store),
        rank_(rank),
        ranks_(ranks),
        options_(options),
        look_(std::move(look)),
        values_(rank, std::move(place)),
        heartbeat_(store, rank, options.heartbeat) {}

  // Each waits for the ranks that it reads of; the errors are those of collect(). publish() comes first.
  Status publish(const RankInfo& mine);
  Result<std::vector<RankInfo>> infos();
  // After infos(). All ranks name the same ranks.
  Status publish(const FabricAddress& mine);
  Result<std::vector<FabricAddress>> fabrics(const std::vector<Rank>& of);
  // The first rank of each host says how far its host has come, and what it has found out; every rank waits for all
  // hosts. `infos`: of all ranks. The result is the same on all ranks: what `agree` makes of all that was found,
  // by host. Each topic once, in this order.
  static constexpr const char *kJoined = "joined", *kMeasured = "measured";
  using Agree = std::function<std::string(const std::vector<std::string>&)>;
  Status publish_found(const char* topic, const std::string& found = {});
  Result<std::string> await_found(const std::string& topic, const std::vector<Rank>& first_of_hosts,
                                  const std::vector<RankInfo>& infos, const Agree& agree);
  // Whether ranks of this host may still read what they know of all ranks from this one.
  bool hands_on() const { return !handed_.empty(); }
  // Removes what this rank has published. Called once all hosts have joined: no rank reads it any more.
  void forget();
  // What the first ranks of all hosts leave in the store, and ranks may read as long as they make the group; some of it may
  // not be there.
  static std::vector<std::string> last_keys_of(const std::vector<Rank>& first_of_hosts);
  // What this rank leaves.
  std::vector<std::string> take_last_keys() { return std::move(last_keys_); }

 private:
  using Blobs = std::vector<Blob>;

  bool few() const { return ranks_ <= options_.few_ranks; }
  Status set(const std::string& key, const Blob& value);
  Status begin_heartbeat();
  // The blobs that the ranks `from` have published under `topic`, in this order.
  Result<Blobs> exchange(const std::string& topic, const std::vector<Rank>& from);
  Result<Blobs> gather(const std::string& topic, const std::vector<Rank>& from);
  // As collect(), but each rank can read the blobs.
  Result<Blobs> collect_clear(const std::string& topic, const std::vector<Rank>& from);
  Status tell_whole_if_asked();
  Status publish_leaders(const Blobs& infos);
  Status find_leader(const std::vector<Rank>& all);
  Result<Blobs> read_table(const std::string& topic, const std::vector<Rank>& from);
  Status hand_on(const std::string& topic, const Blobs& blobs);
  Result<Blobs> take_handed(const std::string& topic, const std::vector<Rank>& from);
  // What is waited for: `key`, which rank `by` publishes once all of `from` have published `topic`. `info` is what
  // that rank is; nullptr as long as that is not known.
  struct Awaited {
    std::string key;
    Rank by;
    const RankInfo* info;
    std::string topic;
    const std::vector<Rank>& from;
  };
  Status wait_for(const Awaited& awaited);
  Result<Blob> await(const Awaited& awaited);
  const RankInfo* first_rank() const { return first_ ? &*first_ : nullptr; }

  Store& store_;
  const Rank rank_;
  const int ranks_;
  const Options options_;
  const Look look_;
  RankValues values_;
  bool may_be_asked_ = false;  // for the whole of what this rank is
  std::string host_;           // identity of this rank's
  HostLeader leader_;
  std::optional<RankInfo> first_;       // rank 0, if this one waits for it
  std::vector<std::string> published_;  // keys to remove
  std::vector<std::string> last_keys_;
  std::vector<intranode::Shared> handed_;
  Heartbeat heartbeat_;
};

}  // namespace smddp
