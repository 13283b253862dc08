#include "group/group_making.h"

#include <utility>

#include "group/group_builder.h"

namespace smddp {

struct GroupMaking::State {
  State(Engine& to, Rank rank, int ranks, const Group::Options& given)
      : engine(to), options(given), builder(to, store, rank, ranks, options) {}
  // Of a simulation, no rank of which asks it for anything.
  struct NoStore final : Store {
    Status set(const std::string&, const std::vector<uint8_t>&) override { return kNone; }
    Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>&,
                                                  const std::string&) override {
      return kNone;
    }
    bool has(const std::string&) override { return false; }
    void remove(const std::string&) override {}
    const Status kNone{Code::kInternal, "a simulation has no store"};
  };
  Engine& engine;
  const Group::Options options;
  NoStore store;
  GroupBuilder builder;
  RankInfo mine;
};

GroupMaking::GroupMaking(std::unique_ptr<State> state) : state_(std::move(state)) {}
GroupMaking::~GroupMaking() = default;

Result<std::unique_ptr<GroupMaking>> GroupMaking::begin(Engine& engine, Rank rank, int ranks,
                                                        const Group::Options& options) {
  auto state = std::make_unique<State>(engine, rank, ranks, options);
  Status described = state->builder.describe_itself(&state->mine);
  if (!described) return described;
  return std::unique_ptr<GroupMaking>(new GroupMaking(std::move(state)));
}

const RankInfo& GroupMaking::info() const { return state_->mine; }

Status GroupMaking::join(std::vector<RankInfo>& infos) {
  Status joined = state_->builder.join(std::move(infos));
  infos = state_->builder.take_infos();
  return joined;
}

Result<std::unique_ptr<Group>> GroupMaking::finish() {
  auto parts = state_->builder.finish();
  if (!parts) return parts.status();
  std::unique_ptr<Group> group(
      new Group(state_->engine, state_->options, std::move(parts.value())));
  state_->engine.attach(group->key_, group.get());
  return group;
}

}  // namespace smddp
