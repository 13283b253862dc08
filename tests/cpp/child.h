// A child process that a test talks to. It ends with the object.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "common/file_descriptor.h"

namespace smddp {

class Child {
 public:
  // The child runs body(*this): what it sends the test receives, and the other way round.
  explicit Child(const std::function<void(Child&)>& body) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    pid_ = fork();
    end_ = FileDescriptor(ends[pid_ == 0]);
    ::close(ends[pid_ != 0]);
    if (pid_ != 0) return;
    body(*this);
    for (;;) ::pause();
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  template <class T>
  void send(const T& value) {
    EXPECT_EQ(write(end_.get(), &value, sizeof value), static_cast<ssize_t>(sizeof value));
  }
  template <class T>
  T receive() {
    T value{};
    EXPECT_EQ(read(end_.get(), &value, sizeof value), static_cast<ssize_t>(sizeof value));
    return value;
  }
  void signal(int number) { kill(pid_, number); }
  void end() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  FileDescriptor end_;
};

}  // namespace smddp
