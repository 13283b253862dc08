// How a process is asked whether it lives: what it publishes about that, and the two messages of such
// an exchange. Knows no socket. Liveness and its two sides use it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "common/signature.h"
#include "common/status.h"
#include "common/tcp_sockets.h"

namespace smddp::liveness {

using Secret = std::array<uint8_t, 16>;

// What a process publishes over the store. A process that asks shows `ask`, the answer shows `answer`:
// so a stranger learns nothing, and a foreign process that has got the port can't answer.
struct Contact {
  std::array<uint8_t, 16> ip{};  // IPv4 in the first four bytes
  uint16_t port = 0;
  uint8_t ipv6 = 0;
  uint8_t reserved[5] = {};
  Secret ask{}, answer{};
  void set_address(const SocketAddress& address);
  SocketAddress address() const;
  std::string text() const { return address().text(); }  // "192.0.2.2:4711"
};
static_assert(sizeof(Contact) == 56);

std::vector<uint8_t> pack(const Contact& contact);
// kInvalid if it is damaged.
Result<Contact> unpack(const std::vector<uint8_t>& published);

// What is sent over a connection: one question, one answer with its reason behind it. Little-endian,
// no padding.
inline constexpr uint32_t kMagic = 0x314c4d53;  // "SML1"

inline constexpr int64_t kNobody = -1;

struct Question {
  uint32_t magic = kMagic;
  uint32_t zero = 0;
  Secret secret{};  // Contact::ask
  JobKey group{};   // the group in which the sender waits
};
static_assert(sizeof(Question) == 40);

struct Answer {
  uint32_t magic = kMagic;
  uint32_t reason_bytes = 0;        // after the answer, at most kReasonBytes
  Secret secret{};                  // Contact::answer
  uint64_t left_from = UINT64_MAX;  // the fragment from which on this process has left the group
  int64_t lost_rank = kNobody;      // of the group, with which it has no connection any more
};
static_assert(sizeof(Answer) == 40);

using Process = uint32_t;  // index of a process that was met, dense from 0

// Whether a process has been reached. kSettled: it has, or the wait for that was given up.
enum class Reach : uint8_t { kAwaited, kRefuses, kSettled };

// What a process knows of another one that it waits for. Made by Prober, read by the groups.
struct Verdict {
  bool ended = false;        // its port refuses connections, and it has answered before
  bool refuses = false;      // its port refused the latest connection; a firewall may do so, too
  uint64_t answered_ns = 0;  // its latest answer; 0: none
  uint64_t silent_ns = 0;    // time since then in which it was asked in vain
  uint64_t left_from = UINT64_MAX;  // the fragment from which on it has left the group
  std::string reason;               // why it has
  int64_t lost_rank = kNobody;      // of the group, with which it has no connection any more
};

}  // namespace smddp::liveness
