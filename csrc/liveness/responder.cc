#include "liveness/responder.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "common/random.h"
#include "liveness/sockets.h"

namespace smddp::liveness {
namespace {

constexpr size_t kVisitors = 128;
constexpr uint64_t kVisitNs = 2'000'000'000;
constexpr size_t kLeftGroups = 1024;

constexpr uint64_t kNoDescriptorNs = 20'000'000;

// A forked child must not keep a port open: its parent's death would stay unseen. The number stays in
// use, as the child may destroy the object that it has inherited.
class OpenPorts {
 public:
  static OpenPorts& process() {
    static OpenPorts* ports = new OpenPorts();  // never freed: fork() may come at any time
    return *ports;
  }
  void add(int listener) {
    std::lock_guard lock(mutex_);
    listeners_.insert(listener);
  }
  void remove(int listener) {
    std::lock_guard lock(mutex_);
    listeners_.erase(listener);
  }

 private:
  OpenPorts() {
    pthread_atfork([] { process().mutex_.lock(); }, [] { process().mutex_.unlock(); },
                   [] { process().close_in_child(); });
  }
  void close_in_child() {
    FileDescriptor nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    for (int listener : listeners_) {
      if (!nothing || ::dup3(nothing.get(), listener, O_CLOEXEC) < 0) ::close(listener);
    }
    listeners_.clear();
    mutex_.unlock();
  }
  std::mutex mutex_;
  std::set<int> listeners_;
};

}  // namespace

Result<std::unique_ptr<Responder>> Responder::open(const std::string& ip) {
  std::unique_ptr<Responder> responder(new Responder());
  Contact& contact = responder->contact_;
  for (Secret* secret : {&contact.ask, &contact.answer}) {
    if (!fill_random(secret->data(), secret->size()))
      return Status(Code::kUnavailable, "could not draw a random secret");
  }
  if (Status s = listen_at(ip, &contact).into(responder->listener_); !s) return s;
  responder->spare_ = FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  OpenPorts::process().add(responder->listener_.get());
  return responder;
}

Responder::~Responder() { close(); }

void Responder::close() {
  OpenPorts::process().remove(listener_.get());
  listener_ = FileDescriptor();
  visitors_.clear();
}

void Responder::left(const JobKey& group, uint64_t from, const std::string& reason, int64_t lost) {
  std::lock_guard lock(left_mutex_);
  for (const Left& known : left_) {
    if (known.group == group) return;
  }
  left_.push_back({group, from, reason.substr(0, kReasonBytes), lost});
  if (left_.size() > kLeftGroups) left_.pop_front();
}

void Responder::watch(std::vector<pollfd>& fds) const {
  fds.push_back({no_descriptor_until_ns_ == 0 ? listener_.get() : -1, POLLIN, 0});
  for (const Visitor& visitor : visitors_) {
    bool answers = visitor.answered < visitor.answer.size();
    fds.push_back({visitor.socket.get(), static_cast<short>(answers ? POLLOUT : POLLIN), 0});
  }
}

void Responder::serve(const pollfd* fds, uint64_t now) {
  size_t kept = 0, known = visitors_.size();
  for (size_t i = 0; i < known; ++i) {
    Visitor& visitor = visitors_[i];
    bool stays = now < visitor.until_ns && (fds[i + 1].revents == 0 || attend(visitor));
    if (stays && kept != i) visitors_[kept] = std::move(visitor);
    if (stays) ++kept;
  }
  visitors_.resize(kept);
  if (!spare_) spare_ = FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  bool retry = no_descriptor_until_ns_ != 0 && now >= no_descriptor_until_ns_;
  if (fds[0].revents != 0 || retry) accept_all(now);
}

uint64_t Responder::next_ns() const {
  uint64_t next = no_descriptor_until_ns_ != 0 ? no_descriptor_until_ns_ : UINT64_MAX;
  for (const Visitor& visitor : visitors_) next = std::min(next, visitor.until_ns);
  return next;
}

int Responder::accept_one(uint64_t now) {
  no_descriptor_until_ns_ = 0;
  for (;;) {
    int fd = ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) return fd;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EMFILE && errno != ENFILE) return -1;
    if (!spare_) break;
    spare_ = FileDescriptor();
  }
  no_descriptor_until_ns_ = now + kNoDescriptorNs;
  return -1;
}

void Responder::accept_all(uint64_t now) {
  for (int fd = accept_one(now); fd >= 0; fd = accept_one(now)) {
    // The oldest has most likely asked nothing: a stranger that holds connections open.
    if (visitors_.size() == kVisitors) visitors_.erase(visitors_.begin());
    Visitor visitor;
    visitor.socket = FileDescriptor(fd);
    visitor.until_ns = now + kVisitNs;
    if (attend(visitor)) visitors_.push_back(std::move(visitor));
  }
}

// The side that asks closes the connection: so its port is free again at once.
bool Responder::attend(Visitor& visitor) {
  int error = 0;
  if (visitor.answer.empty()) {
    Moved moved = read_some(visitor.socket, &visitor.question, sizeof visitor.question,
                            &visitor.heard, &error);
    if (moved != Moved::kAll) return moved == Moved::kMore;
    const Question& question = visitor.question;
    if (question.magic != kMagic || question.secret != contact_.ask) return false;
    visitor.answer = answer_to(question.group);
  } else if (visitor.answered == visitor.answer.size()) {
    return false;
  }
  return write_some(visitor.socket, visitor.answer.data(), visitor.answer.size(),
                    &visitor.answered) != Moved::kFailed;
}

std::string Responder::answer_to(const JobKey& group) {
  Answer answer;
  answer.secret = contact_.answer;
  std::string reason;
  {
    std::lock_guard lock(left_mutex_);
    for (const Left& known : left_) {
      if (known.group != group) continue;
      answer.left_from = known.from;
      answer.lost_rank = known.lost;
      reason = known.reason;
    }
  }
  answer.reason_bytes = static_cast<uint32_t>(reason.size());
  std::string bytes(reinterpret_cast<const char*>(&answer), sizeof answer);
  return bytes + reason;
}

}  // namespace smddp::liveness
