// Messages between two ranks of a group, on CPUs. Those of one direction and tag between two ranks go through a channel:
// a group of these two, made once both have called, in which the k-th send meets the k-th receive. So channels do not
// wait for one another, whatever the order of the calls. A call never waits for the other rank: messages wait in the
// channel until its group is made, on another thread.
//
// ProcessGroupSMDDP makes it. It knows no tensors.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "group/group.h"
#include "torch/group_store.h"
#include "torch/work.h"

namespace smddp {

class PointToPoint {
 public:
  PointToPoint(Engine& engine, std::shared_ptr<GroupStore> store);
  ~PointToPoint();
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  // Starts a message to rank `peer` of `group`, or from it; no `peer`: from whichever rank sends one with its tag, and
  // `source` of the message tells which. It has to be complete `timeout_ns` after its call. The group must live until
  // release().
  void submit(Group& group, const std::shared_ptr<TensorOperation>& message,
              std::optional<Rank> peer, uint64_t timeout_ns);
  // Fails all messages that are not complete, and all to come.
  void abort(const std::string& why);
  // Ends all channels. Messages that wait for a call of the other rank fail. The GIL must not be held.
  void release();

 private:
  struct Channel;
  using Key = std::tuple<Rank, bool, int>;  // the other rank, whether this one sends, the tag
  using Messages = std::deque<std::shared_ptr<TensorOperation>>;

  Channel& channel_of(Rank peer, bool sends, int tag);
  // Gives the message to the channel's group, or to those that wait for it.
  void enter(std::unique_lock<std::mutex> lock, Channel& channel,
             const std::shared_ptr<TensorOperation>& message);
  std::string name_of(Rank peer) const;
  // Of its first waiting message.
  std::string describe(const Channel& channel) const;
  std::string missing(const Channel& channel) const;
  // Looks for the other ranks' calls, while channels wait for them. One thread at a time.
  void serve();
  bool ending() const;
  Status meet(GroupStore::Connection& store, Channel& channel, bool look, bool* met);
  Status overdue(const Channel& channel) const;
  bool has_sent(GroupStore::Connection& store, Rank peer, int tag);
  Status match(GroupStore::Connection& store, Channel& channel, bool look);
  static void tell(GroupStore::Connection& store, Channel& channel, const Status& why);
  void make(GroupStore::Connection& store, Channel& channel);
  // The channel's messages fail, those to come as well.
  void fail(Channel& channel, const Status& why);
  void fail(Messages messages, const Status& why);
  GroupState state_of(const Channel& channel) const;
  // Calls f(this) on another thread; release() waits for its end.
  template <class F>
  void run(F&& f);

  Engine& engine_;
  const std::shared_ptr<GroupStore> store_;
  mutable std::mutex mutex_;  // never held while a channel's group is made or destroyed
  std::condition_variable changed_;
  Group* group_ = nullptr;
  std::map<Key, std::unique_ptr<Channel>> channels_;
  bool serving_ = false, fresh_ = false;
  bool ended_ = false;
  int running_ = 0;  // threads
};

}  // namespace smddp
