// AllReduce of what fits one slot, inside a host: one exchange. Each rank pushes its whole vector, and each
// rank sums all vectors in rank order, as ReduceScatter would. So the results are the same on all ranks,
// and the same as those of the two fragments that larger operations take. The group makes it by
// make_allreduce(), if the plan says so.
#include "collectives/fragment.h"
#include "kernels/reduce.h"

namespace smddp {
namespace {

using intranode::Piece;

class AllReduce final : public Fragment {
 public:
  using Fragment::Fragment;

  void start() override {
    expect_pieces();
    for (Rank block = 0; block < members_.ranks(); ++block)
      bytes_ += operation_->input.bytes(block);
    theirs_.assign(heard_.size(), nullptr);
    sources_.assign(heard_.size() + 1, nullptr);
  }

  bool progress(bool may_push) override {
    bool moved = may_push && !pushed_ && push();
    return (pushed_ && !summed_ && sum()) || moved;
  }

  bool pushed() const override { return pushed_; }
  bool complete() const override { return summed_; }

  std::string waiting_for() const override {
    std::string names;
    for (int i = 0; i < local_.count(); ++i) {
      const Piece* head = local_.inbox(i).head();
      if (head != nullptr && head->seq == seq_) continue;
      names += (names.empty() ? "" : ", ") + members_.describe(local_.rank(i));
    }
    return names.empty() ? "nothing" : "no data from " + names;
  }

 private:
  bool push() {
    std::byte* slot = local_.outbox().next();
    if (slot == nullptr) return false;
    local_.outbox().fill(bytes_, [&](bool streaming) {
      for (Rank block = 0; block < members_.ranks(); ++block) {
        size_t bytes = operation_->input.bytes(block);
        operation_->input.read(block, 0, slot, bytes, streaming);
        slot += bytes;
      }
    });
    Piece piece;
    piece.bytes = bytes_;
    piece.last = 1;
    publish(piece);
    return pushed_ = true;
  }

  // False until all peers' vectors are here. The output may be the input itself: the peers read this
  // rank's slot, not its input.
  bool sum() {
    for (int i = 0; i < local_.count(); ++i) {
      const Piece* head = inbox_head(i);
      if (head == nullptr) return false;
      if (head->bytes != bytes_ || head->extents > 0) {
        fail(
            {Code::kInternal, members_.describe(local_.rank(i)) + " pushed a piece out of bounds"});
        return true;
      }
      theirs_[static_cast<size_t>(i)] = local_.inbox(i).bytes();
    }
    size_t at = 0;
    for (Rank block = 0; block < members_.ranks(); ++block) {
      size_t bytes = operation_->input.bytes(block);
      for (size_t done = 0; done < bytes;) {
        std::byte *own = nullptr, *to = nullptr;
        size_t n = std::min(operation_->input.contiguous(block, done, &own),
                            operation_->output.contiguous(block, done, &to));
        reduce(to, own, at, n);
        done += n;
        at += n;
      }
    }
    for (int i = 0; i < local_.count(); ++i) {
      count(*local_.inbox(i).head(), bytes_, false);
      take(i, *local_.inbox(i).head());
    }
    return summed_ = true;
  }

  void reduce(std::byte* to, const std::byte* own, size_t at, size_t bytes) {
    auto own_position = static_cast<size_t>(members_.topology().local_index(members_.rank()));
    for (size_t k = 0; k < sources_.size(); ++k) {
      sources_[k] = k == own_position ? own : theirs_[k < own_position ? k : k - 1] + at;
    }
    int divisor = operation_->divisor_among(members_.ranks());
    kernels::reduce(to, sources_.data(), sources_.size(), bytes / operation_->element_size,
                    operation_->dtype, operation_->reduce_op, divisor);
  }

  bool pushed_ = false, summed_ = false;
  size_t bytes_ = 0;
  SmallVector<const std::byte*, 8> theirs_;  // by local peer
  SmallVector<const void*, 8> sources_;      // by rank
};

}  // namespace

std::unique_ptr<Fragment> make_allreduce(const FragmentContext& context,
                                         std::shared_ptr<Operation> operation, uint64_t seq) {
  return std::make_unique<AllReduce>(context, std::move(operation), seq, 0, SIZE_MAX);
}

}  // namespace smddp
