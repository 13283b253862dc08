// One pass over the node's outboxes and the rails: an operation is cut into rounds, each covers
// bytes [begin, begin + part) of every rank's block. A round is a state machine that progress()
// pushes on; it never blocks. allgather.cc and reduce_scatter.cc each hold one kind, whole.
#pragma once

#include <memory>
#include <string>

#include "collectives/operation.h"
#include "fabric/wire.h"

namespace smddp {

class Round {
 public:
  Round(Communicator& group, std::shared_ptr<Operation> operation, uint64_t seq, size_t begin,
        size_t bytes)
      : group_(group), operation_(std::move(operation)), seq_(seq), begin_(begin), limit_(bytes) {}
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;
  virtual ~Round() = default;

  // Once, before any other call.
  virtual void start() = 0;
  // Says READY to the remote ranks whose data is still to come.
  virtual void announce() = 0;
  // Pushes to the node while `may_push` (rounds push in order), takes in, sends out. True if
  // anything moved.
  virtual bool progress(bool may_push) = 0;
  virtual bool pushed() const = 0;  // nothing more will go into the outbox
  virtual bool complete()
      const = 0;  // and all results are in place, and no peer still reads this rank's memory
  // A rank has started this round and can take data.
  virtual void on_ready(Rank source) = 0;
  // Checked by the group: key, seq, signature. The rest is for the round to check; an error ends
  // the group.
  virtual Status on_data(const wire::Header& header, const std::byte* payload) = 0;
  // Whom it waits for, as a sentence's end: "no data from rank 3 (host b)".
  virtual std::string waiting_for() const = 0;
  // False where those it names may themselves be held up by a rank that this one can't see.
  virtual bool knows_whom() const { return true; }

  Operation& operation() const { return *operation_; }
  const std::shared_ptr<Operation>& operation_ptr() const { return operation_; }
  uint64_t seq() const { return seq_; }
  bool heard(int local_peer) const { return heard_[static_cast<size_t>(local_peer)]; }
  bool after_previous = false;  // starts only when round seq - 1 is complete

 protected:
  // Bytes of `block` of `blocks` that fall into this round.
  size_t part(const Blocks& blocks, Rank block) const {
    size_t bytes = blocks.bytes(block);
    return bytes <= begin_ ? 0 : std::min(limit_, bytes - begin_);
  }

  bool heard_all() const { return std::find(heard_.begin(), heard_.end(), false) == heard_.end(); }
  // Pops local peer i's head, noting whether it was that peer's last piece of this round.
  void take(int i, const intranode::Piece& head);

  Communicator& group_;
  std::shared_ptr<Operation> operation_;
  const uint64_t seq_;
  const size_t begin_;
  const size_t limit_;
  std::vector<bool> heard_;     // by local peer: its last piece has been taken
  uint64_t exposed_until_ = 0;  // the outbox must be read up to here before memory may change
};

std::unique_ptr<Round> make_allgather(Communicator& group, std::shared_ptr<Operation> operation,
                                      uint64_t seq, size_t begin, size_t bytes);
std::unique_ptr<Round> make_reduce_scatter(Communicator& group,
                                           std::shared_ptr<Operation> operation, uint64_t seq,
                                           size_t begin, size_t bytes);

}  // namespace smddp
