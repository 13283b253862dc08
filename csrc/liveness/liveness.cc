#include "liveness/liveness.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <exception>

#include "common/clock.h"
#include "common/log.h"
#include "liveness/prober.h"
#include "liveness/responder.h"

namespace smddp::liveness {
namespace {

constexpr useconds_t kAgainUs = 20'000;

}  // namespace

Result<std::unique_ptr<Liveness>> Liveness::open(const std::string& ip) {
  std::unique_ptr<Liveness> liveness(new Liveness());
  if (Status s = Responder::open(ip).into(liveness->responder_); !s) return s;
  liveness->prober_ = std::make_unique<Prober>();
  liveness->wake_up_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!liveness->wake_up_) return errno_status("no event descriptor");
  liveness->thread_ = std::thread([raw = liveness.get()] { raw->run(); });
  return liveness;
}

std::unique_ptr<Liveness> open_if_possible(const std::string& ip) {
  auto liveness = Liveness::open(ip);
  if (liveness) return std::move(liveness.value());
  log(LogLevel::kWarning, "ranks of other hosts that end are noticed at the deadline only: " +
                              liveness.status().message());
  return nullptr;
}

Liveness::~Liveness() { close(); }

void Liveness::close() {
  if (!thread_.joinable()) return;
  if (fork_count() != forks_) return thread_.detach();  // the thread is the parent's
  stop_ = true;
  wake();
  thread_.join();
  responder_->close();
}

std::vector<uint8_t> Liveness::contact() const { return pack(responder_->contact()); }

Result<Process> Liveness::meet(const std::vector<uint8_t>& published) {
  Result<Contact> contact = unpack(published);
  if (!contact) return contact.status();
  bool fresh = false;
  Process process = prober_->meet(contact.value(), &fresh);
  if (fresh) wake();
  return process;
}

Reach Liveness::reach(Process process) const { return prober_->reach(process); }

void Liveness::give_up_reaching(Process process) { prober_->give_up_reaching(process); }

Verdict Liveness::ask(Process process, const JobKey& group, bool anew) {
  bool fresh = false;
  Verdict verdict = prober_->ask(process, group, now_ns(), anew, &fresh);
  if (fresh) wake();
  return verdict;
}

std::string Liveness::text(Process process) const { return prober_->text(process); }

void Liveness::left(const JobKey& group, uint64_t from, const std::string& reason, int64_t lost) {
  responder_->left(group, from, reason, lost);
}

void Liveness::wake() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(wake_up_.get(), &one, sizeof one);
}

// Without memory it tries again a moment later: a process that has none does not count as ended.
void Liveness::run() {
  std::vector<pollfd> fds;
  while (!stop_) {
    try {
      turn(fds);
    } catch (const std::exception&) {
      ::usleep(kAgainUs);
    }
  }
}

void Liveness::turn(std::vector<pollfd>& fds) {
  fds.assign(1, {wake_up_.get(), POLLIN, 0});
  responder_->watch(fds);
  size_t first_probe = fds.size();
  uint64_t now = now_ns();
  prober_->watch(fds, now);
  uint64_t next = std::min(responder_->next_ns(), prober_->next_ns());
  int timeout = -1;
  if (next != UINT64_MAX) timeout = static_cast<int>((std::max(next, now) - now) / 1'000'000) + 1;
  ::poll(fds.data(), fds.size(), timeout);
  if (fds[0].revents != 0) {
    uint64_t count = 0;
    [[maybe_unused]] ssize_t taken = ::read(wake_up_.get(), &count, sizeof count);
  }
  now = now_ns();
  responder_->serve(fds.data() + 1, now);
  prober_->serve(fds.data() + first_probe, now);
}

}  // namespace smddp::liveness
