// What this process has once for all its groups: the engine that drives them, its transport, its
// presence on this host, the neighbours, staging memory, and what it knows of the processes of its job. The torch
// module makes one; a group is made with it, and keeps the parts that it needs.
#pragma once

#include <memory>

#include "common/staging.h"
#include "intranode/neighbors.h"
#include "intranode/presence.h"
#include "joining/process_directory.h"
#include "joining/rank_info.h"
#include "progress/engine.h"
#include "progress/network.h"
#include "transport/transport.h"

namespace smddp {

class Process {
 public:
  // `open`: as of Network.
  static Result<std::unique_ptr<Process>> create(transport::Open open = nullptr);

  Engine& engine() { return engine_; }
  const intranode::Presence& presence() const { return *presence_; }
  // The process that `info` names, shared by all groups that contain it.
  Result<std::shared_ptr<intranode::Neighbor>> neighbor(const RankInfo& info);
  // Opens the transport on first use. An error if it has failed.
  Result<transport::Transport*> fabric();
  // nullptr if it is not open.
  transport::Transport* open_fabric();
  // Messages and writes of no member of the job, which were dropped.
  uint64_t refused();

  // Under the engine's lock.
  Network& network() { return network_; }
  // In what the first group of the whole job has told of its processes, for further groups.
  OwnPlace& place() { return place_; }
  // Whether a group of the whole job has shown that all of the job's ranks are on this host.
  bool on_one_host() const { return on_one_host_; }
  void set_on_one_host(bool all) { on_one_host_ = all; }
  // Memory for the groups' fragments.
  StagingPool& staging() { return staging_; }
  // Why the first group broke, or could not be made, since this process last began to make one, as the end of a
  // sentence: other groups of it may end in consequence, and other ranks hear only of that. "": none did.
  const std::string& cause() const { return cause_; }
  bool has_broken() const { return broken_; }  // a group that worked
  void broke(const std::string& why) {
    broken_ = true;
    blame(why);
  }
  void blame(const std::string& why);
  void forget_cause() {
    cause_.clear();
    broken_ = false;
  }

 private:
  friend class SimulatedEngine;
  Process(std::unique_ptr<intranode::Presence> presence, transport::Open open)
      : presence_(std::move(presence)),
        network_(std::move(open)),
        engine_(*presence_, neighbors_, network_) {}

  const std::unique_ptr<intranode::Presence> presence_;
  std::string cause_;
  bool broken_ = false;
  StagingPool staging_;  // the network may keep what lies in it
  Network network_;
  intranode::Neighbors neighbors_;
  OwnPlace place_;
  bool on_one_host_ = false;
  Engine engine_;  // destroyed first
};

}  // namespace smddp
