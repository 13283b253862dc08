#include "joining/rendezvous.h"

#include <algorithm>

#include "common/random.h"
#include "topology/topology.h"

namespace smddp {
namespace {

// How often a rank looks whether it is answered, and rank 0 whether a number has changed. The more
// ranks, the more look at one store. Not measured.
constexpr std::chrono::milliseconds kLastPause{50}, kReread{100};
constexpr size_t kNumberBytes = 8;
constexpr const char* kNoStop = "never";

constexpr const char* kArrived = "arrived";

std::string answered_key(int rank) { return key_of("answered", rank); }
std::string met(const std::string& name, int rank) { return key_of(name + "/met", rank); }

std::string hexadecimal(const std::vector<uint8_t>& bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : bytes) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

std::chrono::milliseconds longest_pause(int ranks) {
  return std::max(kLastPause, std::chrono::milliseconds(ranks));
}

}  // namespace

Result<std::string> Rendezvous::meet() {
  Value number(kNumberBytes);
  if (!fill_random(number.data(), number.size())) {
    return Status(Code::kUnavailable, "the kernel gives no random bytes");
  }
  if (Status set = store_.set(key_of(kArrived, rank_), number); !set) return set;
  return rank_ == 0 ? lead(hexadecimal(number)) : follow(number);
}

// Rank 0 reads the numbers until it has met all ranks, which is before it makes the group.
void Rendezvous::forget() { store_.remove(key_of(kArrived, rank_)); }

Result<std::string> Rendezvous::lead(const std::string& name) {
  auto until = Clock::now() + timeout_;
  std::vector<Value> answered(static_cast<size_t>(ranks_));
  if (Status s = answer(name, &answered); !s) return s;
  auto reread = Clock::now() + kReread;
  Pause pause(longest_pause(ranks_));
  for (int rank = 1; rank < ranks_;) {
    if (store_.has(met(name, rank))) {
      store_.remove(met(name, rank));
      ++rank;
      continue;
    }
    if (Clock::now() >= until) return did_not_join(store_, {rank});
    if (Clock::now() >= reread) {
      if (Status s = answer(name, &answered); !s) return s;
      reread = Clock::now() + kReread;
    }
    pause.sleep();
  }
  return name;
}

Status Rendezvous::answer(const std::string& name, std::vector<Value>* answered) {
  std::vector<std::string> keys;
  for (int rank = 1; rank < ranks_; ++rank) keys.push_back(key_of(kArrived, rank));
  if (keys.empty()) return {};
  auto numbers = store_.get(keys, kNoStop);
  if (!numbers) return numbers.status().code() == Code::kTimeout ? missing() : numbers.status();
  for (int rank = 1; rank < ranks_; ++rank) {
    const Value& number = numbers.value()[static_cast<size_t>(rank) - 1];
    Value& known = (*answered)[static_cast<size_t>(rank)];
    if (number == known) continue;
    Value reply = number;
    reply.insert(reply.end(), name.begin(), name.end());
    if (Status set = store_.set(answered_key(rank), reply); !set) return set;
    known = number;
  }
  return {};
}

Result<std::string> Rendezvous::follow(const Value& number) {
  auto until = Clock::now() + timeout_;
  Pause pause(longest_pause(ranks_));
  for (;;) {
    auto replies = store_.get({answered_key(rank_)}, kNoStop);
    if (!replies) return replies.status().code() == Code::kTimeout ? missing() : replies.status();
    const Value& reply = replies.value()[0];
    auto end = reply.begin() + static_cast<std::ptrdiff_t>(std::min(reply.size(), kNumberBytes));
    if (std::equal(reply.begin(), end, number.begin(), number.end())) {
      std::string name(end, reply.end());
      store_.remove(answered_key(rank_));
      if (Status set = store_.set(met(name, rank_), {1}); !set) return set;
      return name;
    }
    if (Clock::now() >= until) return missing();
    pause.sleep();
  }
}

// Where every rank has left a number, this one's or its predecessor's, rank 0 has not come: it answers.
Status Rendezvous::missing() const {
  std::vector<int> late = smddp::missing(store_, kArrived, all_ranks(ranks_));
  return did_not_join(store_, late.empty() ? std::vector<int>{0} : late);
}

}  // namespace smddp
