// What two ranks on other hosts, which know the job's secret, may send to this one: any type, fragment,
// offset, payload and order, coded and damaged too, also forged and repeated messages. Over the tests' network, which
// delivers in the order of sending.
#include <unistd.h>

#include "../cpp/shuffled_network.h"
#include "coding/piece.h"
#include "common/signature.h"
#include "group.h"
#include "joining/job_secret.h"

using namespace smddp;

namespace {

constexpr int kOwn = 1;
constexpr int kRanks = 3;
constexpr size_t kMostOperations = 4;
constexpr int kTurns = 6;

struct Deaf : transport::Sink {
  void on_message(const std::byte*, size_t) override {}
  void on_peer_lost(transport::Peer, const Status&) override {}
};

struct Other {
  std::unique_ptr<transport::Transport> endpoint;
  transport::Peer victim = 0;
  uint64_t sent = 0;
  Deaf sink;
};

class Job {
 public:
  Job() {
    ShuffledNetwork::only().orderly = true;
    process_ = fuzz::value_of(Process::create(ShuffledTransport::open));
    for (int r : {0, 2}) others_[r].endpoint = fuzz::value_of(ShuffledTransport::open());
  }

  void run(fuzz::Input& input) {
    infos_.assign(kRanks, {});
    for (int r : {0, 2}) {
      infos_[static_cast<size_t>(r)].host = "host-" + std::to_string(r);
      infos_[static_cast<size_t>(r)].fabric = {
          FabricAddress::State::kOpen, others_[r].endpoint->facts().address, {}, {}};
      // The network is known: measuring it would wait for answers that do not come.
      infos_[static_cast<size_t>(r)].network = {digest_of_text(text_of(NetworkModel{})), true};
      others_[r].sent = 0;
    }
    ++runs_;
    std::memcpy(infos_[0].key.data(), &runs_, sizeof runs_);
    infos_[0].drawn = {3, 4};
    key_ = message_key(infos_[0].drawn, infos_[0].key);
    fuzz::OthersStore store(infos_, kOwn, [&](const RankInfo& own) {
      for (int r : {0, 2})
        others_[r].victim = fuzz::value_of(others_[r].endpoint->add_peer(own.fabric.address));
    });
    Group::Options options{"fuzz", 60'000'000'000ull, "host-1", false, true};
    options.network = NetworkModel{};
    auto group = fuzz::value_of(Group::create(*process_, store, kOwn, kRanks, options));
    fuzz::Operations operations;
    for (int actions = 0; actions < 64 && !input.empty(); ++actions) {
      size_t action = input.up_to(7);
      if (action == 0) {
        if (operations.size() < kMostOperations) operations.submit(*group, input);
      } else {
        send(input, operations);
      }
      turn();
    }
    // Both say that they write no more: the group's end waits for no one.
    for (uint32_t r : {0u, 2u}) {
      wire::Header header = header_of(r);
      header.type = wire::Type::kClosed;
      header.counter = uint64_t{1} << 40;
      post(header, {}, false);
    }
    turn();
    group.reset();
    turn();
  }

 private:
  void turn() {
    for (int i = 0; i < kTurns; ++i) {
      process_->engine().kick(process_->engine().lock());
      for (auto& [rank, other] : others_) (void)other.endpoint->poll(other.sink);
    }
  }

  wire::Header header_of(uint32_t source) {
    wire::Header header{};
    header.magic = wire::kMagic;
    header.key = infos_[0].key;
    header.source = source;
    header.target = kOwn;
    return header;
  }

  void send(fuzz::Input& input, const fuzz::Operations& operations) {
    wire::Header header = header_of(input.up_to(1) == 0 ? 0 : 2);
    header.type = static_cast<wire::Type>(1 + input.up_to(4));
    header.seq = input.up_to(7) == 7 ? input.offset(1) : input.up_to(5);
    header.signature = fuzz::signature_from(input, operations);
    uint64_t shard = header.signature.bytes / kRanks;
    header.offset = input.offset(shard);
    uint64_t raw = 0;
    std::vector<uint8_t> payload = payload_from(input, shard, &raw);
    header.bytes = static_cast<uint32_t>(payload.size());
    header.raw_bytes = raw > 0 ? static_cast<uint32_t>(raw) : header.bytes;
    header.counter = others_[static_cast<int>(header.source)].sent++;
    bool forged = false;
    switch (input.up_to(15)) {
      case 12:  // one that may have come
        header.counter = input.offset(header.counter);
        break;
      case 13:
        header.source = input.number<uint32_t>();
        break;
      case 14:
        header.target = input.number<uint32_t>();
        break;
      case 15:
        forged = true;
        break;
      default:
        break;
    }
    post(header, payload, forged);
  }

  // `*raw`: the bytes that it stands for, if it is coded.
  std::vector<uint8_t> payload_from(fuzz::Input& input, uint64_t shard, uint64_t* raw) {
    switch (input.up_to(5)) {
      case 0:
        return {};
      case 1: {
        wire::Grant grant{};
        grant.region = static_cast<uint32_t>(input.offset(4096));
        grant.chunk_bytes = static_cast<uint32_t>(input.offset(64 << 10));
        grant.bytes = input.offset(shard);
        grant.address = input.number<uint64_t>();
        grant.keys[0] = input.number<uint8_t>();
        std::vector<uint8_t> bytes(sizeof grant);
        std::memcpy(bytes.data(), &grant, sizeof grant);
        return bytes;
      }
      case 2:
        return std::vector<uint8_t>(std::min<uint64_t>(shard, 16 << 10), 7);
      case 3:
        return std::vector<uint8_t>(input.number<uint16_t>() / 4, 8);
      case 4: {
        std::vector<std::byte> values(std::min<uint64_t>(shard, input.number<uint16_t>()));
        for (size_t i = 1; i < values.size(); i += 2) values[i] = std::byte{0x3c};
        std::vector<uint8_t> code(coding::most_coded(values.size()));
        auto* to = reinterpret_cast<std::byte*>(code.data());
        code.resize(coding::encode_piece(to, values.data(), values.size(), Dtype::kBFloat16));
        if (input.up_to(3) == 0) code.resize(input.offset(code.size()) % (code.size() + 1));
        if (!code.empty() && input.up_to(1) == 0)
          code[input.number<uint16_t>() % code.size()] = input.number<uint8_t>();
        *raw = input.up_to(7) == 0 ? input.offset(values.size()) : values.size();
        return code;
      }
      default:
        return input.some(255);
    }
  }

  void post(wire::Header header, const std::vector<uint8_t>& payload, bool forged) {
    Other& other = others_[header.source == 0 ? 0 : 2];
    const void* hashed = payload.empty() ? static_cast<const void*>(&header) : payload.data();
    header.mac = wire::mac_of(key_, header, hashed) ^ static_cast<uint64_t>(forged);
    size_t size = sizeof header + payload.size();
    transport::MessageBuffer* buffer = nullptr;
    for (int i = 0; i < 1000 && buffer == nullptr; ++i) {
      buffer = other.endpoint->acquire(other.victim, size <= transport::kControlMessage);
      if (buffer == nullptr) turn();
    }
    if (buffer == nullptr) return;
    std::memcpy(buffer->data, &header, sizeof header);
    if (!payload.empty()) std::memcpy(buffer->data + sizeof header, payload.data(), payload.size());
    other.endpoint->post(buffer, size);
  }

  std::unique_ptr<Process> process_;
  std::map<int, Other> others_;
  std::vector<RankInfo> infos_;
  siphash::Key key_;
  uint64_t runs_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Job& job = *new Job();  // never destroyed: the engine's thread runs to the end
  fuzz::Input input(data, size);
  job.run(input);
  return 0;
}
