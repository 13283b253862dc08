#include "torch/point_to_point.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "common/clock.h"
#include "common/exceptions.h"
#include "torch/error_state.h"
#include "torch/future_threads.h"
#include "torch/live_groups.h"
#include "torch/runtime.h"

namespace smddp {
namespace {

using std::chrono::milliseconds;

// The pauses between looks at the store. The more channels wait, the longer: all ranks look at one store.
constexpr milliseconds kShortestPause{1}, kLongestPause{50};
constexpr int kChannelsPerPause = 8;
// How often it is asked whether the other rank lives.
constexpr uint64_t kLookNs = 500'000'000;

const char* const kCalled = "called";  // by each of the two ranks, under the channel's prefix
constexpr Rank kAnyRank = -1;

// Knows the keys that this rank has left in the store.
class ChannelStore final : public WatchedStore {
 public:
  ChannelStore(Store& part, std::function<Status()> look)
      : WatchedStore(part, "", {}, kLongestPause, std::move(look)) {}

  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    std::unique_lock lock(mutex_);
    keys_.insert(key);
    lock.unlock();
    return PrefixStore::set(key, value);
  }
  void remove(const std::string& key) override {
    std::unique_lock lock(mutex_);
    keys_.erase(key);
    lock.unlock();
    PrefixStore::remove(key);
  }
  std::set<std::string> keys() const {
    std::lock_guard lock(mutex_);
    return keys_;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> keys_;
};

}  // namespace

struct PointToPoint::Channel {
  Channel(const Group& group, std::string its_label, Rank other, bool to_it, int its_tag)
      : label(std::move(its_label)),
        peer(other),
        sends(to_it),
        tag(its_tag),
        recorder(group.name() + "/" + label) {}

  const std::string label;
  const Rank peer;  // kAnyRank: it holds receives until their senders are found
  const bool sends;
  const int tag;
  const OperationRecorder recorder;
  uint64_t submitted = 0;
  Messages waiting;  // until there is a group
  std::unique_ptr<Group> group;
  Status status;                     // not ok: there will be none
  std::optional<GroupState> broken;  // when it failed, for reports
  bool called = false;               // this rank has said so in the store
  bool making = false;
  std::set<std::string> keys;  // in the store, of this rank

  std::string called_by(Rank rank) const { return label + "/" + key_of(kCalled, rank); }
};

PointToPoint::PointToPoint(Engine& engine, std::shared_ptr<GroupStore> store)
    : engine_(engine), store_(std::move(store)) {}

PointToPoint::~PointToPoint() { release(); }

PointToPoint::Channel& PointToPoint::channel_of(Rank peer, bool sends, int tag) {
  std::unique_ptr<Channel>& channel = channels_[{peer, sends, tag}];
  if (channel) return *channel;
  auto name = [&](Rank rank) {
    return rank == kAnyRank ? std::string("any rank")
                            : "rank " + std::to_string(store_->part().number_of(rank));
  };
  Rank from = sends ? group_->rank() : peer, to = sends ? peer : group_->rank();
  std::string label = name(from) + " to " + name(to);
  if (tag != 0) label += ", tag " + std::to_string(tag);
  channel = std::make_unique<Channel>(*group_, std::move(label), peer, sends, tag);
  return *channel;
}

void PointToPoint::submit(Group& group, const std::shared_ptr<TensorOperation>& message,
                          std::optional<Rank> peer, uint64_t timeout_ns) {
  message->timeout_ns = timeout_ns;
  message->deadline_ns = message->called_ns + timeout_ns;
  std::unique_lock lock(mutex_);
  if (std::exchange(group_, &group) == nullptr) {
    lock.unlock();
    LiveGroups::process().add(this, [this](std::vector<GroupState>* states) {
      std::lock_guard locked(mutex_);
      for (const auto& [key, channel] : channels_) {
        if (channel->broken) {
          states->push_back(*channel->broken);
        } else if (!channel->waiting.empty()) {
          states->push_back(state_of(*channel));
        }
      }
    });
    lock.lock();
  }
  Channel& channel =
      channel_of(peer.value_or(kAnyRank), message->collective == Collective::kSend, message->tag);
  const Blocks& bytes = channel.sends ? message->input : message->output;
  message->record = channel.recorder.begin(message->collective, message->dtype, ++channel.submitted,
                                           bytes.largest(), message->called_ns);
  enter(std::move(lock), channel, message);
}

void PointToPoint::enter(std::unique_lock<std::mutex> lock, Channel& channel,
                         const std::shared_ptr<TensorOperation>& message) {
  if (channel.peer != kAnyRank) {
    const std::string other = group_->describe(channel.peer);
    message->called = (channel.sends ? "send to " : "recv from ") + other;
    message->source = channel.sends ? group_->rank() : channel.peer;
  }
  if (Group* made = channel.group.get()) {
    lock.unlock();
    return made->submit(message, settings().tuning, true);
  }
  if (!channel.status) {
    Status why = copy_of(channel.status);
    lock.unlock();
    return fail({message}, why);
  }
  channel.waiting.push_back(message);
  fresh_ = true;
  changed_.notify_all();
  if (std::exchange(serving_, true)) return;
  lock.unlock();
  run([this] { serve(); });
}

template <class F>
void PointToPoint::run(F&& f) {
  std::unique_lock lock(mutex_);
  ++running_;
  lock.unlock();
  // Also if it never runs, because the process ends.
  std::shared_ptr<void> counted(this, [](void* self) {
    auto* of = static_cast<PointToPoint*>(self);
    std::lock_guard locked(of->mutex_);
    --of->running_;
    of->changed_.notify_all();
  });
  FutureThreads::process().run([counted = std::move(counted), f = std::forward<F>(f)] { f(); });
}

bool PointToPoint::ending() const {
  return ended_ || engine_.ended() || FutureThreads::process().ending();
}

void PointToPoint::serve() {
  std::shared_ptr<GroupStore::Connection> store;
  milliseconds pause = kShortestPause;
  uint64_t next_look = 0;
  std::unique_lock lock(mutex_);
  while (!ending()) {
    std::vector<Channel*> pending;
    for (const auto& [key, channel] : channels_) {
      if (!channel->waiting.empty() && !channel->making) pending.push_back(channel.get());
    }
    if (pending.empty()) break;
    fresh_ = false;
    lock.unlock();
    bool look = now_ns() >= next_look;
    if (look) next_look = now_ns() + kLookNs;
    int looks = 0;
    for (Channel* channel : pending) {
      bool met = false;
      Status fine = without_exceptions([&] {
        if (!store) store = std::make_shared<GroupStore::Connection>(*store_);
        bool any = channel->peer == kAnyRank;
        looks += any ? group_->ranks() : 1;
        return any ? match(*store, *channel, look) : meet(*store, *channel, look, &met);
      });
      if (!fine) {
        if (store && channel->peer != kAnyRank) tell(*store, *channel, fine);
        fail(*channel, fine);
      }
      if (met) run([this, store, channel] { make(*store, *channel); });
    }
    lock.lock();
    auto longest = kLongestPause * (1 + looks / kChannelsPerPause);
    pause = fresh_ ? kShortestPause : std::min<milliseconds>(2 * pause, longest);
    changed_.wait_for(lock, pause, [this] { return fresh_ || ended_; });
  }
  serving_ = false;
}

// The other rank finds it if it takes part in the making.
void PointToPoint::tell(GroupStore::Connection& store, Channel& channel, const Status& why) {
  ChannelStore part(store.part(), [] { return Status(); });
  PrefixStore of_channel(part, channel.label + "/");
  publish_failure(of_channel, why);
  channel.keys.merge(part.keys());
}

// Says in the store that this rank has called, and looks whether the other one has.
Status PointToPoint::meet(GroupStore::Connection& store, Channel& channel, bool look, bool* met) {
  if (!channel.called) {
    channel.called = true;
    channel.keys.insert(channel.called_by(group_->rank()));
    if (Status said = store.part().set(channel.called_by(group_->rank()), {1}); !said) return said;
  }
  *met = store.part().has(channel.called_by(channel.peer));
  std::unique_lock lock(mutex_);
  channel.making = *met;
  if (*met) return {};
  if (Status late = overdue(channel); !late || ended_) return late;
  const std::string first = describe(channel);
  lock.unlock();
  Status alive = look ? group_->look(channel.peer) : Status();
  if (alive) return {};
  return {alive.code(), first + " failed: " + alive.message()};
}

Status PointToPoint::overdue(const Channel& channel) const {
  for (const auto& message : channel.waiting) {
    if (now_ns() < message->deadline_ns || ended_) continue;
    return {Code::kTimeout, describe(channel) + " timed out after " +
                                seconds_text(message->timeout_ns) + " on " +
                                group_->describe(group_->rank()) + ": " + missing(channel)};
  }
  return {};
}

// Whether a message of `peer` waits for a receive of this rank. A receive that names its sender comes first.
bool PointToPoint::has_sent(GroupStore::Connection& store, Rank peer, int tag) {
  std::unique_lock lock(mutex_);
  Channel& channel = channel_of(peer, false, tag);
  if (!channel.waiting.empty() || !channel.status) return false;
  Group* group = channel.group.get();
  const std::string called = channel.called_by(peer);
  lock.unlock();
  if (group == nullptr) return store.part().has(called);
  return !group->status() || group->is_ahead(0);  // or the receive tells why it is broken
}

// Hands receives from any rank to the channels of ranks that have sent.
Status PointToPoint::match(GroupStore::Connection& store, Channel& channel, bool look) {
  Status gone;
  bool one_is_left = false;
  const auto first = static_cast<Rank>(channel.submitted % static_cast<uint64_t>(group_->ranks()));
  for (int i = 0; i < group_->ranks(); ++i) {
    const Rank peer = (first + i) % group_->ranks();  // another one first each time
    if (peer == group_->rank()) continue;
    if (has_sent(store, peer, channel.tag)) {
      std::unique_lock lock(mutex_);
      if (ended_ || channel.waiting.empty()) return {};
      auto message = std::move(channel.waiting.front());
      channel.waiting.pop_front();
      Channel& of_peer = channel_of(peer, false, channel.tag);
      enter(std::move(lock), of_peer, message);
    }
    Status alive = look ? group_->look(peer) : Status();
    one_is_left |= alive.ok();
    if (!alive && gone.code() != Code::kPeerLost) gone = std::move(alive);
  }
  std::lock_guard lock(mutex_);
  if (channel.waiting.empty()) return {};
  // A rank that has ended may have been to send; one that has left the group was not.
  if (gone.code() == Code::kPeerLost || !one_is_left)
    return {gone.code(), describe(channel) + " failed: " + gone.message()};
  return overdue(channel);
}

// Both ranks have called, and each takes part in the making. What keeps the other one from it is seen in look().
void PointToPoint::make(GroupStore::Connection& store, Channel& channel) {
  const Rank me = group_->rank();
  uint64_t next_look = 0;
  auto look = [&]() -> Status {
    {
      std::lock_guard lock(mutex_);
      if (ending()) return {Code::kAborted, kDestroyedByCaller};
    }
    if (!store.part().has(channel.called_by(channel.peer)))
      return {Code::kAborted, group_->describe(channel.peer) + " takes no part in it any more"};
    if (now_ns() < next_look) return {};
    next_look = now_ns() + kLookNs;
    return group_->look(channel.peer);
  };
  ChannelStore part(store.part(), look);
  std::unique_ptr<Group> group;
  Status made = without_exceptions([&] {
    std::vector<Rank> pair{me, channel.peer};
    if (!channel.sends) std::swap(pair[0], pair[1]);
    return group_->subgroup(part, channel.label, pair, false).into(group);
  });
  if (made) {
    LiveGroups::process().add(group.get());
    // The other rank has what it needs of this one.
    store.part().remove(channel.called_by(me));
  }
  std::unique_lock lock(mutex_);
  channel.making = false;
  channel.keys = part.keys();
  if (!made) channel.keys.insert(channel.called_by(me));
  const std::string first = describe(channel);
  channel.group = std::move(group);
  if (!made) {
    if (ended_) return;  // release() tells it
    lock.unlock();
    return fail(channel, {made.code(), first + " failed: " + made.message()});
  }
  if (!channel.status) channel.group->abort(channel.status.message(), true);
  for (const auto& message : std::exchange(channel.waiting, {}))
    channel.group->submit(message, settings().tuning, true);
}

std::string PointToPoint::name_of(Rank peer) const {
  return peer == kAnyRank ? "any rank" : group_->describe(peer);
}

std::string PointToPoint::missing(const Channel& channel) const {
  if (channel.peer == kAnyRank) return "no rank has called the matching send";
  return has_not_called(*channel.waiting.front(), group_->describe(channel.peer));
}

std::string PointToPoint::describe(const Channel& channel) const {
  if (channel.waiting.empty()) return "a message";
  return describe_message(*channel.waiting.front(), channel.submitted - channel.waiting.size() + 1,
                          name_of(channel.peer), group_->name());
}

void PointToPoint::fail(Channel& channel, const Status& why) {
  std::unique_lock lock(mutex_);
  if (channel.status) {
    channel.status = copy_of(why);
    if (!channel.waiting.empty()) {
      channel.broken = state_of(channel);
      channel.broken->status = copy_of(why);
    }
  }
  Messages messages = std::exchange(channel.waiting, {});
  lock.unlock();
  fail(std::move(messages), why);
}

void PointToPoint::fail(Messages messages, const Status& why) {
  Engine::Lock lock = engine_.lock();
  for (auto& message : messages) engine_.complete(std::move(message), copy_of(why));
  engine_.release(std::move(lock), nullptr);
}

void PointToPoint::abort(const std::string& why) {
  std::vector<Channel*> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, channel] : channels_) all.push_back(channel.get());
  }
  for (Channel* channel : all) {
    std::unique_lock lock(mutex_);
    Group* group = channel->group.get();
    lock.unlock();
    if (group != nullptr) {
      group->abort(why, true);
    } else {
      fail(*channel, {Code::kAborted, why});
    }
  }
}

void PointToPoint::release() {
  if (engine_.forked()) {  // the child has none of the threads
    (void)new auto(std::move(channels_));
    return;
  }
  LiveGroups::process().remove(this);
  std::unique_lock lock(mutex_);
  ended_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return running_ == 0; });
  auto channels = std::exchange(channels_, {});
  lock.unlock();
  std::vector<std::string> keys;
  for (const auto& [key, channel] : channels) {
    keys.insert(keys.end(), channel->keys.begin(), channel->keys.end());
    if (const Messages& waiting = channel->waiting; !waiting.empty()) {
      fail(waiting, {Code::kAborted, std::string(kDestroyedByCaller) + " during " +
                                         describe(*channel) + ": " + missing(*channel)});
    }
    LiveGroups::process().remove(channel->group.get());
    channel->group = nullptr;
  }
  if (keys.empty()) return;
  FutureThreads::process().run([store = store_, keys = std::move(keys)] {
    for (const std::string& key : keys) store->part().remove(key);
  });
}

GroupState PointToPoint::state_of(const Channel& channel) const {
  GroupState whole = group_->state();
  GroupState state;
  state.name = group_->name() + "/" + channel.label;
  if (channel.peer == kAnyRank) {
    state.rank = whole.rank;
    state.members = std::move(whole.members);
    state.hosts = std::move(whole.hosts);
  } else {
    state.rank = channel.sends ? 0 : 1;
    Rank from = channel.sends ? group_->rank() : channel.peer;
    Rank to = channel.sends ? channel.peer : group_->rank();
    for (Rank rank : {from, to}) {
      state.members.push_back(whole.members[static_cast<size_t>(rank)]);
      state.hosts.push_back(whole.hosts[static_cast<size_t>(rank)]);
    }
  }
  state.tallies.resize(state.members.size());
  state.submitted = channel.submitted;
  state.oldest = OldestOperation{channel.submitted - channel.waiting.size() + 1,
                                 channel.waiting.front()->collective,
                                 describe(channel),
                                 {}};
  return state;
}

}  // namespace smddp
