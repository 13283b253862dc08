// Messages over TCP connections of our own, on loopback: frames, full connections, ends, strangers, descriptors.
#include "transport/ofi/sockets/message_sockets.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "stranger.h"

namespace smddp::fabric {
namespace {

using Sent = MessageSockets::Sent;

constexpr size_t kMaxBytes = 4096;

class Messages : public MessageReceiver {
 public:
  void on_message(const std::byte* data, size_t size) override {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 8, 0u);
    received.emplace_back(reinterpret_cast<const char*>(data), size);
  }
  void on_damage(const Status& why) override { damages.push_back(why.message()); }

  std::vector<std::string> received, damages;
};

// One process's sockets and what they have received.
struct Side {
  std::unique_ptr<MessageSockets> sockets;
  Messages messages;

  int progress() {
    bool rails_ready = false;
    return sockets->progress(messages, &rails_ready);
  }
  MessagePort port() const {
    return {SocketAddress::parse("127.0.0.1", sockets->port()).value(), sockets->token()};
  }
  size_t add(const Side& other) { return sockets->add(other.port().at, other.port().token); }
  // Of a whole message; drives this side until the kernel has taken it, or it has failed.
  Sent send(size_t to, const std::string& text) {
    size_t left = 0;
    std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
    Sent sent = Sent::kLater;
    for (uint64_t until = now_ns() + 10'000'000'000; sent == Sent::kLater && now_ns() < until;) {
      sent = sockets->send(to, bytes, &left);
      progress();
    }
    return sent;
  }
};

class MessageSocketsTest : public testing::Test {
 protected:
  void SetUp() override { signal(SIGPIPE, SIG_DFL); }

  static Side open_side() {
    auto sockets =
        MessageSockets::open(SocketAddress::parse("127.0.0.1", 0).value(), kMaxBytes, -1);
    EXPECT_TRUE(sockets.ok()) << sockets.status().message();
    return {std::move(sockets.value()), {}};
  }
  static void until(const std::function<bool()>& done, const std::function<void()>& drive) {
    for (uint64_t until = now_ns() + 10'000'000'000; !done();) {
      ASSERT_LT(now_ns(), until) << "not done in time";
      drive();
    }
  }
};

TEST_F(MessageSocketsTest, MessagesOfAllLengthsArriveWholeAndInOrder) {
  Side a = open_side(), b = open_side();
  size_t to_b = a.add(b);
  std::vector<std::string> sent;
  for (size_t bytes = 1; bytes <= kMaxBytes; bytes += 1 + bytes / 3)
    sent.emplace_back(bytes, static_cast<char>('a' + bytes % 26));
  sent.emplace_back(kMaxBytes, 'z');
  for (const std::string& text : sent) ASSERT_EQ(a.send(to_b, text), Sent::kAll);
  until([&] { return b.messages.received.size() == sent.size(); }, [&] { b.progress(); });
  EXPECT_EQ(b.messages.received, sent);
  EXPECT_TRUE(b.messages.damages.empty());
}

TEST_F(MessageSocketsTest, AFrameThatComesByteByByteIsOneMessage) {
  Side b = open_side();
  SocketStranger sender(b.port());
  FramePrefix prefix{kFrameMagic, 5};
  std::string frame(reinterpret_cast<const char*>(&prefix), sizeof prefix);
  frame += std::string("hello\0\0\0", 8);
  ASSERT_TRUE(sender.greet());
  for (size_t i = 0; i < frame.size(); ++i) {
    EXPECT_TRUE(b.messages.received.empty());
    ASSERT_TRUE(sender.send(&frame[i], 1));
    b.progress();
  }
  until([&] { return !b.messages.received.empty(); }, [&] { b.progress(); });
  EXPECT_EQ(b.messages.received, std::vector<std::string>{"hello"});
}

// The receiver does not look: the sender is told to come again, and wakes once there is room.
TEST_F(MessageSocketsTest, AFullConnectionGoesOnWhereItStopped) {
  Side a = open_side(), b = open_side();
  size_t to_b = a.add(b);
  std::string text(kMaxBytes, 'x');
  std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
  size_t count = 0, left = 0;
  ASSERT_EQ(a.send(to_b, text), Sent::kAll);
  for (++count; a.sockets->send(to_b, bytes, &left) == Sent::kAll; left = 0) ++count;
  a.progress();
  pollfd room{a.sockets->wait_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&room, 1, 0), 0) << "a sleep would end at once";
  EXPECT_EQ(a.sockets->send(to_b, bytes, &left), Sent::kLater);
  until([&] { return ::poll(&room, 1, 0) == 1; }, [&] { b.progress(); });
  a.progress();
  until([&] { return a.sockets->send(to_b, bytes, &left) == Sent::kAll; },
        [&] {
          a.progress();
          b.progress();
        });
  ++count;
  until([&] { return b.messages.received.size() == count; }, [&] { b.progress(); });
  for (const std::string& message : b.messages.received) ASSERT_EQ(message, text);
}

TEST_F(MessageSocketsTest, APeerThatIsNotThereOrHasGoneIsAnError) {
  Side a = open_side();
  std::optional<Side> gone = open_side();
  MessagePort port = gone->port();
  size_t to_gone = a.add(*gone);
  ASSERT_EQ(a.send(to_gone, "one"), Sent::kAll);
  until([&] { return gone->messages.received.size() == 1; }, [&] { gone->progress(); });
  gone.reset();
  until([&] { return a.send(to_gone, "two") == Sent::kFailed; }, [&] { a.progress(); });
  EXPECT_EQ(a.sockets->error(to_gone).code(), Code::kPeerLost);
  EXPECT_EQ(a.send(to_gone, "three"), Sent::kFailed) << "for good";
  pollfd end{a.sockets->wait_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&end, 1, 0), 0) << "a connection that has ended wakes nobody";

  size_t absent = a.sockets->add(port.at, port.token);
  EXPECT_EQ(a.send(absent, "four"), Sent::kFailed);
  EXPECT_NE(a.sockets->error(absent).message().find(port.at.text()), std::string::npos);
}

TEST_F(MessageSocketsTest, BytesThatAreNoFramesEndTheirConnectionAndNoOther) {
  Side a = open_side(), b = open_side();
  size_t to_b = a.add(b);
  ASSERT_EQ(a.send(to_b, "before"), Sent::kAll);
  FramePrefix longer{kFrameMagic, kMaxBytes + 1}, empty{kFrameMagic, 0}, other{0x12345678, 8};
  size_t damages = 0;
  for (const FramePrefix& prefix : {longer, empty, other}) {
    SocketStranger stranger(b.port());
    ASSERT_TRUE(stranger.greet());
    ASSERT_TRUE(stranger.send(&prefix, sizeof prefix));
    ++damages;
    until([&] { return b.messages.damages.size() == damages; }, [&] { b.progress(); });
    EXPECT_TRUE(stranger.is_closed());
  }
  ASSERT_EQ(a.send(to_b, "after"), Sent::kAll);
  until([&] { return b.messages.received.size() == 2; }, [&] { b.progress(); });
}

// Neither a stranger, which does not know the token, nor one that says nothing of it.
TEST_F(MessageSocketsTest, AConnectionWithoutTheTokenIsClosedAndGivesNoMessage) {
  Side b = open_side();
  MessagePort guessed = b.port();
  guessed.token[7] ^= 1;
  SocketStranger guesser(guessed), silent(b.port());
  ASSERT_TRUE(guesser.greet());
  guesser.send_frame(std::vector<std::byte>(10));
  pollfd unused{-1, 0, 0};
  ::poll(&unused, 1, 20);  // until both are connected
  silent.send_frame(std::vector<std::byte>(sizeof(Hello)));
  until([&] { return b.messages.damages.size() == 2; }, [&] { b.progress(); });
  EXPECT_TRUE(guesser.is_closed());
  EXPECT_TRUE(silent.is_closed());
  EXPECT_TRUE(b.messages.received.empty());
}

// One connection carries both directions, whoever has opened it, also if both have.
TEST_F(MessageSocketsTest, BothDirectionsShareOneConnection) {
  for (bool at_once : {false, true}) {
    Side a = open_side(), b = open_side();
    size_t to_b = a.add(b), to_a = b.add(a);
    auto descriptors = [] {
      return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
    };
    auto before = descriptors();
    size_t left_a = 0, left_b = 0, expected = 0;
    std::span<const std::byte> one(reinterpret_cast<const std::byte*>("x"), 1);
    auto both = [&] {
      bool sent_a = false, sent_b = false;
      until([&] { return sent_a && sent_b; },
            [&] {
              if (!sent_a) sent_a = a.sockets->send(to_b, one, &left_a) == Sent::kAll;
              if (!at_once && !sent_a) return void(a.progress());
              if (!at_once && b.messages.received.empty()) return void(b.progress());
              if (!sent_b) sent_b = b.sockets->send(to_a, one, &left_b) == Sent::kAll;
              a.progress();
              b.progress();
            });
      left_a = left_b = 0;
      ++expected;
    };
    for (int i = 0; i < 10; ++i) both();
    until(
        [&] {
          return a.messages.received.size() == expected && b.messages.received.size() == expected;
        },
        [&] {
          a.progress();
          b.progress();
        });
    EXPECT_EQ(descriptors() - before, at_once ? 4 : 2);
  }
}

// What has arrived is given away before the end is told, although sending has failed already.
TEST_F(MessageSocketsTest, TheLastWordsOfAPeerThatHasGoneArrive) {
  Side a = open_side();
  std::optional<Side> gone = open_side();
  size_t to_gone = a.add(*gone), to_a = gone->add(a);
  ASSERT_EQ(a.send(to_gone, "hello"), Sent::kAll);
  until([&] { return gone->messages.received.size() == 1; }, [&] { gone->progress(); });
  ASSERT_EQ(gone->send(to_a, "good-bye"), Sent::kAll);
  gone.reset();
  std::string text = "to nobody";
  std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
  for (Sent sent = Sent::kAll; sent != Sent::kFailed;) {
    size_t left = 0;
    sent = a.sockets->send(to_gone, bytes, &left);
  }
  until([&] { return a.messages.received.size() == 1; }, [&] { a.progress(); });
  EXPECT_EQ(a.messages.received[0], "good-bye");
}

TEST_F(MessageSocketsTest, APeerThatIsAddedAgainGetsANewConnection) {
  Side a = open_side(), b = open_side();
  size_t first = a.add(b);
  ASSERT_EQ(a.send(first, "one"), Sent::kAll);
  size_t second = a.add(b);
  ASSERT_EQ(a.send(second, "two"), Sent::kAll);
  ASSERT_EQ(a.send(first, "three"), Sent::kAll);
  until([&] { return b.messages.received.size() == 3; }, [&] { b.progress(); });
}

TEST_F(MessageSocketsTest, AConnectionThatEndsInAMessageIsToldOfAndOneBetweenMessagesIsNot) {
  Side b = open_side();
  FramePrefix prefix{kFrameMagic, 100};
  {
    SocketStranger whole(b.port()), part(b.port());
    std::vector<std::byte> message(100);
    ASSERT_TRUE(whole.greet() && part.greet());
    ASSERT_TRUE(part.send(&prefix, sizeof prefix));
    ASSERT_TRUE(whole.send_frame(message));
    until([&] { return b.messages.received.size() == 1; }, [&] { b.progress(); });
  }
  until([&] { return b.messages.damages.size() == 1; }, [&] { b.progress(); });
  for (int i = 0; i < 100; ++i) b.progress();
  EXPECT_EQ(b.messages.damages.size(), 1u);
  EXPECT_NE(b.messages.damages[0].find("ended in a message"), std::string::npos);
}

// Those that wait are taken once there is a file descriptor again. Meanwhile the listener wakes nobody.
TEST_F(MessageSocketsTest, ConnectionsThatFindNoFileDescriptorAreTakenLater) {
  Side b = open_side();
  SocketStranger early(b.port());
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = {3, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  for (int i = 0; i < 10; ++i) b.progress();
  pollfd waiting{b.sockets->wait_fd(), POLLIN, 0};
  int readable = ::poll(&waiting, 1, 0);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(readable, 0);
  ASSERT_TRUE(early.greet());
  ASSERT_TRUE(early.send_frame(std::vector<std::byte>(10)));
  until([&] { return b.messages.received.size() == 1; }, [&] { b.progress(); });
}

// A child that holds the parent's sockets, and closes them, takes nothing from the parent; and what ends in the
// parent is no event there, although the child still holds it.
TEST_F(MessageSocketsTest, AForkedChildLeavesTheConnectionsAlone) {
  Side a = open_side();
  std::optional<Side> b = open_side();
  size_t to_b = a.add(*b);
  ASSERT_EQ(a.send(to_b, "before"), Sent::kAll);
  until([&] { return b->messages.received.size() == 1; }, [&] { b->progress(); });
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    char byte;
    ::close(go[1]);
    (void)!::read(go[0], &byte, 1);
    ::_exit(0);
  }
  ASSERT_EQ(a.send(to_b, "after"), Sent::kAll);
  until([&] { return b->messages.received.size() == 2; }, [&] { b->progress(); });
  b.reset();  // the child still holds its connections
  until([&] { return a.send(to_b, "to nobody") == Sent::kFailed; }, [&] { a.progress(); });
  ::close(go[1]);
  ::waitpid(child, nullptr, 0);
  ::close(go[0]);
}

}  // namespace
}  // namespace smddp::fabric
