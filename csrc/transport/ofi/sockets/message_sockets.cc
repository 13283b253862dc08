#include "transport/ofi/sockets/message_sockets.h"

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "common/clock.h"
#include "common/random.h"

namespace smddp::fabric {
namespace {

bool own_limit(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

}  // namespace

// The frames of one connection: the first is a Hello if the other process has opened it.
class MessageSockets::Reader : public FrameReader {
 public:
  Reader(MessageSockets& sockets, size_t index, MessageReceiver& receiver)
      : sockets_(sockets), index_(index), receiver_(receiver) {}
  bool on_frame(const std::byte* data, size_t size) override {
    if (!sockets_.connections_[index_].greeted) return sockets_.on_hello(index_, data, size);
    receiver_.on_message(data, size);
    return true;
  }

 private:
  MessageSockets& sockets_;
  size_t index_;
  MessageReceiver& receiver_;
};

Result<std::unique_ptr<MessageSockets>> MessageSockets::open(const SocketAddress& at,
                                                             size_t max_message, int rails_fd) {
  std::unique_ptr<MessageSockets> sockets(new MessageSockets(max_message));
  if (!fill_random(sockets->token_.data(), sockets->token_.size()))
    return Status(Code::kUnavailable, "the kernel gives no random numbers");
  Events& events = sockets->events_;
  Status status = events.open();
  if (status) status = sockets->listener_.open(at);
  if (status && rails_fd >= 0) status = events.add(rails_fd, Source::kRails, 0, EPOLLIN);
  if (!status) return status;
  return sockets;
}

// ---- places

size_t MessageSockets::add(const SocketAddress& at, const Token& token) {
  Place& place = places_.emplace_back();
  place.at = at;
  place.token = token;
  size_t index = places_.size() - 1;
  bool again = !by_token_.insert_or_assign(token, index).second;
  for (Link& link : connections_) {  // it may have sent something before it was added here
    if (again || link.from != token || !link.connection->is_open()) continue;
    link.place = index;
    place.theirs = link.connection.get();
  }
  return index;
}

MessageSockets::Sent MessageSockets::send(size_t to, std::span<const std::byte> message,
                                          size_t* sent) {
  Place& place = places_[to];
  if (place.error != 0) return Sent::kFailed;
  if (place.ours == nullptr && place.theirs == nullptr) connect(to);
  if (*sent == 0) place.current = choose(place);
  if (place.error != 0) return Sent::kFailed;
  if (place.current == nullptr || !place.current->is_established()) return Sent::kLater;
  Sent result = place.current->send(message, sent);
  if (result == Sent::kFailed) place.error = place.current->error();
  return result;
}

Connection* MessageSockets::choose(Place& place) {
  Connection *first = place.ours, *second = place.theirs;
  if (place.token < token_) std::swap(first, second);
  if (first != nullptr && (second == nullptr || first->is_established())) return first;
  return second;
}

Status MessageSockets::error(size_t to) const {
  const Place& place = places_[to];
  return {own_limit(place.error) ? Code::kUnavailable : Code::kPeerLost,
          std::string(std::strerror(place.error)) + " (TCP connection to " + place.at.text() + ")"};
}

// ---- connections

// A number that is free, or a new one; none if there is no memory now.
std::optional<size_t> MessageSockets::new_connection() noexcept {
  try {
    if (free_.empty()) {
      free_.reserve(connections_.size() + 1);
      connections_.emplace_back();
      free_.push_back(connections_.size() - 1);
    }
    size_t index = free_.back();
    connections_[index] = {std::make_unique<Connection>(events_, index), false, false, {}, {}};
    free_.pop_back();
    return index;
  } catch (const std::bad_alloc&) {
    return std::nullopt;
  }
}

void MessageSockets::connect(size_t to) {
  std::optional<size_t> index = new_connection();
  if (!index) return;
  Link& link = connections_[*index];
  link.opened = true;
  link.place = to;
  places_[to].ours = link.connection.get();
  if (link.connection->connect(places_[to].at) != 0) on_end(*index);
}

// A place for it first: without memory it can wait where it is.
void MessageSockets::accept_all() {
  while (std::optional<size_t> index = new_connection()) {
    FileDescriptor socket = listener_.accept(now_ns());
    bool none = !socket;
    if (none || connections_[*index].connection->take(std::move(socket)) != 0) on_end(*index);
    if (none) return;
  }
}

// The first bytes of a connection: they always find room.
void MessageSockets::greet(Link& link) {
  Hello hello{places_[*link.place].token, token_};
  size_t sent = 0;
  link.greeted = true;
  if (link.connection->send(std::as_bytes(std::span(&hello, 1)), &sent) == Sent::kLater)
    link.connection->end(EPROTO);
}

bool MessageSockets::on_hello(size_t index, const std::byte* data, size_t size) {
  Hello hello;
  if (size != sizeof hello) return false;
  std::memcpy(&hello, data, sizeof hello);
  if (hello.to != token_) return false;
  Link& link = connections_[index];
  link.greeted = true;
  link.from = hello.from;
  auto place = by_token_.find(hello.from);
  if (place == by_token_.end()) return true;  // add() finds it
  link.place = place->second;
  places_[place->second].theirs = link.connection.get();
  return true;
}

// Its peer is lost, if it had one: what was sent may not have arrived.
void MessageSockets::on_end(size_t index) {
  Link& link = connections_[index];
  if (link.place) {
    Place& place = places_[*link.place];
    if (place.error == 0) place.error = link.connection->error();
    for (Connection** each : {&place.ours, &place.theirs, &place.current}) {
      if (*each == link.connection.get()) *each = nullptr;
    }
  }
  link = {};
  free_.push_back(index);
}

int MessageSockets::on_event(size_t index, uint32_t what, MessageReceiver& receiver) {
  if (!connections_[index].connection) return 0;  // it has ended since the event
  Connection& connection = *connections_[index].connection;
  int handled = 0;
  if ((what & EPOLLOUT) != 0) {
    connection.on_writable();
    ++handled;
    Link& link = connections_[index];
    if (connection.is_open() && link.opened && !link.greeted) greet(link);
  }
  if ((what & ~EPOLLOUT) != 0 && connection.is_open()) {
    Status damage;
    Reader reader(*this, index, receiver);
    handled += connection.receive(buffer_, reader, &damage);
    if (!damage) receiver.on_damage(damage);
  }
  if (!connection.is_open()) on_end(index);
  return handled;
}

int MessageSockets::progress(MessageReceiver& receiver, bool* rails_ready) {
  int handled = 0;
  for (const epoll_event& event : events_.ready()) {
    switch (Events::source_of(event)) {
      case Source::kListener:
        accept_all();
        break;
      case Source::kConnection:
        handled += on_event(Events::index_of(event), event.events, receiver);
        break;
      case Source::kRails:
        *rails_ready = true;
        break;
    }
  }
  if (listener_.waits()) listener_.retry(now_ns());
  return handled;
}

}  // namespace smddp::fabric
