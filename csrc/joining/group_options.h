// What a group is to be. The caller of Group::create() fills it in; every step that makes the group reads it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "network/model.h"

namespace smddp {

struct GroupOptions {
  std::string name;
  uint64_t timeout_ns = 600'000'000'000ull;
  std::string host;  // identity of this rank's host; empty: host_identity()
  // Whether to read peers' memory with process_vm_readv; unset: SMDDP_DEBUG=single_copy, or what costs less
  // on this host, which is measured.
  std::optional<bool> single_copy;
  // The job is known to span hosts: the fabric is opened before the first group knows its ranks, which
  // saves the group a second exchange over the store. Not needed if WORLD_SIZE says so.
  bool several_hosts = false;
  // How long a rank of another host that is waited for may leave questions unanswered; 0: for ever.
  uint64_t silence_ns = 30'000'000'000ull;
  // Follows the name of a part of a group in the flight recorder, as a part counts operations of its own.
  std::string part = {};
  // Which operations the user sends to other backends, as a text that all ranks must have alike.
  std::string routes = {};
  // In a group of at most so many, each rank reads what every rank has published. No setting of the user: both
  // ways lead to the same group. Tests set it, to make small groups as large ones are made. Not measured: from 64 ranks on
  // the other way asks less of the store (docs/dev/scale.md).
  int few_ranks = 32;
  bool whole_job = false;  // of all ranks: later groups reuse what they tell of their processes
  // Of the network between hosts, instead of what SMDDP_DEBUG=curve says.
  std::optional<NetworkModel> network = {};
  bool recorded = true;  // its operations, in the flight recorder
};

}  // namespace smddp
