// Questions to the Responder and answers to the Prober, over loopback.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "input.h"
#include "liveness/prober.h"
#include "liveness/responder.h"
#include "liveness/sockets.h"

using namespace smddp;
using namespace smddp::liveness;

namespace {

constexpr const char* kLoopback = "127.0.0.1";
constexpr int kTurns = 6;

void send_all(const FileDescriptor& socket, const std::vector<uint8_t>& bytes) {
  (void)!::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

template <class Side>
void turn(Side& side, uint64_t now) {
  std::vector<pollfd> fds;
  if constexpr (requires { side.watch(fds); }) {
    side.watch(fds);
  } else {
    side.watch(fds, now);
  }
  (void)::poll(fds.data(), fds.size(), 0);
  side.serve(fds.data(), now);
}

// A message of the protocol if the input says so, then any bytes.
template <class Message>
std::vector<uint8_t> message_from(fuzz::Input& input, Message message) {
  std::vector<uint8_t> bytes;
  if (input.up_to(3) != 0) {
    bytes.resize(sizeof message);
    std::memcpy(bytes.data(), &message, sizeof message);
  }
  std::vector<uint8_t> more = input.some(255);
  bytes.insert(bytes.end(), more.begin(), more.end());
  return bytes;
}

void question(fuzz::Input& input) {
  static auto responder = std::move(Responder::open(kLoopback).value());
  static uint64_t now = 1;
  JobKey group{};
  group[0] = input.number<uint8_t>();
  std::vector<uint8_t> reason = input.some(255);
  responder->left(group, input.number<uint8_t>(), {reason.begin(), reason.end()}, 3);
  FileDescriptor socket;
  if (begin_connect(responder->contact(), &socket) != 0) return;
  Question asked;
  asked.secret = responder->contact().ask;
  asked.group = group;
  asked.group[0] ^= static_cast<uint8_t>(input.up_to(1));
  send_all(socket, message_from(input, asked));
  for (int i = 0; i < kTurns; ++i) turn(*responder, ++now);
  uint8_t answer[2 * kReasonBytes];
  ssize_t n = ::recv(socket.get(), answer, sizeof answer, MSG_DONTWAIT);
  if (n > static_cast<ssize_t>(sizeof(Answer) + kReasonBytes)) std::abort();
}

void answer(fuzz::Input& input) {
  static Contact contact;
  static const FileDescriptor listener = std::move(listen_at(kLoopback, &contact).value());
  Prober prober;
  bool fresh = false;
  Process process = prober.meet(contact, &fresh);
  uint64_t now = 1;
  turn(prober, ++now);
  FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  Answer said;
  said.left_from = input.number<uint8_t>();
  said.reason_bytes = static_cast<uint32_t>(input.offset(kReasonBytes));
  send_all(socket, message_from(input, said));
  for (int i = 0; i < kTurns; ++i) {
    turn(prober, ++now);
    send_all(socket, input.some(255));
  }
  Verdict verdict = prober.ask(process, {}, ++now, false, &fresh);
  if (verdict.reason.size() > kReasonBytes) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  if (input.up_to(1) == 0) {
    question(input);
  } else {
    answer(input);
  }
  return 0;
}
