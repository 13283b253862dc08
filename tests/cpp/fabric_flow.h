// A region and the chunks that fill it, for the tests of endpoints.
#pragma once

#include <algorithm>
#include <random>
#include <utility>

#include "fabric_endpoints.h"
#include "flows/flow.h"
#include "transport/wire.h"

namespace smddp::ofi {

// One transfer: the receiver's region, and the sender's half of it. Memory around the region must
// stay as it is.
struct Flow : WrittenChunks {
  static constexpr size_t kMargin = 64;
  static constexpr std::byte kUntouched{0xa5};

  Flow(size_t bytes, size_t chunk_bytes, uint32_t seed)
      : chunk_bytes(chunk_bytes), source(bytes), memory(bytes + 2 * kMargin, kUntouched) {
    std::mt19937 random(seed);
    for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  }
  bool open(TestEndpoint& receiver, Peer from) {
    to = receiver.endpoint.get();
    grant.chunk_bytes = static_cast<uint32_t>(chunk_bytes);
    grant.bytes = source.size();
    return to->open_region(from, memory.data() + kMargin, source.size(), &region, &grant);
  }
  // For another transfer of the same bytes.
  void reset() {
    std::fill(memory.begin(), memory.end(), kUntouched);
    arrived = 0;
    sent = told = batches.completed(0);  // none is under way
    closed = false;
    written = 0;
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
      if (sent % 7 == 2 && size <= sender.endpoint->facts().max_message) {
        MessageBuffer* buffer = sender.endpoint->acquire(to_receiver, false);
        if (buffer == nullptr) return;
        std::memcpy(buffer->data, data, size);
        sender.endpoint->write(buffer, grant, static_cast<uint32_t>(sent), size, batches.pending());
      } else if (!sender.endpoint->write(to_receiver, grant, static_cast<uint32_t>(sent), data,
                                         size, batches.pending())) {
        return;
      }
      ++sent;
    }
  }
  // Tells the receiver of the written chunks that are there before this message.
  void tell(TestEndpoint& sender, Peer to_receiver) {
    if (told == sent) return;
    size_t written = sender.endpoint->facts().ordered ? sent : batches.completed(sent);
    if (written == told) return;
    MessageBuffer* buffer = sender.endpoint->acquire(to_receiver, true);
    if (buffer == nullptr) return;
    Stamp stamp{kWritten, static_cast<uint32_t>(written)};
    WrittenChunks* self = this;
    std::memcpy(buffer->data, &stamp, sizeof stamp);
    std::memcpy(buffer->data + sizeof stamp, &self, sizeof self);
    sender.endpoint->post(buffer, sizeof stamp + sizeof self);
    told = written;
  }
  void on_written(uint32_t chunks) override {
    ASSERT_LE(chunks, this->chunks());
    if (closed || chunks <= written) return;
    if (chunks > to->arrived(region)) {
      lost = true;
      return;
    }
    written = chunks;
    if (seen_at_once) see();
  }
  // The chunks that the sender has spoken of, all at once where a device sees them late.
  void see() {
    bool last = !closed && written == chunks() && to->visible(region);
    if (arrived == written || (!seen_at_once && !last)) return;
    size_t from = std::exchange(arrived, written) * chunk_bytes;
    size_t end = std::min(arrived * chunk_bytes, source.size());
    EXPECT_EQ(std::memcmp(memory.data() + kMargin + from, source.data() + from, end - from), 0);
  }
  bool complete() {
    if (!seen_at_once) see();
    return arrived == chunks();
  }
  bool over() { return complete() && sent == chunks() && pending() == 0; }
  uint32_t pending() const { return batches.count(); }
  void close(bool abandoned = false) {
    closed = true;
    to->close_region(region, abandoned);
  }
  void check_margins() const {
    for (size_t i = 0; i < kMargin; ++i) {
      ASSERT_EQ(memory[i], kUntouched);
      ASSERT_EQ(memory[memory.size() - 1 - i], kUntouched);
    }
  }

  // false: in a device's memory, where the chunks are visible only once the device's owner sees all: see() asks.
  bool seen_at_once = true;
  Endpoint* to = nullptr;
  bool closed = false;
  bool lost = false;  // a connection, with chunks
  size_t chunk_bytes, sent = 0, told = 0;
  std::vector<std::byte> source, memory;
  size_t written = 0, arrived = 0;  // chunks, from the first on
  uint32_t region = 0;
  WriteBatches batches;
  wire::Grant grant = {};
};

// Chunks, if the provider has writes, and messages both ways between two endpoints, until all have arrived.
inline void exchange(TestEndpoint& a, TestEndpoint& b) {
  constexpr size_t kMessages = 100;
  const bool writes = a.endpoint->facts().writes;
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  Flow there(200 * 5000 + 7, 5000, 1), back(300 * 4000 + 1, 4000, 2);
  ASSERT_EQ(there.open(b, to_a), writes);
  ASSERT_EQ(back.open(a, to_b), writes);
  drive({&a, &b}, [&] {
    if (writes) {
      there.send(a, to_b);
      back.send(b, to_a);
    }
    if (a.sent[to_b] < kMessages) a.send(to_b, 30000);
    if (b.sent[to_a] < kMessages) b.send(to_a, 100, true);
    return (!writes || (there.over() && back.over())) && b.inbox.messages == kMessages &&
           a.inbox.messages == kMessages && a.endpoint->idle() && b.endpoint->idle();
  });
  for (Flow* flow : {&there, &back}) {
    flow->check_margins();
    if (writes) flow->close();
  }
  for (TestEndpoint* each : {&a, &b}) EXPECT_EQ(each->endpoint->counters().foreign_writes, 0u);
}

}  // namespace smddp::ofi
