#include "device/recall.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

namespace smddp::device {
namespace {

constexpr const char* kRecalls = "recalls";

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
    if (of_this_user(client.get())) clients_.push_back(std::move(client));
  }
}

size_t RecallServer::recall(const std::vector<RecalledMemory>& memory,
                            std::chrono::milliseconds limit) {
  // A forked child has the sockets too, and frees nothing of the device's.
  if (memory.empty() || getpid() != pid_) return 0;
  auto until = std::chrono::steady_clock::now() + limit;
  std::lock_guard lock(mutex_);
  accept_clients();
  std::erase_if(clients_, [&](const FileDescriptor& client) {
    return !std::all_of(memory.begin(), memory.end(), [&](const RecalledMemory& each) {
      return send(client.get(), &each, sizeof each, MSG_NOSIGNAL) == sizeof each ||
             errno == EAGAIN;  // it answers nothing: it counts as late below
    });
  });
  size_t late = 0;
  for (FileDescriptor& client : clients_)
    late += all_answered(client, memory.back(), until) ? 0 : 1;
  return late;
}

// Answers come in the order of the recalls; those to earlier recalls may come late.
bool RecallServer::all_answered(FileDescriptor& client, const RecalledMemory& last,
                                std::chrono::steady_clock::time_point until) {
  while (true) {
    RecalledMemory answered{};
    ssize_t got = recv(client.get(), &answered, sizeof answered, 0);
    if (got == sizeof answered && answered == last) return true;
    if (got == sizeof answered || (got < 0 && errno == EINTR)) continue;
    if (got >= 0 || errno != EAGAIN)
      return true;  // the process has ended, and its mappings with it
    auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd watched{client.get(), POLLIN, 0};
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
  RecalledMemory memory{};
  ssize_t got = recv(server.socket.get(), &memory, sizeof memory, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got != sizeof memory) return false;
  forget_(server.pid, memory);
  return send(server.socket.get(), &memory, sizeof memory, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         sizeof memory;
}

}  // namespace smddp::device
