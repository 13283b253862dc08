#include "group/remote_watch.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/clock.h"

namespace smddp {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kLookNs = kSecond / 10;
// A rank of which nothing has come for so long is asked whether it lives.
constexpr uint64_t kQuietNs = kSecond;
// What a rank sent before it ended, or left the group, may arrive until so long after anything else of
// it. Later it will not: it was lost with a connection.
constexpr uint64_t kInFlightNs = 2 * kSecond;
// Bytes that have left, of which none has come for so long, were lost with a connection: some providers
// connect anew and tell neither side. The sender has to say twice that they have left, a reminder apart:
// the second answer shows that this rank has looked for them since the first one. A rank that was stopped,
// or that shares its core with many, has not.
constexpr uint64_t kLostNs = 2 * kSecond;
constexpr int kLostAnswers = 2;
// For how long a connection that broke waits for the answer whether the process has ended.
constexpr uint64_t kSuspectNs = 3 * kSecond;

}  // namespace

RemoteWatch::RemoteWatch(const JobKey& key, const Members& members, RemotePeers& remote,
                         const FragmentQueue& fragments, LivenessOfRanks liveness,
                         uint64_t silence_ns)
    : key_(key),
      members_(members),
      remote_(remote),
      fragments_(fragments),
      liveness_(std::move(liveness)),
      silence_ns_(silence_ns) {
  by_rank_.resize(static_cast<size_t>(members_.ranks()));
  for (Rank rank : remote_.ranks()) {
    by_rank_[static_cast<size_t>(rank)] = static_cast<uint32_t>(remotes_.size());
    remotes_.emplace_back().rank = rank;
  }
}

void RemoteWatch::on_lost(transport::Peer peer, const Status& why) {
  for (Remote& remote : remotes_) {
    if (remote_.peer(remote.rank) != peer || !remote.why_broken.ok()) continue;
    remote.why_broken = why;
    remote.broken_ns = UINT64_MAX;  // look() reads the clock
    ++broken_;
  }
  next_look_ns_ = 0;
}

void RemoteWatch::leave(uint64_t from, const std::string& reason) noexcept {
  if (liveness_.service == nullptr) return;
  try {
    auto lost = std::ranges::find_if(remotes_,
                                     [](const Remote& remote) { return !remote.why_lost.empty(); });
    liveness_.service->left(key_, from, reason,
                            lost == remotes_.end() ? liveness::kNobody : lost->rank);
  } catch (const std::exception&) {  // then the others learn it by the aborts only
  }
}

void RemoteWatch::on_sent_all(Rank source, uint64_t seq) {
  Remote& remote = remotes_[by_rank_[static_cast<size_t>(source)]];
  if (seq != remote.oldest_lacking) return;  // each fragment in flight asks
  if (std::exchange(remote.sent_all, seq) != seq) remote.said_sent_all = 0;
  ++remote.said_sent_all;
}

Status RemoteWatch::look(uint64_t now, bool one_gave_up) {
  if (now < next_look_ns_ || (fragments_.in_flight().empty() && broken_ == 0)) return {};
  next_look_ns_ = now + kLookNs;
  find_awaited(now);
  bool anew = one_gave_up && !std::exchange(asked_anew_, true);
  for (size_t i = 0; i < remotes_.size(); ++i) {
    if (Status status = judge(i, now, one_gave_up, anew); !status) return status;
  }
  return {};
}

void RemoteWatch::find_awaited(uint64_t now) {
  for (Remote& remote : remotes_) {
    remote.awaited = false;
    remote.amount = 0;
    remote.oldest_lacking = UINT64_MAX;
  }
  for (const auto& fragment : fragments_.in_flight()) {
    fragment->flows().for_each_awaited([&](Rank rank, uint64_t bytes, uint64_t, uint64_t amount) {
      Remote& remote = remotes_[by_rank_[static_cast<size_t>(rank)]];
      if (bytes > 0) remote.oldest_lacking = std::min(remote.oldest_lacking, fragment->seq());
      remote.awaited = true;
      remote.amount += amount + (fragment->seq() << 32);
    });
  }
  for (Remote& remote : remotes_) {
    bool moved = std::exchange(remote.last_amount, remote.amount) != remote.amount;
    if (moved) remote.sent_all = UINT64_MAX;  // and on_sent_all() counts anew
    if (!remote.awaited) {
      remote.quiet_since_ns = 0;
    } else if (moved || remote.quiet_since_ns == 0) {
      remote.quiet_since_ns = now;
    }
  }
}

Status RemoteWatch::judge(size_t i, uint64_t now, bool one_gave_up, bool anew) {
  Remote& remote = remotes_[i];
  if (remote.broken_ns == UINT64_MAX) remote.broken_ns = now;
  bool broken = remote.broken_ns != 0;
  uint64_t quiet = remote.awaited ? now - remote.quiet_since_ns : 0;
  remote.verdict = {};
  if (quiet < kQuietNs && !broken && !(one_gave_up && remote.awaited)) return {};
  if (broken && remote.why_broken.code() == Code::kUnavailable) return at_limit(remote);
  // It may have been lost before this group could be told.
  if (!broken && remote_.transport().is_lost(remote_.peer(remote.rank)))
    on_lost(remote_.peer(remote.rank), {Code::kPeerLost, "it was lost before"});
  const liveness::Verdict& verdict = ask(i, now, anew);
  bool left = verdict.left_from != UINT64_MAX;
  if (left && (verdict.left_from <= fragments_.first_incomplete() || quiet >= kInFlightNs))
    return {Code::kAborted, verdict.reason};
  if (verdict.ended) {
    if (broken && !remote.awaited) {  // it may have done its part; the next operation asks again
      remote.broken_ns = 0;
      --broken_;
    }
    if (quiet < kInFlightNs) return {};
    return lost(remote, ended(i));
  }
  if (broken && (verdict.answered_ns > remote.broken_ns || now - remote.broken_ns > kSuspectNs))
    return lost(remote, "the connection to it broke: " + remote.why_broken.message());
  if (remote.oldest_lacking != UINT64_MAX && remote.sent_all == remote.oldest_lacking &&
      remote.said_sent_all >= kLostAnswers && quiet >= kLostNs)
    return lost(remote, "the connection to it broke: it has sent all, and not all has arrived");
  if (silence_ns_ != 0 && verdict.silent_ns >= silence_ns_)
    return lost(remote, silent(verdict.silent_ns));
  return {};
}

Status RemoteWatch::ask_now(Rank rank, uint64_t now) {
  uint32_t i = by_rank_[static_cast<size_t>(rank)];
  if (i >= remotes_.size() || remotes_[i].rank != rank) return {};
  const liveness::Verdict& verdict = ask(i, now);
  if (verdict.left_from != UINT64_MAX) return {Code::kAborted, verdict.reason};
  std::string what = verdict.ended ? ended(i) : "";
  bool silent_long = verdict.silent_ns >= silence_ns_ && silence_ns_ != 0;
  if (silent_long) what = silent(verdict.silent_ns);
  if (what.empty()) return {};
  return {Code::kPeerLost, members_.describe(rank) + " is lost: " + what};
}

std::string RemoteWatch::ended(size_t i) const {
  return "its process has ended, or has destroyed its groups (" +
         liveness_.service->text(*liveness_.processes[i]) + " refuses connections)";
}

std::string RemoteWatch::silent(uint64_t silent_ns) const {
  return "it has not answered for " + seconds_text(silent_ns) +
         ". Its process was not seen to end: it is stopped, or its host or network is gone "
         "(silence_seconds is " +
         seconds_text(silence_ns_) + ")";
}

const liveness::Verdict& RemoteWatch::ask(size_t i, uint64_t now, bool anew) {
  Remote& remote = remotes_[i];
  if (liveness_.service != nullptr && liveness_.processes[i]) {
    remote.verdict = liveness_.service->ask(*liveness_.processes[i], key_, anew);
    remote.verdict_ns = now;
  }
  return remote.verdict;
}

void RemoteWatch::find_silent(uint64_t now, bool or_left) noexcept {
  if (now < next_look_ns_) return;
  next_look_ns_ = now + kLookNs;
  bool anew = !std::exchange(asked_anew_, true);
  try {
    for (size_t i = 0; i < remotes_.size(); ++i) {
      const liveness::Verdict& verdict = ask(i, now, anew);
      bool left = or_left && verdict.left_from != UINT64_MAX;
      uint64_t& lost_us_ns = remotes_[i].lost_us_ns;
      if (verdict.lost_rank == members_.rank() && lost_us_ns == 0) lost_us_ns = now;
      // What it had sent before may be on the way for a moment.
      bool lost = lost_us_ns != 0 && now - lost_us_ns >= kLookNs;
      if (left || lost || verdict.ended || verdict.silent_ns >= kQuietNs)
        remote_.expect_nothing(remotes_[i].rank);
    }
  } catch (const std::exception&) {  // then the end takes its longest
  }
}

Connection RemoteWatch::connection(Rank rank, uint64_t now) const {
  using State = Connection::State;
  const Remote& remote = remotes_[by_rank_[static_cast<size_t>(rank)]];
  const liveness::Verdict& verdict = remote.verdict;
  uint64_t last = remote_.last_message_ns(rank);
  Connection found{rank, State::kNew, {}, 0, {}, remote_.rails_text()};
  if (last != 0) found.last_message_ns = now - std::min(now, last);
  if (verdict.ended) {
    found.state = State::kEnded;
  } else if (!remote.why_lost.empty() || !remote.why_broken.ok()) {
    found.state = State::kLost;
    found.why = remote.why_lost.empty() ? remote.why_broken.message() : remote.why_lost;
  } else if (verdict.left_from != UINT64_MAX) {
    found.state = State::kLeft;
    found.why = verdict.reason;
  } else if (verdict.silent_ns >= kQuietNs && last <= remote.verdict_ns) {
    found.state = State::kSilent;
    found.silent_ns = verdict.silent_ns;
  } else if (last != 0) {
    found.state = State::kConnected;
  } else if (remote_.has_sent(rank)) {
    found.state = State::kUnanswered;
  }
  return found;
}

Status RemoteWatch::lost(Remote& remote, const std::string& what) {
  remote.why_lost = what;
  std::string text = members_.describe(remote.rank) + " is lost" + during() + ": " + what;
  remote_.transport().give_up(remote_.peer(remote.rank), text);
  return {Code::kPeerLost, text};
}

// The other rank may well live: it is this one that can't go on.
Status RemoteWatch::at_limit(const Remote& remote) {
  return {Code::kUnavailable, members_.describe(members_.rank()) + " can't send to " +
                                  members_.describe(remote.rank) + during() + ": " +
                                  remote.why_broken.message() +
                                  ". Raise the limits of its process: files (ulimit -n), pinned "
                                  "memory (ulimit -l), memory"};
}

std::string RemoteWatch::during() const {
  if (fragments_.in_flight().empty()) return "";
  return " during " + fragments_.in_flight().front()->describe();
}

}  // namespace smddp
