// A region and the chunks that fill it, for the tests of endpoints.
#pragma once

#include <algorithm>
#include <random>
#include <set>

#include "transport/ofi/chunk_receiver.h"
#include "transport/ofi/chunk_sender.h"
#include "transport/wire.h"
#include "fabric_endpoints.h"
#include "flows/write_batches.h"

namespace smddp::fabric {

// One transfer: the receiver's region, and the sender's half of it. Memory around the region must
// stay as it is.
struct Flow : ChunkObserver, WrittenChunks {
  static constexpr size_t kMargin = 64;
  static constexpr std::byte kUntouched{0xa5};

  Flow(size_t bytes, size_t chunk_bytes, uint32_t seed)
      : chunk_bytes(chunk_bytes), source(bytes), memory(bytes + 2 * kMargin, kUntouched) {
    std::mt19937 random(seed);
    for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  }
  bool open(TestEndpoint& receiver, Peer from) {
    to = receiver.endpoint.get();
    return receiver.endpoint->chunk_receiver().open(from, memory.data() + kMargin, source.size(),
                                                    chunk_bytes, this, &grant);
  }
  // For another transfer of the same bytes.
  void reset() {
    std::fill(memory.begin(), memory.end(), kUntouched);
    arrived.clear();
    sent = told = batches.completed(0);  // none is under way
    closed = false;
  }
  size_t chunks() const { return (source.size() + chunk_bytes - 1) / chunk_bytes; }
  size_t size_of(size_t index) const {
    return std::min(chunk_bytes, source.size() - index * chunk_bytes);
  }
  // Sends as many chunks as there is room for; every third from a message buffer, if it fits.
  void send(TestEndpoint& sender, Peer to_receiver) {
    send_chunks(sender, to_receiver);
    tell(sender, to_receiver);
  }
  void send_chunks(TestEndpoint& sender, Peer to_receiver) {
    while (sent < chunks()) {
      const std::byte* data = source.data() + sent * chunk_bytes;
      size_t size = size_of(sent);
      if (sent % 7 == 2 && size <= sender.endpoint->max_message()) {
        SendBuffer* buffer = sender.endpoint->messages().acquire(to_receiver, false);
        if (buffer == nullptr) return;
        std::memcpy(buffer->data, data, size);
        sender.endpoint->messages().post_chunk(buffer, grant, static_cast<uint32_t>(sent), size,
                                               batches.pending());
      } else if (!sender.endpoint->chunk_sender().send(to_receiver, grant,
                                                       static_cast<uint32_t>(sent), data, size,
                                                       batches.pending())) {
        return;
      }
      ++sent;
    }
  }
  // Tells the receiver of the written chunks that are there before this message.
  void tell(TestEndpoint& sender, Peer to_receiver) {
    if (sender.endpoint->transfer() != Transfer::kWrites || told == sent) return;
    size_t written = sender.endpoint->orders_messages() ? sent : batches.completed(sent);
    if (written == told) return;
    SendBuffer* buffer = sender.endpoint->messages().acquire(to_receiver, true);
    if (buffer == nullptr) return;
    Stamp stamp{kWritten, static_cast<uint32_t>(written)};
    WrittenChunks* self = this;
    std::memcpy(buffer->data, &stamp, sizeof stamp);
    std::memcpy(buffer->data + sizeof stamp, &self, sizeof self);
    sender.endpoint->messages().post(buffer, sizeof stamp + sizeof self);
    told = written;
  }
  void on_written(uint32_t chunks) override {
    if (closed) return;
    EXPECT_TRUE(to->chunk_receiver().confirm(grant.region, chunks));
  }
  void on_chunk(uint32_t index) override {
    EXPECT_LT(index, chunks());
    EXPECT_TRUE(arrived.insert(index).second) << "told twice";
    if (!seen_at_once) return check_all();
    EXPECT_EQ(std::memcmp(memory.data() + kMargin + index * chunk_bytes,
                          source.data() + index * chunk_bytes, size_of(index)),
              0);
  }
  void check_all() const {
    if (!complete()) return;
    EXPECT_EQ(std::memcmp(memory.data() + kMargin, source.data(), source.size()), 0);
  }
  bool complete() const { return arrived.size() == chunks(); }
  bool over() const { return complete() && sent == chunks() && pending() == 0; }
  uint32_t pending() const { return batches.count(); }
  void close(bool all_arrived) {
    closed = true;
    to->chunk_receiver().close(grant.region, all_arrived);
  }
  void check_margins() const {
    for (size_t i = 0; i < kMargin; ++i) {
      ASSERT_EQ(memory[i], kUntouched);
      ASSERT_EQ(memory[memory.size() - 1 - i], kUntouched);
    }
  }

  // false: in a device's memory, where the chunks are visible only once the last one is told.
  bool seen_at_once = true;
  Endpoint* to = nullptr;
  bool closed = false;
  size_t chunk_bytes, sent = 0, told = 0;
  std::vector<std::byte> source, memory;
  std::set<uint32_t> arrived;
  WriteBatches batches;
  wire::Grant grant = {};
};

}  // namespace smddp::fabric
