#include "flows/rail_turns.h"

#include "flows/fragment_flows.h"

namespace smddp {

bool RailTurns::free_for(const FragmentFlows* flows) const {
  for (const FragmentFlows* earlier : in_flight_) {
    if (earlier == flows) return true;
    if (earlier->hold_rails()) return false;
  }
  return true;
}

bool RailTurns::soon_free_for(const FragmentFlows* flows) const {
  int held = 0;
  for (const FragmentFlows* earlier : in_flight_) {
    if (earlier == flows) return true;
    if (!earlier->hold_rails()) continue;
    if (++held > 1 || !earlier->in_last_steps()) return false;
  }
  return true;
}

}  // namespace smddp
