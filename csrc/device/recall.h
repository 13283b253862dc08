// How a process gets its peers to end their mappings of memory that it is about to free: CUDA leaves open what
// happens to memory that is freed while another process has it mapped, and such memory does not return to the
// device. The owner listens on a Unix socket; each process that maps its memory stays connected. Before memory
// is freed the owner names it to all of them and waits until they have answered. Knows no CUDA.
//
// A device has a RecallServer for its own memory; Imports has a RecallClient for its peers'.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "common/file_descriptor.h"
#include "common/status.h"
#include "device/unix_sockets.h"

namespace smddp::device {

// Of a server, 16 random bytes; zeros: there is none.
using RecallName = SocketName;

struct RecalledMemory {
  uint64_t base, id;  // as in Allocation
  bool operator==(const RecalledMemory&) const = default;
};

// How long the owner waits: a busy host's processes answer sooner. Tests set it.
inline std::atomic<int> recall_limit_ms{10'000};

class RecallServer {
 public:
  static Result<std::unique_ptr<RecallServer>> open();
  const RecallName& name() const { return name_; }
  // Returns once no client has the memory mapped, or after recall_limit_ms; the number of clients that have not
  // answered by then. A client that was late once is not waited for again before it has answered: whatever is
  // recalled, a process that is stopped costs the limit once. Called by any thread, one at a time.
  size_t recall(std::span<const RecalledMemory> memory);

 private:
  struct Client {
    FileDescriptor socket;
    uint64_t asked = 0, answered = 0;  // numbers of recalls
    bool late() const { return answered < asked; }
  };
  using Time = std::chrono::steady_clock::time_point;
  RecallServer() = default;
  void accept_clients();
  void ask(std::span<const RecalledMemory> memory, Time until);
  static void await(Client& client, Time until);

  const int pid_ = getpid();
  RecallName name_{};
  FileDescriptor listener_;
  std::mutex mutex_;
  uint64_t recalls_ = 0;
  std::vector<Client> clients_;
};

class RecallClient {
 public:
  // `forget` ends the mapping of memory of process `pid`, if there is one. The client's thread calls it.
  using Forget = std::function<void(int pid, const RecalledMemory& memory)>;
  explicit RecallClient(Forget forget) : forget_(std::move(forget)) {}
  ~RecallClient();
  // To be called before memory of process `pid`, whose server has this name, is mapped. If the server cannot be
  // reached, its recalls do not arrive.
  void follow(int pid, const RecallName& name);

 private:
  struct Server {
    int pid;
    FileDescriptor socket;
  };
  void run();
  bool answer(const Server& server);

  const Forget forget_;
  std::mutex mutex_;
  std::map<RecallName, std::shared_ptr<Server>> servers_;  // without a socket: not reached, or gone
  FileDescriptor wake_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace smddp::device
