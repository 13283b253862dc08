// A group, as the engine sees it. Implemented in group/; called by the engine, always under
// its lock.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/status.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace smddp {

class Progressable {
 public:
  virtual ~Progressable() = default;
  virtual bool busy() const = 0;
  // Advances what can be advanced. True if anything moved. Called in a tight loop.
  virtual bool progress() = 0;
  // Checks for late and dead ranks: at intervals, and before the engine sleeps. True if progress()
  // then has something to do.
  virtual bool watch(uint64_t now_ns) = 0;
  virtual uint64_t deadline_ns() const = 0;  // the earliest, UINT64_MAX for none
  // False: the message is not authentic, and has changed nothing.
  virtual bool on_message(const wire::Header& header, const std::byte* payload) = 0;
  virtual void on_peer_lost(transport::Peer peer, const Status& why) = 0;
  // The process's transport has failed: nothing more is sent or received over it.
  virtual void on_fabric_failed(const Status& why) = 0;
  // False: it sends and receives nothing over the transport any more, which may be closed.
  virtual bool needs_network() const = 0;
  // The transport is closed. Only if the group does not need it.
  virtual void on_network_closed() = 0;
  // A call into the group threw, for want of memory for instance: breaks it. progress() then ends its
  // operations.
  virtual void fail(Status why) noexcept = 0;
  // The process ends: tells the peers if they still wait for this rank. busy() until they have taken what this rank
  // has sent.
  virtual void leave() = 0;
};

}  // namespace smddp
