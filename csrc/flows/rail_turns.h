// Which of a group's fragments in flight may use the rails: the fragments that keep step take turns, in
// the order of their sequence numbers. Must not know what flows carry. The flows of each fragment enter
// at its start, and leave at its end; they ask for their turn. Under the engine's lock.
#pragma once

#include <vector>

namespace smddp {

class FragmentFlows;

class RailTurns {
 public:
  // Flows of later fragments enter later.
  void enter(const FragmentFlows* flows) { in_flight_.push_back(flows); }
  // Does nothing if they have not entered.
  void leave(const FragmentFlows* flows) { std::erase(in_flight_, flows); }

  bool is_oldest(const FragmentFlows* flows) const { return in_flight_.front() == flows; }
  // True if no earlier fragment that keeps step still has data to come.
  bool free_for(const FragmentFlows* flows) const;
  // True if at most one earlier fragment that keeps step still has data to come, and that one is in its
  // last steps.
  bool soon_free_for(const FragmentFlows* flows) const;

 private:
  std::vector<const FragmentFlows*> in_flight_;
};

}  // namespace smddp
