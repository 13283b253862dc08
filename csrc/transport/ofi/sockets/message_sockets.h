// Messages over TCP connections of this library's own, where libfabric's would go over TCP as well and cost more. Chunks stay with libfabric. Knows nothing of buffers and of the contents of messages. Called
// by the classes of the fabric.
//
// Two processes that send messages to each other share a connection, so that the acknowledgements travel with
// messages the other way. Who has the first message opens it, and shows a token that only members of the job know:
// a connection without it is closed. If both open one, both use that of the process whose token is the lesser one,
// once it is there. Messages come in no order. Only the end of a connection loses a peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "common/tcp_sockets.h"
#include "transport/ofi/sockets/connection.h"
#include "transport/ofi/sockets/events.h"
#include "transport/ofi/sockets/frame.h"
#include "transport/ofi/sockets/listener.h"

namespace smddp::fabric {

class MessageReceiver {
 public:
  virtual ~MessageReceiver() = default;
  // `data` is valid during the call only, and begins at a multiple of eight bytes.
  virtual void on_message(const std::byte* data, size_t size) = 0;
  // A connection has ended within a message, or with bytes that are none.
  virtual void on_damage(const Status& why) = 0;
};

class MessageSockets {
 public:
  using Sent = Connection::Sent;

  // `at`: an address of this host; its port does not matter. `rails_fd`: libfabric's file descriptor, or -1.
  static Result<std::unique_ptr<MessageSockets>> open(const SocketAddress& at, size_t max_message,
                                                      int rails_fd);

  uint16_t port() const { return listener_.port(); }
  const Token& token() const { return token_; }

  // A place for messages to the process that listens at `at` and has published `token`. Dense from 0. A process
  // that is added again gets a new place with a new connection.
  size_t add(const SocketAddress& at, const Token& token);
  // Sends the rest of the frame of `message`, of which `*sent` bytes have left before. kLater: no more is taken
  // now; the next call for this place has to be for the same message. kFailed: as error() says, for good.
  Sent send(size_t to, std::span<const std::byte> message, size_t* sent);
  Status error(size_t to) const;

  // How many messages arrived and connections changed. Sets `*rails_ready` if libfabric's file descriptor is
  // readable.
  int progress(MessageReceiver& receiver, bool* rails_ready);

  // Readable when progress() has work, or libfabric's file descriptor is readable.
  int wait_fd() const { return events_.fd(); }

 private:
  struct Place {
    SocketAddress at;
    Token token;
    Connection* ours = nullptr;    // that this process has opened
    Connection* theirs = nullptr;  // that the other one has opened, the latest
    Connection* current = nullptr;
    int error = 0;  // an errno: the peer is lost
  };
  struct Link {
    std::unique_ptr<Connection> connection;
    bool opened = false;        // by this process
    bool greeted = false;       // its Hello has been sent or has come
    std::optional<Token> from;  // of the process that has opened it
    std::optional<size_t> place;
  };
  class Reader;

  explicit MessageSockets(size_t max_message) : listener_(events_), buffer_(max_message) {}
  std::optional<size_t> new_connection() noexcept;
  void accept_all();
  void connect(size_t to);
  Connection* choose(Place& place);
  int on_event(size_t index, uint32_t what, MessageReceiver& receiver);
  void greet(Link& link);
  bool on_hello(size_t index, const std::byte* data, size_t size);
  void on_end(size_t index);

  Events events_;
  Listener listener_;
  ReceiveBuffer buffer_;
  Token token_{};
  std::vector<Link> connections_;
  std::vector<size_t> free_;  // indices of connections that are over
  std::deque<Place> places_;
  std::map<Token, size_t> by_token_;  // the latest place of each process
};

}  // namespace smddp::fabric
