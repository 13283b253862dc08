// The job's secret: where it comes from, and that ranks with different ones make no group.
#include "joining/job_secret.h"

#include <cstdlib>
#include <fstream>

#include "world.h"

namespace smddp {
namespace {

class JobSecret : public testing::Test {
 protected:
  void SetUp() override {
    ::unsetenv("SMDDP_JOB_SECRET");
    ::unsetenv("SMDDP_JOB_SECRET_FILE");
  }
  void TearDown() override { SetUp(); }
  static siphash::Key configured() {
    auto secret = configured_secret();
    EXPECT_TRUE(secret.ok()) << secret.status().message();
    EXPECT_TRUE(secret.value().has_value());
    return *secret.value();
  }
};

TEST_F(JobSecret, IsNoneUnlessTheUserGivesOne) {
  auto secret = configured_secret();
  ASSERT_TRUE(secret.ok());
  EXPECT_FALSE(secret.value().has_value());
}

TEST_F(JobSecret, IsThatOfTheFileBeforeThatOfTheEnvironment) {
  ::setenv("SMDDP_JOB_SECRET", "0123456789abcdef", 1);
  siphash::Key of_environment = configured();
  std::string path = testing::TempDir() + "job_secret";
  std::ofstream(path) << "fedcba9876543210\n";
  ::setenv("SMDDP_JOB_SECRET_FILE", path.c_str(), 1);
  siphash::Key of_file = configured();
  EXPECT_NE(of_file, of_environment);
  std::ofstream(path) << "0123456789abcdef \r\n\n";
  EXPECT_EQ(configured(), of_environment) << "the end of a line belongs to no secret";
}

TEST_F(JobSecret, ShortOrUnreadableOnesAreErrors) {
  ::setenv("SMDDP_JOB_SECRET", "0123456789abcde", 1);
  auto secret = configured_secret();
  ASSERT_FALSE(secret.ok());
  EXPECT_TRUE(says(secret.status(), "SMDDP_JOB_SECRET"));
  EXPECT_EQ(secret.status().message().find("0123456789abcde"), std::string::npos);
  ::setenv("SMDDP_JOB_SECRET_FILE", "/nowhere/secret", 1);
  secret = configured_secret();
  ASSERT_FALSE(secret.ok());
  EXPECT_TRUE(says(secret.status(), "/nowhere/secret"));
}

TEST_F(JobSecret, GivesEachGroupAKeyOfItsOwn) {
  JobKey one{1}, two{2};
  siphash::Key secret{3, 4}, other{3, 5};
  EXPECT_EQ(message_key(secret, one), message_key(secret, one));
  EXPECT_NE(message_key(secret, one), message_key(secret, two));
  EXPECT_NE(message_key(secret, one), message_key(other, one));
  EXPECT_NE(proof_of_secret(secret, one), proof_of_secret(other, one));
  EXPECT_NE(proof_of_secret(secret, one), message_key(secret, one).low);
}

// Gives rank 1 another secret than rank 0 has: the environment changes when rank 0 has published its own.
struct Outcome {
  Status status[2];
};
Outcome join(const char* first, const char* second) {
  MemoryStore store;
  Outcome outcome;
  std::vector<std::unique_ptr<Process>> processes;
  for (int r = 0; r < 2; ++r) processes.push_back(std::move(Process::create().value()));
  auto create = [&](int rank) {
    auto group = Group::create(*processes[static_cast<size_t>(rank)], store, rank, 2,
                               {.name = "g", .host = rank == 0 ? "A" : "B", .several_hosts = true});
    outcome.status[rank] = group.status();
  };
  auto set = [](const char* value) {
    value != nullptr ? ::setenv("SMDDP_JOB_SECRET", value, 1) : ::unsetenv("SMDDP_JOB_SECRET");
  };
  set(first);
  for (auto& process : processes) EXPECT_TRUE(process->fabric().ok());
  std::thread zero([&] { create(0); });
  while (!store.has("rank_info/0")) std::this_thread::yield();
  set(second);
  create(1);
  zero.join();
  return outcome;
}

TEST_F(JobSecret, RanksWithDifferentOnesMakeNoGroup) {
  for (const char* second : {"another secret of it", static_cast<const char*>(nullptr)}) {
    Outcome outcome = join("the secret of rank 0", second);
    for (const Status& status : outcome.status) {
      ASSERT_FALSE(status.ok());
      EXPECT_TRUE(says(status, "job secret"));
      EXPECT_TRUE(says(status, "rank 1 (B)"));
      EXPECT_EQ(status.message().find("the secret of"), std::string::npos) << status.message();
    }
  }
  EXPECT_TRUE(join("the secret of rank 0", "the secret of rank 0").status[1].ok());
}

}  // namespace
}  // namespace smddp
