#include "topology/members.h"

namespace smddp {

std::string Members::describe(Rank rank) const {
  bool known = rank >= 0 && rank < ranks();
  std::string text = "rank " + std::to_string(known ? called(rank) : rank);
  if (known) text += " (" + host_names_[static_cast<size_t>(rank)] + ")";
  return text;
}

}  // namespace smddp
