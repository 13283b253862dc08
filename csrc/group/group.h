// A group of ranks: who they are, and the queue of operations that they carry out together. An operation
// is cut into fragments, which do the work over the group's local and remote peers. The Group must not
// know how a fragment moves bytes. Callers submit operations; the progress engine drives the group.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/fragment.h"
#include "collectives/operation.h"
#include "flows/health.h"
#include "flows/local_peers.h"
#include "flows/rail_turns.h"
#include "flows/remote_peers.h"
#include "group/closing.h"
#include "group/failure_detector.h"
#include "group/fragment_maker.h"
#include "group/fragment_queue.h"
#include "group/group_state.h"
#include "group/operation_recorder.h"
#include "group/remote_watch.h"
#include "joining/group_options.h"
#include "joining/store.h"
#include "progress/process.h"
#include "topology/members.h"

namespace smddp {

struct GroupParts;  // what create() makes for a group

class Group : private Progressable {
 public:
  using Options = GroupOptions;

  // Blocks until every rank of the group has joined, or the store's timeout has passed.
  static Result<std::unique_ptr<Group>> create(Process& process, Store& store, int rank, int ranks,
                                               Options options);
  // A group of some of its ranks, in the order given, of which this rank must be one. Those ranks call
  // it together. `store` is one that the group's ranks share, `label` tells their groups apart. `recorded`:
  // GroupOptions::recorded.
  Result<std::unique_ptr<Group>> subgroup(Store& store, const std::string& label,
                                          const std::vector<Rank>& ranks, bool recorded = true);
  ~Group() override;

  // Starts `operation`, after all earlier ones of this group. `background`: no thread is going to wait for it
  // at once. Its end, good or bad, is the operation's status.
  void submit(const std::shared_ptr<Operation>& operation, const Tuning& tuning, bool background);
  // Fails everything in flight, on all ranks, and everything to come; with nothing in flight if `idle_too`.
  void abort(const std::string& reason, bool idle_too = false);

  int rank() const { return members_.rank(); }
  int ranks() const { return members_.ranks(); }
  const Topology& topology() const { return members_.topology(); }
  const std::string& name() const { return members_.group_name(); }
  std::string describe(Rank rank) const { return members_.describe(rank); }  // "rank 3 (host b)"
  Status status();  // ok until the group is broken
  // Not ok if the group is broken, or if `rank` takes no part in it any more, as far as can be found out at once.
  Status look(Rank rank);
  // Whether `rank` is known to have started an operation that this one has not submitted.
  bool is_ahead(Rank rank);
  // With its connections: reads /proc for each other rank of this host.
  GroupState state(bool with_connections = false);
  void set_timeout(uint64_t timeout_ns);
  // Whether it is known that all ranks have made the group: an operation that all call is complete.
  bool made_by_all();
  // Keys to remove from the store of create(), which other ranks read while they make the group.
  std::vector<std::string> take_last_keys();

 private:
  friend class GroupBuilder;
  void use(const NetworkModel& network);  // before the first operation
  void use_reads(size_t up_to);           // Shape::reads_up_to; while none is under way
  // What is submitted until the second call, which is ask(false), is no operation of the group.
  void ask(bool begin);
  Group(Process& process, Options options, GroupParts parts);

  bool busy() const override;
  bool progress() override;
  bool watch(uint64_t now_ns) override;
  uint64_t deadline_ns() const override {
    return health_.ok() ? failures_.deadline_ns() : closing_.limit_ns();
  }
  bool on_message(const wire::Header& header, const std::byte* payload) override;
  void on_peer_lost(transport::Peer peer, const Status& why) override {
    remote_.on_peer_lost(peer);
    failures_.on_peer_lost(peer, why);
  }
  void on_fabric_failed(const Status& why) override;
  bool needs_network() const override {
    return !remote_.ranks().empty() && (health_.ok() || (busy() && !closing_.closed()));
  }
  void on_network_closed() override { remote_.on_network_closed(); }
  void fail(Status why) noexcept override;
  void leave() override;

  void take(const wire::Header& header, const std::byte* payload);  // an authentic message

  // Calls f(); what it throws breaks the group.
  template <class F>
  bool guarded(F&& f) noexcept;
  // Carries out an operation in the place of a fragment, in at most so many looks, or begins it so. False: it is none
  // that can be begun now.
  bool exchange_at_once(const std::shared_ptr<Operation>& operation, int looks);
  // The first of its bytes move.
  void note_start(Operation& operation);
  void finish(std::shared_ptr<Operation> operation);
  bool start_fragments();
  bool progress_fragments();
  bool close_fragments();
  bool give_up();
  std::optional<OldestOperation> oldest(uint64_t now) const;
  void check_network();
  void start_leaving();
  void take_leave();
  template <class F>
  void drive_until(F&& done);

  Process& process_;
  Engine& engine_;  // its
  const Options options_;
  const JobKey key_;
  const Members members_;
  Shape shape_;
  LocalPeers local_;
  RemotePeers remote_;
  RailTurns turns_;
  PeerTallies tallies_;
  CodingChoice coding_;
  Health health_;
  FragmentQueue fragments_;
  RemoteWatch remote_watch_;
  FailureDetector failures_;
  Closing closing_;
  uint64_t leaving_ns_ =
      0;  // since when this rank waits until its messages have arrived; 0: it does not
  OperationRecorder recorder_;
  bool asked_ = false;  // its operations ask the host
  std::optional<OldestOperation> broken_at_;
  const FragmentContext context_;
  FragmentMaker maker_;
  std::vector<std::string> last_keys_;
  bool made_by_all_ = false;
  uint64_t operations_ = 0, completed_ = 0;  // so far: submitted, and complete
};

}  // namespace smddp
