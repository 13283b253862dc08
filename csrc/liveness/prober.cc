#include "liveness/prober.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/tcp_sockets.h"

namespace smddp::liveness {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
// Between an answer and the next question. A rank for which 500 others wait, which wait for one another
// too, is asked 250 times a second.
constexpr uint64_t kEveryNs = kSecond, kEveryPerProbeNs = 4'000'000, kEveryAtMostNs = 2 * kSecond;
constexpr uint64_t kAgainNs = kSecond / 10;   // after a connection that was closed unanswered
constexpr uint64_t kAttemptNs = 3 * kSecond;  // of one connection
constexpr uint64_t kWantedNs = 3 * kSecond;   // after the latest ask()
constexpr uint64_t kFirstAnswerNs = 30 * kSecond;
constexpr uint64_t kTickNs = kSecond / 5;
// A process that was stopped itself, or did not get a core, must not blame another one for that time.
constexpr uint64_t kLongestTickNs = kSecond;
constexpr size_t kOpen = 128;

// This process can't ask now: that says nothing of the other one.
bool is_own_limit(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM ||
         error == EADDRNOTAVAIL;
}

bool contacts_equal(const Contact& a, const Contact& b) {
  return a.ip == b.ip && a.port == b.port && a.ask == b.ask;
}

}  // namespace

Process Prober::meet(const Contact& contact, bool* fresh) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (contacts_equal(targets_[i].contact, contact)) return static_cast<Process>(i);
  }
  targets_.push_back({contact});
  auto process = static_cast<Process>(targets_.size() - 1);
  probe_of(process, {}, fresh);
  return process;
}

Verdict Prober::ask(Process process, const JobKey& group, uint64_t now, bool anew, bool* fresh) {
  std::lock_guard lock(mutex_);
  Probe& probe = probe_of(process, group, fresh);
  if (anew || probe.wanted_until_ns <= now) {
    probe.next_ns = 0;
    *fresh = true;
  }
  probe.wanted_until_ns = now + kWantedNs;
  return probe.verdict;
}

Reach Prober::reach(Process process) {
  std::lock_guard lock(mutex_);
  const Target& target = targets_[process];
  if (target.has_answered || target.given_up) return Reach::kSettled;
  return target.refuses ? Reach::kRefuses : Reach::kAwaited;
}

void Prober::give_up_reaching(Process process) {
  std::lock_guard lock(mutex_);
  targets_[process].given_up = true;
}

std::string Prober::text(Process process) {
  std::lock_guard lock(mutex_);
  return targets_[process].contact.text();
}

Prober::Probe& Prober::probe_of(Process process, const JobKey& group, bool* fresh) {
  for (Probe& probe : probes_) {
    if (probe.process == process && probe.group == group) return probe;
  }
  *fresh = true;
  Probe& probe = probes_.emplace_back();
  probe.process = process;
  probe.group = group;
  return probe;
}

bool Prober::wanted(const Probe& probe, uint64_t now) const {
  if (probe.wanted_until_ns != 0) return now < probe.wanted_until_ns;
  bool tries = probe.met_ns == 0 || now < probe.met_ns + kFirstAnswerNs;
  return tries && !targets_[probe.process].has_answered;
}

void Prober::watch(std::vector<pollfd>& fds, uint64_t now) {
  std::lock_guard lock(mutex_);
  next_ns_ = UINT64_MAX;
  for (Probe& probe : probes_) {
    if (!wanted(probe, now)) close(probe, 0);
  }
  std::erase_if(probes_, [&](const Probe& probe) { return !wanted(probe, now); });
  for (Probe& probe : probes_) {
    if (probe.met_ns == 0) probe.met_ns = now;
    if (!probe.socket && now >= probe.next_ns && open_ < kOpen) begin(probe, now);
    probe.is_polled = bool(probe.socket);
    if (probe.socket) {
      short events = !probe.connected || probe.asked < sizeof probe.question ? POLLOUT : POLLIN;
      fds.push_back({probe.socket.get(), events, 0});
    }
    next_ns_ = std::min(next_ns_, now + kTickNs);
  }
}

void Prober::serve(const pollfd* fds, uint64_t now) {
  std::lock_guard lock(mutex_);
  for (Probe& probe : probes_) {
    bool ready = std::exchange(probe.is_polled, false) && (fds++)->revents != 0;
    count_silence(probe, now);
    if (ready) {
      advance(probe, now);
    } else if (probe.socket && now > probe.began_ns + kAttemptNs) {
      close(probe, now);
    }
  }
}

void Prober::begin(Probe& probe, uint64_t now) {
  const Contact& contact = targets_[probe.process].contact;
  int error = begin_connect(contact, &probe.socket);
  probe.began_ns = now;
  if (error != 0) return on_failure(probe, error, now);
  ++open_;
  probe.connected = false;
  probe.question = Question();
  probe.question.secret = contact.ask;
  probe.question.group = probe.group;
  probe.asked = probe.answered = probe.explained = 0;
  if (probe.counted_ns == 0) probe.counted_ns = now;
}

void Prober::close(Probe& probe, uint64_t next_ns) {
  if (probe.socket) --open_;
  probe.socket = FileDescriptor();
  probe.next_ns = next_ns;
}

void Prober::advance(Probe& probe, uint64_t now) {
  int error = 0;
  switch (converse(probe, &error)) {
    case Moved::kMore:
      return;
    case Moved::kAll:
      return on_answer(probe, now);
    case Moved::kFailed:
      return on_failure(probe, error, now);
  }
}

Moved Prober::converse(Probe& probe, int* error) {
  if (!probe.connected) {
    *error = connect_error(probe.socket);
    if (*error != 0) return Moved::kFailed;
    probe.connected = true;
  }
  Moved sent = write_some(probe.socket, &probe.question, sizeof probe.question, &probe.asked);
  if (sent != Moved::kAll) return sent;
  Moved heard = read_some(probe.socket, &probe.answer, sizeof probe.answer, &probe.answered, error);
  if (heard != Moved::kAll) return heard;
  const Answer& answer = probe.answer;
  if (answer.magic != kMagic || answer.secret != targets_[probe.process].contact.answer ||
      answer.reason_bytes > kReasonBytes)
    return Moved::kFailed;
  probe.reason.resize(answer.reason_bytes);
  return read_some(probe.socket, probe.reason.data(), probe.reason.size(), &probe.explained, error);
}

void Prober::on_answer(Probe& probe, uint64_t now) {
  uint64_t every = std::clamp(probes_.size() * kEveryPerProbeNs, kEveryNs, kEveryAtMostNs);
  close(probe, now + every);
  targets_[probe.process].has_answered = true;
  probe.counted_ns = 0;
  Verdict& verdict = probe.verdict;
  verdict.answered_ns = now;
  verdict.refuses = false;
  verdict.silent_ns = 0;
  verdict.left_from = probe.answer.left_from;
  verdict.reason = probe.reason;
  verdict.lost_rank = probe.answer.lost_rank;
}

// A firewall refuses as well: only a process that was reached before has ended. A connection that is
// closed without an answer is one to a process that is just ending, or to a foreign one: ask again.
void Prober::on_failure(Probe& probe, int error, uint64_t now) {
  if (is_own_limit(error)) probe.counted_ns = 0;
  bool refused = error == ECONNREFUSED && !probe.connected;
  probe.verdict.refuses = targets_[probe.process].refuses = refused;
  if (refused && targets_[probe.process].has_answered) probe.verdict.ended = true;
  bool closed = probe.connected && (error == 0 || error == ECONNRESET || error == EPIPE);
  close(probe, now + (closed ? kAgainNs : kEveryNs));
}

void Prober::count_silence(Probe& probe, uint64_t now) {
  if (probe.counted_ns == 0) return;
  if (targets_[probe.process].has_answered)
    probe.verdict.silent_ns += std::min(now - probe.counted_ns, kLongestTickNs);
  probe.counted_ns = now;
}

}  // namespace smddp::liveness
