#include "joining/joining.h"

#include <unistd.h>

#include <atomic>
#include <memory>
#include <utility>

#include "common/env.h"
#include "common/exceptions.h"
#include "common/random.h"
#include "joining/job_secret.h"

namespace smddp {
namespace {

using Fabric = FabricAddress::State;

// Of the keys of this process's groups.
std::atomic<uint32_t> latest_serial{0};

}  // namespace

Status Joining::describe(uint64_t token, RankInfo* mine) {
  const std::string& given = options_.host;
  mine->host = given.empty() ? host_identity() : given;
  mine->host_name = given.empty() ? host_name() : given;
  mine->token = token;
  mine->pid = getpid();
  mine->routes = digest_of_text(options_.routes);
  if (rank_ > 0) {
    mine->serial = ++latest_serial;
    mine->key = own_key(mine->token, mine->serial);
  } else if (!fill_random(mine->key.data(), mine->key.size())) {
    return {Code::kUnavailable, "could not draw a random group key"};
  }
  return describe_secret(mine);
}

Status Joining::describe_secret(RankInfo* mine) {
  if (Status s = configured_secret().into(secret_); !s) return s;
  mine->has_secret = secret_.has_value();
  if (mine->has_secret) mine->proof = proof_of_secret(*secret_, mine->key);
  if (mine->has_secret || rank_ > 0) return {};
  return random_secret().into(mine->drawn);
}

Status Joining::exchange(RankInfo mine) {
  if (ranks_ == 1) {
    learn({std::move(mine)});
    return {};
  }
  if (Status out = exchange_.publish(mine); !out) return out;
  auto infos = exchange_.infos();
  if (infos) learn(std::move(infos.value()));
  return infos.status();
}

void Joining::learn(std::vector<RankInfo> infos) {
  infos_ = std::move(infos);
  std::vector<std::string> hosts, host_names;
  std::vector<Rank> numbers;
  for (const RankInfo& i : infos_) {
    hosts.push_back(i.host);
    host_names.push_back(i.host_name);
    numbers.push_back(store_.number_of(static_cast<Rank>(numbers.size())));
  }
  key_ = infos_[0].key;
  members_.emplace(rank_, Topology(hosts), options_.name, std::move(host_names),
                   std::move(numbers));
}

Status Joining::agree() {
  Status known = agree_on_secret();
  return found_alike(known ? agree_on_routes() : known);
}

Status Joining::agree_on_secret() {
  for (Rank r = 0; r < ranks_; ++r) {
    if (info(r).has_secret == info(0).has_secret) continue;
    const char* has = info(r).has_secret ? " has a job secret and " : " has no job secret and ";
    return {Code::kInvalid,
            members_->describe(r) + has + members_->describe(0) +
                (info(0).has_secret ? " has one" : " has none") +
                ": give SMDDP_JOB_SECRET_FILE or SMDDP_JOB_SECRET to all ranks, or to none"};
  }
  if (!info(0).has_secret) secret_ = info(0).drawn;
  for (Rank r = 0; r < ranks_ && info(0).has_secret; ++r) {
    if (info(r).proof == proof_of_secret(*secret_, info(r).key)) continue;
    return {Code::kInvalid,
            members_->describe(r) + " has another job secret than " + members_->describe(rank_) +
                ": give all ranks the same SMDDP_JOB_SECRET_FILE or SMDDP_JOB_SECRET"};
  }
  return {};
}

Status Joining::agree_on_routes() const {
  for (Rank r = 1; r < ranks_; ++r) {
    if (info(r).routes == info(0).routes) continue;
    return {Code::kInvalid, members_->describe(r) + " has other \"routes\" than " +
                                members_->describe(0) + ": give all ranks the same smddp.routes"};
  }
  return {};
}

siphash::Key Joining::key_of_messages() const { return message_key(*secret_, key_); }

Status Joining::exchange_fabrics(const std::function<FabricAddress()>& open) {
  if (topology().nodes() == 1) return {};
  // The same list on every rank: it follows from the infos alone.
  std::vector<Rank> unopened;
  for (Rank r = 0; r < ranks_; ++r) {
    if (info(r).fabric.state == Fabric::kUnopened) unopened.push_back(r);
  }
  if (!unopened.empty()) {
    if (info(rank_).fabric.state == Fabric::kUnopened) {
      if (Status out = exchange_.publish(open()); !out) return out;
    }
    auto fabrics = exchange_.fabrics(unopened);
    if (!fabrics) return fabrics.status();
    for (size_t i = 0; i < unopened.size(); ++i)
      infos_[static_cast<size_t>(unopened[i])].fabric = std::move(fabrics.value()[i]);
  }
  for (Rank r = 0; r < ranks_; ++r) {
    const FabricAddress& fabric = info(r).fabric;
    if (fabric.state == Fabric::kOpen) continue;
    return found_alike({Code::kUnavailable, "group '" + options_.name + "' spans " +
                                                std::to_string(topology().nodes()) + " hosts and " +
                                                members_->describe(r) +
                                                " has no fabric: " + fabric.reason});
  }
  return {};
}

Result<std::string> Joining::agree_among_hosts(const char* topic,
                                               const std::function<std::string()>& find,
                                               const InfoExchange::Agree& agree) {
  if (topology().local_index(rank_) == 0) {
    if (Status out = exchange_.publish_found(topic, find()); !out) return out;
  }
  return exchange_.await_found(topic, topology().first_of_hosts(), infos_, agree);
}

std::optional<OwnPlace> Joining::conclude() {
  exchange_.forget();
  if (!options_.whole_job || ranks_ == 1) return std::nullopt;
  return OwnPlace{std::make_shared<ProcessDirectory>(key_, infos_), rank_, info(rank_)};
}

Status Joining::fail(const Status& why) noexcept {
  if (!alike_) return tell_failure(store_, rank_, options_, why);
  // A rank that has not read yet what this one hands on can't find the error by itself any more.
  if (exchange_.hands_on()) publish_failure(store_, why);
  return copy_of(why);
}

Status tell_failure(Store& store, Rank rank, const GroupOptions& options,
                    const Status& why) noexcept {
  try {
    if (Status cause = published_failure(store); !cause) return cause;
    if (why.code() == Code::kPeerLost) {  // of another rank
      publish_failure(store, why);
      return copy_of(why);
    }
    std::string host = options.host.empty() ? host_name() : options.host;
    Status cause{why.code(), "rank " + std::to_string(store.number_of(rank)) + " (" + host +
                                 ") could not join group '" + options.name + "': " + why.message()};
    publish_failure(store, cause);
    return cause;
  } catch (...) {
    return copy_of(why);
  }
}

}  // namespace smddp
