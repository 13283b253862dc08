// The process's environment while the fabric opens, which other threads may read, and its signal handlers.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "common/env.h"
#include "common/signals.h"
#include "debug_setting.h"
#include "fabric_endpoints.h"

namespace {

std::atomic<int> changes_in_place{0};

}  // namespace

// Stands before the C library's: counts the calls of the core.
extern "C" int setenv(const char* name, const char* value, int replace) {
  ++changes_in_place;
  static auto* real =
      reinterpret_cast<int (*)(const char*, const char*, int)>(::dlsym(RTLD_NEXT, "setenv"));
  return real(name, value, replace);
}

namespace smddp {
namespace {

std::vector<std::string> texts(char** list) {
  std::vector<std::string> all;
  for (; *list != nullptr; ++list) all.emplace_back(*list);
  return all;
}

TEST(DebugSettings, AreKeysOfOneVariable) {
  DebugSetting curve("curve", "20:4:1.25"), algorithm("algorithm", "log");
  EXPECT_EQ(env::debug("curve"), "20:4:1.25");
  EXPECT_EQ(env::debug("algorithm"), "log");
  {
    DebugSetting later("algorithm", "joint"), entries("flight_recorder", "7");
    EXPECT_EQ(env::debug("algorithm"), "joint");
    EXPECT_EQ(env::debug_number("flight_recorder"), 7);
  }
  EXPECT_EQ(env::debug("algorithm"), "log");
  EXPECT_EQ(env::debug("transfer"), "");
  EXPECT_EQ(env::debug_number("flight_recorder"), 2000);
  EXPECT_EQ(env::debug_number("single_copy"), std::nullopt);
}

TEST(Environment, TheFabricOpensWithoutChangingTheListThatOthersRead) {
  ::unsetenv("FI_TCP_MAX_RX_SIZE");
  ::unsetenv("FI_PROVIDER");
  char** list = environ;
  std::vector<std::string> before = texts(list);
  changes_in_place = 0;
  auto endpoint = value_of(ofi::Endpoint::open(ofi::loopback("")));
  EXPECT_EQ(changes_in_place, 0);
  EXPECT_EQ(texts(list), before);
  EXPECT_STREQ(std::getenv("FI_TCP_MAX_RX_SIZE"), "256");
  if (!std::filesystem::exists("/sys/class/infiniband"))
    EXPECT_STREQ(std::getenv("FI_PROVIDER"), "^verbs");
}

TEST(Environment, AVariableThatIsSetKeepsItsValue) {
  ::setenv("SMDDP_TEST_KEPT", "user's", 1);
  env::set_defaults({{"SMDDP_TEST_KEPT", "ours"}, {"SMDDP_TEST_NEW", "ours"}});
  EXPECT_STREQ(std::getenv("SMDDP_TEST_KEPT"), "user's");
  EXPECT_STREQ(std::getenv("SMDDP_TEST_NEW"), "ours");
  ::setenv("SMDDP_TEST_NEW", "user's", 1);  // as any variable
  EXPECT_STREQ(std::getenv("SMDDP_TEST_NEW"), "user's");
  ::unsetenv("SMDDP_TEST_NEW");
  EXPECT_EQ(std::getenv("SMDDP_TEST_NEW"), nullptr);
}

void of_the_program(int) {}
void of_a_library(int) {}

TEST(Signals, HandlersThatALibraryHasChangedAreRestored) {
  ::signal(SIGUSR1, of_the_program);
  ::signal(SIGUSR2, SIG_DFL);
  {
    KeepSignalHandlers keep;
    ::signal(SIGUSR1, of_a_library);
    ::signal(SIGUSR2, of_a_library);
  }
  EXPECT_EQ(::signal(SIGUSR1, SIG_DFL), of_the_program);
  EXPECT_EQ(::signal(SIGUSR2, SIG_DFL), SIG_DFL);
}

TEST(Environment, ThreadsReadItWhileDefaultsAreSet) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] {
      while (!stop) EXPECT_EQ(std::getenv("SMDDP_TEST_NEVER_SET"), nullptr);
    });
  }
  for (int i = 0; i < 500; ++i) {
    std::string name = "SMDDP_TEST_" + std::to_string(i);
    env::set_defaults({{name, "1"}});
    EXPECT_STREQ(std::getenv(name.c_str()), "1");
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

}  // namespace
}  // namespace smddp
