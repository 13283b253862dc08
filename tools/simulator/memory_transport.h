// What transports inside one process have in common: peers by number, buffers and how many of them a peer may hold,
// regions by key. A subclass moves the bytes. The simulator's transport is one, that of the tests another.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/exceptions.h"
#include "transport/rail_balance.h"
#include "transport/transport.h"

namespace smddp {

class MemoryTransport : public transport::Transport {
 public:
  using Peer = transport::Peer;

  struct Buffer : transport::MessageBuffer {
    Peer to = 0;
    bool control = false;
    std::unique_ptr<std::byte[]>
        memory;  // from its first use on; pages that are not written take no memory
  };
  // What its sender gets back once a message or a chunk has been sent.
  struct Sent {
    Peer to = 0;
    size_t nic = 0;
    size_t bytes = 0;
    Buffer* buffer = nullptr;     // nullptr: it left the caller's memory
    uint32_t* pending = nullptr;  // of a chunk
    bool failed = false;          // its peer is lost
  };
  // A message, or a chunk, on its way.
  struct Load {
    uint64_t from = 0, to = 0;       // numbers of transports
    std::vector<std::byte> message;  // empty: a chunk
    const std::byte* data = nullptr;
    size_t bytes = 0;
    uint64_t address = 0, key = 0;
    Sent sent;
    bool is_message() const { return !message.empty(); }
  };
  // Shared by the transports that reach one another. Under its mutex where they belong to several threads.
  struct Shared {
    struct Window {
      uint64_t address;
      size_t bytes;
    };
    // Whether the chunk goes into an open region.
    bool opens(const Load& chunk) const {
      auto found = windows.find(chunk.key);
      if (found == windows.end()) return false;
      const Window& window = found->second;
      return chunk.address >= window.address &&
             chunk.address + chunk.bytes <= window.address + window.bytes;
    }
    std::mutex mutex;
    std::map<uint64_t, MemoryTransport*> ends;  // by number
    std::map<uint64_t, Window> windows;         // open regions, by key
    uint64_t next_number = 1, next_key = 77;
  };

  MemoryTransport(Shared& shared, size_t nics, const std::string& name)
      : shared_(shared), buffers_(kDataBuffers + kControlBuffers) {
    std::lock_guard lock(shared_.mutex);
    number_ = shared_.next_number++;
    shared_.ends[number_] = this;
    balance_.set_rails(nics);
    for (size_t i = 0; i < buffers_.size(); ++i) {
      buffers_[i].control = i >= kDataBuffers;
      free_[buffers_[i].control].push_back(&buffers_[i]);
    }
    // As long as an address of libfabric's efa; it ends with the number.
    facts_.address.assign(48 + 32 * nics, 0xfe);
    std::memcpy(&facts_.address[facts_.address.size() - sizeof number_], &number_, sizeof number_);
    facts_.rails = facts_.description = facts_.links = name;
    facts_.nics = nics;
    facts_.max_message = transport::kMaxMessage;
    facts_.writes = true;
  }
  ~MemoryTransport() override {
    std::lock_guard lock(shared_.mutex);
    shared_.ends.erase(number_);
    for (const auto& [region, keys] : regions_) {
      for (uint64_t key : keys) shared_.windows.erase(key);
    }
  }

  const transport::Counters& counters() const override { return counters_; }
  Result<Peer> add_peer(const std::vector<uint8_t>& address) override {
    uint64_t number = 0;
    if (address.size() != facts_.address.size() || address[0] != facts_.address[0])
      return Status(Code::kInvalid, "an address of another network");
    std::memcpy(&number, &address[address.size() - sizeof number], sizeof number);
    auto found = known_.find(number);
    if (found != known_.end() && !peers_[found->second].lost) return found->second;
    peers_.push_back({number});
    return known_[number] = static_cast<Peer>(peers_.size() - 1);
  }
  void give_up(Peer peer, const std::string& why) override { lose(peer, {Code::kPeerLost, why}); }
  bool is_lost(Peer peer) const override { return peers_[peer].lost; }
  bool has_lost_peers() const override { return has_lost_; }

  transport::MessageBuffer* acquire(Peer to, bool control) override {
    std::vector<Buffer*>& free = free_[control];
    if (peers_[to].held[control] >= free.size()) return nullptr;
    Buffer* buffer = free.back();
    free.pop_back();
    ++peers_[to].held[control];
    buffer->capacity = control ? transport::kControlMessage : facts_.max_message;
    if (!buffer->memory)
      buffer->memory = std::make_unique_for_overwrite<std::byte[]>(buffer->capacity);
    buffer->data = buffer->memory.get();
    buffer->to = to;
    return buffer;
  }
  void post(transport::MessageBuffer* at, size_t size) override {
    auto* buffer = static_cast<Buffer*>(at);
    ++counters_.messages_sent;
    counters_.bytes_sent += size;
    Load load;
    load.message.assign(buffer->data, buffer->data + size);
    load.bytes = size;
    load.sent = {buffer->to, balance_.choose(), size, buffer};
    begin(std::move(load));
  }

  bool open_region(Peer from, std::byte* memory, size_t bytes, uint32_t* region,
                   wire::Grant* grant) override {
    if (peers_[from].lost || bytes == 0) return false;
    std::lock_guard lock(shared_.mutex);
    *region = next_region_++;
    grant->address = reinterpret_cast<uintptr_t>(memory);
    for (size_t nic = 0; nic < facts_.nics; ++nic) {
      grant->keys[nic] = regions_[*region][nic] = shared_.next_key++;
      shared_.windows[grant->keys[nic]] = {grant->address, bytes};
    }
    ++counters_.regions;
    return true;
  }
  bool visible(uint32_t) override { return true; }
  void close_region(uint32_t region, bool) override {
    std::lock_guard lock(shared_.mutex);
    for (uint64_t key : regions_.at(region)) shared_.windows.erase(key);
    regions_.erase(region);
    --counters_.regions;
  }
  bool write(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data, size_t bytes,
             uint32_t* pending) override {
    if (peers_[to].lost) return true;
    if (peers_[to].chunks >= std::min(kChunksPerPeer, kChunks - chunks_)) return false;
    ++peers_[to].chunks;
    ++chunks_;
    begin(
        chunk(grant, index, data, {to, balance_.choose_for_chunk(index), bytes, nullptr, pending}));
    return true;
  }
  void write(transport::MessageBuffer* at, const wire::Grant& grant, uint32_t index, size_t bytes,
             uint32_t* pending) override {
    auto* buffer = static_cast<Buffer*>(at);
    begin(chunk(grant, index, buffer->data,
                {buffer->to, balance_.choose_for_chunk(index), bytes, buffer, pending}));
  }

  Status reaches(const transport::MemoryOwner&) const override {
    return {Code::kUnavailable, facts_.rails + " has no memory of devices"};
  }
  Status lend(std::byte*, size_t, const transport::MemoryOwner& owner) override {
    return reaches(owner);
  }
  void take_back(std::byte*) override {}

  bool idle() const override { return under_way_ == 0; }
  int wait_fd() const override { return -1; }
  int sleep_limit_ms() override { return 1; }
  bool close() override { return true; }

 protected:
  // As libfabric's endpoint has them (csrc/transport/ofi).
  static constexpr size_t kDataBuffers = 24, kControlBuffers = 64, kReceives = 32;
  static constexpr size_t kChunks = 256, kChunksPerPeer = 16;

  // Brings the load to its end. finish() is called once the sender hears of that.
  virtual void start(Load load) = 0;
  void finish(const Sent& sent) {
    --under_way_;
    balance_.finished(sent.nic, sent.bytes);
    give_back(sent);
    if (sent.failed) lose(sent.to, {Code::kPeerLost, "its transport is closed"});
  }
  // An exception must not cost what is behind this message.
  void deliver(transport::Sink& sink, const std::vector<std::byte>& message) {
    ++counters_.messages_received;
    counters_.bytes_received += message.size();
    try {
      sink.on_message(message.data(), message.size());
    } catch (...) {
      sink.on_exception(status_of_exception());
    }
  }
  int tell_losses(transport::Sink& sink) {
    auto losses = std::exchange(losses_, {});
    for (auto& [peer, why] : losses) sink.on_peer_lost(peer, why);
    return static_cast<int>(losses.size());
  }

  Shared& shared_;
  uint64_t number_ = 0;

 private:
  struct PeerState {
    uint64_t number;
    bool lost = false;
    size_t held[2] = {0, 0};  // buffers: of data, of control messages
    size_t chunks = 0;        // under way from the caller's memory
  };

  static Load chunk(const wire::Grant& grant, uint32_t index, const std::byte* data,
                    const Sent& sent) {
    Load load;
    load.data = data;
    load.bytes = sent.bytes;
    load.address = grant.address + uint64_t{index} * grant.chunk_bytes;
    load.key = grant.keys[sent.nic];
    load.sent = sent;
    if (sent.pending != nullptr) ++*sent.pending;
    return load;
  }
  void begin(Load load) {
    if (peers_[load.sent.to].lost) return give_back(load.sent);
    if (!load.is_message()) {
      ++counters_.chunks_sent;
      counters_.chunk_bytes_sent += load.bytes;
    }
    ++under_way_;
    balance_.sent(load.sent.nic, load.bytes);
    load.from = number_;
    load.to = peers_[load.sent.to].number;
    start(std::move(load));
  }
  // Its buffer and its memory are the callers' again.
  void give_back(const Sent& sent) {
    if (sent.pending != nullptr) --*sent.pending;
    if (sent.buffer != nullptr) {
      --peers_[sent.to].held[sent.buffer->control];
      free_[sent.buffer->control].push_back(sent.buffer);
    } else {
      --peers_[sent.to].chunks;
      --chunks_;
    }
  }
  void lose(Peer peer, Status why) {
    if (std::exchange(peers_[peer].lost, true)) return;
    has_lost_ = true;
    losses_.emplace_back(peer, std::move(why));
  }

  transport::Counters counters_;
  RailBalance balance_;
  std::deque<PeerState> peers_;
  std::map<uint64_t, Peer> known_;  // by number
  std::deque<Buffer> buffers_;
  std::vector<Buffer*> free_[2];
  std::map<uint32_t, std::array<uint64_t, wire::kMaxRails>> regions_;  // keys by NIC
  uint32_t next_region_ = 0;
  size_t chunks_ = 0;                            // under way from the callers' memory
  size_t under_way_ = 0;                         // messages and chunks
  std::vector<std::pair<Peer, Status>> losses_;  // not told yet
  bool has_lost_ = false;
};

}  // namespace smddp
