#include "collectives/operation.h"

namespace smddp {

std::string describe_message(const Operation& operation, uint64_t number, const std::string& peer,
                             const std::string& group) {
  const bool sends = operation.collective == Collective::kSend;
  const Blocks& blocks = sends ? operation.input : operation.output;
  std::string text = std::string(name_of(operation.collective)) + (sends ? " to " : " from ") +
                     peer + " of " + std::to_string(blocks.largest()) + " bytes";
  if (operation.dtype != Dtype::kBytes) text += std::string(", ") + name_of(operation.dtype);
  if (operation.tag != 0) text += ", tag " + std::to_string(operation.tag);
  return text + ", #" + std::to_string(number) + " of group '" + group + "'";
}

std::string has_not_called(const Operation& operation, const std::string& peer) {
  return peer + " has not called the matching " +
         name_of(operation.collective == Collective::kSend ? Collective::kReceive
                                                           : Collective::kSend);
}

}  // namespace smddp
