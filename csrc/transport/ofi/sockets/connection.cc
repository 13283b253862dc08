#include "transport/ofi/sockets/connection.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace smddp::fabric {
namespace {

constexpr std::byte kZeros[8] = {};
constexpr uint32_t kReadable = EPOLLIN | EPOLLRDHUP;

// The parts of a frame behind its first `sent` bytes; how many there are.
size_t rest_of(const FramePrefix& prefix, std::span<const std::byte> message, size_t sent,
               std::array<iovec, 3>& parts) {
  size_t padding = frame_of(message.size()) - sizeof prefix - message.size(), count = 0;
  auto add = [&](const void* at, size_t bytes) {
    size_t skipped = std::min(sent, bytes);
    sent -= skipped;
    if (skipped == bytes) return;
    parts[count++] = {const_cast<std::byte*>(static_cast<const std::byte*>(at) + skipped),
                      bytes - skipped};
  };
  add(&prefix, sizeof prefix);
  add(message.data(), message.size());
  add(kZeros, padding);
  return count;
}

}  // namespace

bool ReceiveBuffer::has_spare() noexcept {
  try {
    spare_.reserve(frame_of(max_message_));
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void ReceiveBuffer::give_back(std::vector<std::byte>& room) {
  room.clear();
  if (room.capacity() > spare_.capacity()) room.swap(spare_);
  room = {};
}

int Connection::connect(const SocketAddress& to) {
  if (int error = begin_connect(to, &socket_); error != 0) return error_ = error;
  if (!events_.add(socket_.get(), Source::kConnection, index_, kReadable | EPOLLOUT)) end(ENOMEM);
  return error_;
}

int Connection::take(FileDescriptor socket) {
  send_at_once(socket);
  socket_ = std::move(socket);
  established_ = takes_ = true;
  if (!events_.add(socket_.get(), Source::kConnection, index_, kReadable)) end(ENOMEM);
  return error_;
}

void Connection::end(int error) {
  events_.end(socket_);
  error_ = error;
  established_ = takes_ = false;
  begun_ = {};
}

Connection::Sent Connection::send(std::span<const std::byte> message, size_t* sent) {
  if (!socket_ || error_ != 0) return Sent::kFailed;
  if (!takes_) return Sent::kLater;
  const FramePrefix prefix{kFrameMagic, static_cast<uint32_t>(message.size())};
  const size_t frame = frame_of(message.size());
  while (*sent < frame) {
    std::array<iovec, 3> parts;
    msghdr rest = {};
    rest.msg_iov = parts.data();
    rest.msg_iovlen = rest_of(prefix, message, *sent, parts);
    ssize_t taken = ::sendmsg(socket_.get(), &rest, MSG_NOSIGNAL);
    if (taken >= 0) {
      *sent += static_cast<size_t>(taken);
    } else if (errno == EAGAIN) {
      takes_ = false;
      (void)events_.change(socket_.get(), Source::kConnection, index_, kReadable | EPOLLOUT);
      return Sent::kLater;
    } else if (errno != EINTR) {
      error_ = errno;
      return Sent::kFailed;
    }
  }
  return Sent::kAll;
}

void Connection::on_writable() {
  if (!socket_) return;
  if (int error = connect_error(socket_); error != 0) return end(error);
  established_ = takes_ = true;
  (void)events_.change(socket_.get(), Source::kConnection, index_, kReadable);
}

int Connection::receive(ReceiveBuffer& buffer, FrameReader& reader, Status* damage) {
  // It has ended since the event, or can't be read now.
  if (!socket_ || !buffer.has_spare()) return 0;
  size_t begun = begun_.size();
  std::copy(begun_.begin(), begun_.end(), buffer.data());
  ssize_t got = ::recv(socket_.get(), buffer.data() + begun, ReceiveBuffer::kLook, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (got <= 0) {
    int error = got < 0 ? errno : ECONNRESET;
    end(error);
    if (begun > 0)
      *damage = {Code::kPeerLost,
                 std::string("a connection ended in a message: ") + std::strerror(error)};
    return 1;
  }
  int messages = 0;
  *damage = deliver(buffer, begun + static_cast<size_t>(got), reader, &messages);
  if (!*damage) end(EPROTO);
  return std::max(messages, 1);
}

Status Connection::deliver(ReceiveBuffer& buffer, size_t bytes, FrameReader& reader,
                           int* messages) {
  const Status wrong(Code::kInvalid, "a connection brought bytes that are no messages");
  size_t at = 0;
  while (bytes - at >= sizeof(FramePrefix)) {
    FramePrefix prefix;
    std::memcpy(&prefix, buffer.data() + at, sizeof prefix);
    if (prefix.magic != kFrameMagic || prefix.bytes == 0 || prefix.bytes > buffer.max_message())
      return wrong;
    if (bytes - at < frame_of(prefix.bytes)) break;
    if (!reader.on_frame(buffer.data() + at + sizeof prefix, prefix.bytes)) return wrong;
    ++*messages;
    at += frame_of(prefix.bytes);
  }
  if (at == bytes) {
    buffer.give_back(begun_);
  } else {
    if (begun_.capacity() == 0) buffer.take_spare(begun_);
    begun_.assign(buffer.data() + at, buffer.data() + bytes);
  }
  return {};
}

}  // namespace smddp::fabric
