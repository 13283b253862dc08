// Decides how an operation is carried out, and cuts it into fragments. Used by Group alone, under the engine's
// lock; must not know how the fragments fare.
#pragma once

#include <memory>
#include <string>

#include "collectives/fragment.h"
#include "collectives/operation.h"
#include "collectives/selector.h"
#include "collectives/slot_exchange.h"
#include "group/fragment_queue.h"

namespace smddp {

class FragmentMaker {
 public:
  // `algorithm`: if an operation's tuning leaves it open.
  FragmentMaker(const FragmentContext& context, Algorithm algorithm, FragmentQueue& queue)
      : context_(context), shape_(context.shape), algorithm_(algorithm), queue_(queue) {}

  // Decides the plan of an operation, and so what its messages say of it.
  void plan(Operation& operation, const Tuning& tuning) const;
  // The ways that the bytes of a planned operation take, as statistics() names them.
  std::string path_of(const Operation& operation) const;
  // Whether a planned operation is a SlotExchange.
  bool takes_slots(const Operation& operation) const {
    return operation.plan().whole && shape_.nodes == 1;
  }
  // Adds the fragments of a planned operation to the queue.
  void enqueue(const std::shared_ptr<Operation>& operation);
  // The same of one that has begun as an exchange.
  void enqueue(const std::shared_ptr<Operation>& operation, SlotExchange begun);

 private:
  void enqueue_gathers(const std::shared_ptr<Operation>& operation);
  void enqueue_sums(const std::shared_ptr<Operation>& operation);

  const FragmentContext& context_;
  const Shape& shape_;
  const Algorithm algorithm_;
  FragmentQueue& queue_;
};

}  // namespace smddp
