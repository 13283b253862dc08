#include "joining/job_secret.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "common/env.h"
#include "common/random.h"

namespace smddp {
namespace {

// What a hash of the secret is for: the values of one use tell nothing of those of another.
enum class Use : uint64_t { kLowHalf = 1, kHighHalf, kProof };

uint64_t derive(const siphash::Key& secret, Use use, const JobKey& key) {
  siphash::Hash hash(secret);
  hash.add(&use, sizeof use);
  hash.add(key.data(), key.size());
  return hash.value();
}

Result<std::optional<siphash::Key>> condense(const std::string& text, const std::string& origin) {
  if (text.size() < kShortestSecret) {
    return Status(Code::kInvalid, origin + " holds a job secret of " + std::to_string(text.size()) +
                                      " characters; give it at least " +
                                      std::to_string(kShortestSecret) +
                                      ", for instance those of `openssl rand -hex 32`");
  }
  JobKey none{};
  siphash::Key key{siphash::hash({}, text.data(), text.size()),
                   siphash::hash({~uint64_t{0}, 0}, text.data(), text.size())};
  return std::optional<siphash::Key>(message_key(key, none));
}

}  // namespace

Result<std::optional<siphash::Key>> configured_secret() {
  std::string path = env::get("JOB_SECRET_FILE");
  if (path.empty()) {
    std::string text = env::get("JOB_SECRET");
    if (text.empty()) return std::optional<siphash::Key>();
    return condense(text, "SMDDP_JOB_SECRET");
  }
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) {
    return Status(Code::kInvalid, "SMDDP_JOB_SECRET_FILE names " + path +
                                      ", which can't be read (" + std::strerror(errno) + ")");
  }
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return condense(text, path);
}

Result<siphash::Key> random_secret() {
  siphash::Key key;
  if (fill_random(&key, sizeof key)) return key;
  return Status(Code::kUnavailable, "could not draw a random job secret");
}

siphash::Key message_key(const siphash::Key& secret, const JobKey& group) {
  return {derive(secret, Use::kLowHalf, group), derive(secret, Use::kHighHalf, group)};
}

uint64_t proof_of_secret(const siphash::Key& secret, const JobKey& own) {
  return derive(secret, Use::kProof, own);
}

}  // namespace smddp
