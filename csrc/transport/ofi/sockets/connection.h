// One TCP connection: frames both ways. Knows nothing of peers. Called by MessageSockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/file_descriptor.h"
#include "common/status.h"
#include "common/tcp_sockets.h"
#include "transport/ofi/sockets/events.h"
#include "transport/ofi/sockets/frame.h"

namespace smddp::fabric {

// Takes the messages of a connection. `data` is valid during the call only, and begins at a multiple of eight
// bytes. False: it is no message of this protocol, which ends the connection.
class FrameReader {
 public:
  virtual ~FrameReader() = default;
  virtual bool on_frame(const std::byte* data, size_t size) = 0;
};

// What receive() reads into, for one connection at a time.
class ReceiveBuffer {
 public:
  explicit ReceiveBuffer(size_t max_message)
      : max_message_(max_message),
        memory_(std::make_unique_for_overwrite<std::byte[]>(frame_of(max_message) + kLook)) {}
  // Of one look at a connection: one that always has more holds up no other.
  static constexpr size_t kLook = 256 << 10;
  std::byte* data() { return memory_.get(); }
  size_t max_message() const { return max_message_; }

  // Room for a frame that has begun, without an allocation: false if there is no memory for it now. Then
  // nothing may be read, as its beginning would be lost.
  bool has_spare() noexcept;
  void take_spare(std::vector<std::byte>& to) { to.swap(spare_); }
  void give_back(std::vector<std::byte>& room);

 private:
  size_t max_message_;
  std::unique_ptr<std::byte[]> memory_;
  std::vector<std::byte> spare_;
};

class Connection {
 public:
  // `index`: of its events.
  Connection(Events& events, size_t index) : events_(events), index_(index) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() { events_.end(socket_); }

  // Begins to connect, or takes a socket that was accepted: 0, or an errno.
  int connect(const SocketAddress& to);
  int take(FileDescriptor socket);
  bool is_open() const { return static_cast<bool>(socket_); }
  // Established, as far as is known.
  bool is_established() const { return established_; }
  // Why it is over: an errno, or 0 if it was closed in good order or never opened.
  int error() const { return error_; }
  void end(int error);

  // Sends the rest of the frame of `message`, of which `*sent` bytes have left before. kLater: it takes no more
  // now; its event comes when it does. kFailed: as error() says. What has arrived can still be received.
  enum class Sent { kAll, kLater, kFailed };
  Sent send(std::span<const std::byte> message, size_t* sent);
  // Gives the messages that have arrived to `reader`. How many, or 1 for a part of one. If the connection ends
  // within a message, or with bytes that are none, it is over and `*damage` says so.
  int receive(ReceiveBuffer& buffer, FrameReader& reader, Status* damage);
  // The event says that it takes bytes again.
  void on_writable();

 private:
  // Gives the messages of the first `bytes` bytes of the buffer away, and keeps a part that is left.
  Status deliver(ReceiveBuffer& buffer, size_t bytes, FrameReader& reader, int* messages);
  Status watch(uint32_t what);

  Events& events_;
  size_t index_;
  FileDescriptor socket_;
  bool established_ = false;
  bool takes_ = false;  // bytes
  int error_ = 0;
  std::vector<std::byte>
      begun_;  // the first bytes of a frame that has not arrived as a whole; room for all
};

}  // namespace smddp::fabric
