#include "common/signature.h"

namespace smddp {

std::string describe(const Signature& s) {
  Collective called = (s.options & kOfReduceScatter) != 0 ? Collective::kReduceScatter
                      : (s.options & kOfAllReduce) != 0   ? Collective::kAllReduce
                                                          : s.collective;
  std::string text = name_of(called);
  if (s.collective == Collective::kBarrier) return text;
  text += "(" + std::to_string(s.bytes) + (pairwise(s.collective) ? " bytes" : " bytes in all");
  if (s.segments > 1) text += " in " + std::to_string(s.segments) + " tensors";
  if (s.dtype != Dtype::kBytes) text += std::string(", ") + name_of(s.dtype);
  if (s.reduce_op != ReduceOp::kNone) text += std::string(", ") + name_of(s.reduce_op);
  if ((s.options & kPartialsInFp32) != 0) text += ", partial sums in fp32";
  if ((s.options & kLogPattern) != 0) text += ", logarithmic pattern";
  if ((s.options & kJointPattern) != 0) text += ", joint pattern";
  if ((s.options & kSumsOnCpu) != 0) text += ", summed by the CPU";
  if (called != s.collective) text += ", summed by devices";
  return text + ")";
}

std::string disagreement(const std::string& other, const Signature& theirs, const std::string& self,
                         const Signature& ours) {
  std::string text = other + " called " + describe(theirs) + " while " + self + " called ";
  Signature of_these = ours;
  of_these.digest = (ours.digest & UINT32_MAX) | (theirs.digest & ~uint64_t{UINT32_MAX});
  if (of_these == theirs) return text + "it for other parameters of the same sizes";
  text += describe(ours);
  if (describe(theirs) != describe(ours)) return text;
  if (of_these.fragment_bytes == theirs.fragment_bytes)
    return text + " with tensors of other sizes or types, in another order, or with another root";
  return text + " and cuts it into other parts: " + std::to_string(theirs.fragment_bytes) +
         " and " + std::to_string(ours.fragment_bytes) + " bytes of each rank at a time";
}

}  // namespace smddp
