// The side of a process that answers: its listening socket and the connections of processes that ask.
// Knows no group but those that were left. Called by the thread of Liveness; left() by any thread.
#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/file_descriptor.h"
#include "common/status.h"
#include "liveness/contact.h"

namespace smddp::liveness {

class Responder {
 public:
  // `ip`: as listen_at().
  static Result<std::unique_ptr<Responder>> open(const std::string& ip);
  ~Responder();

  // Closes the port and all connections.
  void close();

  const Contact& contact() const { return contact_; }

  // This process takes no part in `group` from fragment `from` on. The first call for a group counts.
  void left(const JobKey& group, uint64_t from, const std::string& reason, int64_t lost);

  // Appends the descriptors to poll. serve() takes those entries, in the same order.
  void watch(std::vector<pollfd>& fds) const;
  void serve(const pollfd* fds, uint64_t now);
  // When to call serve() even if nothing came; UINT64_MAX: never.
  uint64_t next_ns() const;

 private:
  // One process that asks. Each is closed after a short time, whatever it sends.
  struct Visitor {
    FileDescriptor socket;
    uint64_t until_ns = 0;
    Question question;
    size_t heard = 0;
    std::string answer;
    size_t answered = 0;
  };
  struct Left {
    JobKey group;
    uint64_t from;
    std::string reason;
    int64_t lost;
  };

  Responder() = default;
  void accept_all(uint64_t now);
  // A connection that waits, or -1 if there is none, or no descriptor for it.
  int accept_one(uint64_t now);
  // False if the visitor is to be closed.
  bool attend(Visitor& visitor);
  std::string answer_to(const JobKey& group);

  Contact contact_;
  FileDescriptor listener_;
  FileDescriptor spare_;  // given up to take a connection where no other descriptor is left
  uint64_t no_descriptor_until_ns_ = 0;
  std::vector<Visitor> visitors_;
  std::mutex left_mutex_;
  std::deque<Left> left_;
};

}  // namespace smddp::liveness
