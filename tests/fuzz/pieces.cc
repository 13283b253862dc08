// What a hostile rank of the same host may put into its shared segment: pieces of any shard, offset, length
// and extents, in any order, and the words in the segment's head.
#include <unistd.h>

#include "group.h"
#include "intranode/outbox.h"
#include "intranode/presence.h"

using namespace smddp;
using namespace smddp::intranode;

namespace {

constexpr int kOwn = 1;
constexpr int kRanks = 2;
constexpr size_t kMostOperations = 3;

class Job {
 public:
  Job()
      : process_(fuzz::value_of(Process::create())),
        presence_(fuzz::value_of(Presence::create())),
        memory_(1 << 20) {}

  void run(fuzz::Input& input) {
    std::vector<RankInfo> infos(kRanks);
    RankInfo& other = infos[0];
    other.host = "host";
    ++runs_;
    std::memcpy(other.key.data(), &runs_, sizeof runs_);
    other.drawn = {3, 4};
    other.token = presence_->token();
    other.pid = ::getpid();
    other.presence_fd = presence_->presence_fd();
    other.wake_fd = presence_->wake_fd();
    outbox_ = fuzz::value_of(Outbox::create(other.key, 1));
    outbox_->expect(1);
    other.outbox_fd = outbox_->fd();
    Mapping segment = fuzz::value_of(map_shared(::getpid(), outbox_->fd(), "the fuzz input"));
    head_ = reinterpret_cast<OutboxHead*>(segment.data());
    if (input.up_to(15) == 15) head_->capacity = input.number<uint32_t>();
    fuzz::OthersStore store(infos, kOwn, [&](const RankInfo& own) {
      inbox_ = fuzz::value_of(Inbox::open(own.pid, own.outbox_fd, own.key, 0, 1, true));
    });
    Group::Options options{"fuzz", 60'000'000'000ull, "host", input.up_to(1) == 0};
    auto group = Group::create(*process_, store, kOwn, kRanks, options);
    if (group.ok()) drive(*group.value(), input);
    if (group.ok()) group.value().reset();
    operations_ = {};
  }

 private:
  void drive(Group& group, fuzz::Input& input) {
    for (int actions = 0; actions < 64 && !input.empty(); ++actions) {
      size_t action = input.up_to(15);
      if (action < 3) {
        if (operations_.size() < kMostOperations) operations_.submit(group, input);
      } else if (action < 13) {
        publish(input);
      } else if (action == 13) {
        for (Lane lane : {Lane::kSums, Lane::kGathers}) {
          for (; inbox_->head(lane) != nullptr; inbox_->pop(lane)) {
          }
        }
      } else {
        write_head(input);
      }
      process_->engine().kick(process_->engine().lock());
    }
  }

  void publish(fuzz::Input& input) {
    std::byte* slot = outbox_->next(Lane::kSums);  // the lane of all pieces of a group in one host
    if (slot == nullptr) return;
    Piece piece;
    piece.seq = input.up_to(7) == 7 ? input.offset(1) : input.up_to(3);
    piece.signature = fuzz::signature_from(input, operations_);
    uint64_t shard = piece.signature.bytes / kRanks;
    piece.offset = input.offset(shard);
    piece.bytes = input.up_to(3) == 0 ? input.offset(shard) : std::min(shard, kSlotBytes);
    piece.shard = static_cast<uint32_t>(input.offset(kRanks));
    piece.last = static_cast<uint32_t>(input.up_to(2));
    if (input.up_to(2) == 0) {
      std::vector<Extent> extents = extents_from(input, shard);
      std::copy(extents.begin(), extents.end(), reinterpret_cast<Extent*>(slot));
      bool right = input.up_to(3) != 3;
      piece.extents = static_cast<uint32_t>(right ? extents.size() : input.offset(kSlotExtents));
    }
    outbox_->publish(Lane::kSums, piece);
  }

  std::vector<Extent> extents_from(fuzz::Input& input, uint64_t shard) {
    std::vector<Extent> extents(input.up_to(5));
    for (Extent& extent : extents) {
      extent = {memory_.data() + input.number<uint8_t>(), input.offset(shard)};
      if (input.up_to(7) == 7) extent.address = reinterpret_cast<std::byte*>(input.offset(0));
    }
    return extents;
  }

  void write_head(fuzz::Input& input) {
    std::vector<uint8_t> reason = input.some(255);
    std::memset(head_->reason, input.number<uint8_t>(), sizeof head_->reason);
    std::copy(reason.begin(), reason.end(), head_->reason);
    // Behind the reason, too: nothing ends it.
    if (input.up_to(1) == 1) {
      for (Lane lane : {Lane::kSums, Lane::kGathers}) {
        for (size_t left = kSlots; left > 0; --left) {
          std::byte* slot = outbox_->next(lane);
          if (slot == nullptr) break;
          std::memset(static_cast<void*>(slot), 1, kSlotBytes);
          Piece piece;
          std::memset(static_cast<void*>(&piece), 1, sizeof piece);
          outbox_->publish(lane, piece);
        }
      }
    }
    head_->aborted_from = input.offset(1);
    head_->denied = input.number<uint8_t>();
    head_->attached = input.number<uint8_t>();
    head_->probe_address = input.number<uint64_t>();
    head_->aborted = static_cast<intranode::GaveUp>(input.up_to(2));
  }

  std::unique_ptr<Process> process_;
  std::unique_ptr<Presence> presence_;
  std::vector<std::byte> memory_;  // of the hostile rank: where extents may lie
  std::unique_ptr<Outbox> outbox_;
  std::unique_ptr<Inbox> inbox_;
  OutboxHead* head_ = nullptr;
  fuzz::Operations operations_;
  uint64_t runs_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Job& job = *new Job();  // never destroyed: the engine's thread runs to the end
  fuzz::Input input(data, size);
  job.run(input);
  return 0;
}
