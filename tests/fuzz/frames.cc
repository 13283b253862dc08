// Bytes at the port for messages, from a process that knows the token or does not, in pieces, over loopback.
#include <sys/socket.h>

#include <cstdlib>
#include <utility>

#include "transport/ofi/sockets/message_sockets.h"
#include "input.h"

using namespace smddp;
using namespace smddp::fabric;

namespace {

constexpr size_t kMaxMessage = 512;

class Messages : public MessageReceiver {
 public:
  void on_message(const std::byte* data, size_t size) override {
    if (size == 0 || size > kMaxMessage || reinterpret_cast<uintptr_t>(data) % 8 != 0) std::abort();
    if (!greeted) std::abort();
    last = data[size - 1];
  }
  void on_damage(const Status& why) override {
    if (why.ok()) std::abort();
  }
  bool greeted = false;
  volatile std::byte last{};
};

// A frame of `bytes` bytes, whose prefix may say something else.
std::vector<uint8_t> frame(fuzz::Input& input, std::vector<uint8_t> bytes) {
  FramePrefix prefix{kFrameMagic, static_cast<uint32_t>(bytes.size())};
  size_t wrong = input.up_to(15);
  if (wrong == 1) prefix.bytes = static_cast<uint32_t>(input.offset(kMaxMessage));
  if (wrong == 2) prefix.magic ^= input.number<uint8_t>();
  std::vector<uint8_t> framed(sizeof prefix);
  std::memcpy(framed.data(), &prefix, sizeof prefix);
  framed.insert(framed.end(), bytes.begin(), bytes.end());
  framed.resize(frame_of(bytes.size()));
  return framed;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  SocketAddress at = SocketAddress::parse("127.0.0.1", 0).value();
  auto sockets = std::move(MessageSockets::open(at, kMaxMessage, -1).value());
  fuzz::Input input(data, size);
  at.set_port(sockets->port());
  FileDescriptor socket;
  if (begin_connect(at, &socket) != 0) return 0;
  Messages messages;
  Hello hello{sockets->token(), {}};
  messages.greeted = input.up_to(7) != 0;
  if (!messages.greeted) hello.to[input.up_to(hello.to.size() - 1)] ^= 1;
  const auto* said = reinterpret_cast<const uint8_t*>(&hello);
  std::vector<uint8_t> stream(sizeof(FramePrefix));
  const FramePrefix first{kFrameMagic, sizeof hello};
  std::memcpy(stream.data(), &first, sizeof first);
  stream.insert(stream.end(), said, said + sizeof hello);
  while (!input.empty()) {
    std::vector<uint8_t> next = frame(input, input.some(255));
    stream.insert(stream.end(), next.begin(), next.end());
    if (input.up_to(3) == 0) {  // in pieces
      size_t cut = input.up_to(255) % stream.size();
      (void)!::send(socket.get(), stream.data(), cut, MSG_NOSIGNAL | MSG_DONTWAIT);
      stream.erase(stream.begin(), stream.begin() + static_cast<ptrdiff_t>(cut));
      bool rails = false;
      (void)sockets->progress(messages, &rails);
    }
  }
  (void)!::send(socket.get(), stream.data(), stream.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  bool rails = false;
  for (int i = 0; i < 3; ++i) (void)sockets->progress(messages, &rails);
  socket = FileDescriptor();
  for (int i = 0; i < 2; ++i) (void)sockets->progress(messages, &rails);
  return 0;
}
