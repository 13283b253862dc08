#include "device/recall.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <utility>

namespace smddp::device {
namespace {

constexpr const char* kRecalls = "recalls";
// A socket holds some 200 KB, and a process may have thousands of pieces mapped.
constexpr size_t kMostInMessage = 256;

// What a server sends, without the memory beyond `count`; the client's answer is the number.
struct Recall {
  uint64_t number, count;
  RecalledMemory memory[kMostInMessage];
  size_t bytes() const { return offsetof(Recall, memory) + count * sizeof memory[0]; }
};

}  // namespace

Result<std::unique_ptr<RecallServer>> RecallServer::open() {
  std::unique_ptr<RecallServer> made(new RecallServer());
  if (Status s = listen_as(kRecalls, &made->name_, SOCK_NONBLOCK).into(made->listener_); !s)
    return s;
  return made;
}

// A client connects before it maps memory, so every client that has some is here or waits to be accepted.
void RecallServer::accept_clients() {
  while (true) {
    FileDescriptor client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!client) return;
    if (of_this_user(client.get())) clients_.push_back({std::move(client)});
  }
}

size_t RecallServer::recall(std::span<const RecalledMemory> memory) {
  // A forked child has the sockets too, and frees nothing of the device's.
  if (memory.empty() || getpid() != pid_) return 0;
  auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(recall_limit_ms);
  std::lock_guard lock(mutex_);
  accept_clients();
  for (size_t from = 0; from < memory.size(); from += kMostInMessage)
    ask(memory.subspan(from, std::min(kMostInMessage, memory.size() - from)), until);
  return static_cast<size_t>(std::ranges::count_if(clients_, &Client::late));
}

void RecallServer::ask(std::span<const RecalledMemory> memory, Time until) {
  Recall sent{++recalls_, memory.size(), {}};
  std::ranges::copy(memory, sent.memory);
  std::vector<Client*> prompt;
  for (Client& client : clients_) {
    await(client, Time());
    if (!client.late()) prompt.push_back(&client);
    auto bytes = static_cast<ssize_t>(sent.bytes());
    if (send(client.socket.get(), &sent, sent.bytes(), MSG_NOSIGNAL) == bytes) {
      client.asked = sent.number;
    } else if (errno != EAGAIN) {  // EAGAIN: full of what a late one has not read
      client.socket = {};
    }
  }
  for (Client* client : prompt) await(*client, until);
  std::erase_if(clients_, [](const Client& client) { return !client.socket; });
}

void RecallServer::await(Client& client, Time until) {
  while (client.socket && client.late()) {
    ssize_t got = recv(client.socket.get(), &client.answered, sizeof client.answered, 0);
    if (got == sizeof client.answered || (got < 0 && errno == EINTR)) continue;
    if (got >= 0 || errno != EAGAIN) {
      client.socket = {};  // the process has ended, and its mappings with it
      return;
    }
    auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return;
    pollfd watched{client.socket.get(), POLLIN, 0};
    (void)poll(&watched, 1, static_cast<int>(left.count()));
  }
}

RecallClient::~RecallClient() {
  if (!thread_.joinable()) return;
  stop_ = true;
  uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof one) != sizeof one) std::abort();
  thread_.join();
}

void RecallClient::follow(int pid, const RecallName& name) {
  if (name == RecallName{}) return;
  std::lock_guard lock(mutex_);
  auto [known, is_new] = servers_.try_emplace(name);
  if (!is_new) return;
  known->second = std::make_shared<Server>(Server{pid, {}});
  if (!wake_) wake_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  auto connected = connect_to(kRecalls, name);
  if (!wake_ || !connected) return;
  known->second->socket = std::move(connected.value());
  uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void RecallClient::run() {
  while (!stop_) {
    std::vector<std::shared_ptr<Server>> servers;
    std::vector<pollfd> watched{{wake_.get(), POLLIN, 0}};
    {
      std::lock_guard lock(mutex_);
      for (const auto& [name, server] : servers_) {
        if (!server->socket) continue;
        servers.push_back(server);
        watched.push_back({server->socket.get(), POLLIN, 0});
      }
    }
    if (poll(watched.data(), watched.size(), -1) < 0) continue;
    uint64_t woken = 0;
    (void)!read(wake_.get(), &woken, sizeof woken);
    for (size_t i = 0; i < servers.size(); ++i) {
      if (watched[i + 1].revents == 0 || answer(*servers[i])) continue;
      std::lock_guard lock(mutex_);
      servers[i]->socket = {};
    }
  }
}

bool RecallClient::answer(const Server& server) {
  Recall asked{};
  ssize_t got = recv(server.socket.get(), &asked, sizeof asked, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got < static_cast<ssize_t>(offsetof(Recall, memory)) || asked.count > kMostInMessage ||
      got != static_cast<ssize_t>(asked.bytes()))
    return false;
  for (const RecalledMemory& memory : std::span(asked.memory, asked.count))
    forget_(server.pid, memory);
  return send(server.socket.get(), &asked.number, sizeof asked.number,
              MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof asked.number;
}

}  // namespace smddp::device
