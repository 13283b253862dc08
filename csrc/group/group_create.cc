// Makes groups: group_builder.h says how.
#include <utility>

#include "joining/exchange.h"
#include "joining/prefix_store.h"
#include "common/exceptions.h"
#include "group/group.h"
#include "group/group_builder.h"

namespace smddp {
namespace {

class Making {
 public:
  explicit Making(Engine& engine) : engine_(engine) { engine_.count_making(1); }
  ~Making() { engine_.count_making(-1); }
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;

 private:
  Engine& engine_;
};

}  // namespace

Status Group::tell_failure(Store& store, int rank, const Options& options,
                           const Status& why) noexcept {
  try {
    if (Status cause = published_failure(store); !cause) return cause;
    int called = options.called.empty() ? rank : options.called[static_cast<size_t>(rank)];
    std::string host = options.host.empty() ? host_name() : options.host;
    Status cause{why.code(), "rank " + std::to_string(called) + " (" + host +
                                 ") could not join group '" + options.name + "': " + why.message()};
    publish_failure(store, cause);
    return cause;
  } catch (...) {
    return copy_of(why);
  }
}

Result<std::unique_ptr<Group>> Group::create(Engine& engine, Store& store, int rank, int ranks,
                                             Options options) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return Status(Code::kInvalid,
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " is no rank");
  }
  Making making(engine);
  GroupBuilder builder(engine, store, rank, ranks, options);
  std::unique_ptr<Group> group;
  Status made;
  try {
    auto parts = builder.build();
    made = parts.status();
    if (made) {
      group.reset(new Group(engine, options, std::move(parts.value())));
      engine.attach(group->key_, group.get());
      made = builder.await_hosts(group->topology());
      if (made) group->use(builder.network().model());
    }
  } catch (...) {
    made = status_of_exception();
  }
  if (made) {
    builder.conclude();
    return group;
  }
  made = builder.fail(made);
  if (group) group->abort(made.message(), true);
  return made;
}

Group::Group(Engine& engine, Options options, GroupParts parts)
    : engine_(engine),
      options_(std::move(options)),
      key_(parts.key),
      members_(std::move(parts.members)),
      shape_(parts.shape),
      local_(std::move(parts.local)),
      remote_(std::move(parts.remote)),
      tallies_(members_.ranks()),
      remote_watch_(key_, members_, remote_, fragments_, std::move(parts.liveness),
                    options_.silence_ns),
      local_watch_(members_, local_, fragments_, options_.silence_ns),
      failures_(members_, local_, remote_, fragments_, health_, remote_watch_, local_watch_,
                options_.timeout_ns),
      ending_(remote_, fragments_),
      recorder_(options_.name + options_.part),
      context_{members_, shape_, local_, remote_, turns_, tallies_, health_, engine_.staging()},
      maker_(context_, parts.algorithm, fragments_) {}

Result<std::unique_ptr<Group>> Group::subgroup(Store& store, const std::string& label,
                                               const std::vector<Rank>& ranks) {
  Options options = options_;
  {
    Engine::Lock lock = engine_.lock();
    options.timeout_ns = failures_.timeout_ns();
  }
  options.several_hosts = topology().nodes() > 1;
  options.part += "/" + label;
  options.called.clear();
  int mine = -1;
  for (Rank r : ranks) {
    if (r == rank()) mine = static_cast<int>(options.called.size());
    options.called.push_back(members_.called(r));
  }
  PrefixStore prefixed(store, label + "/");
  return create(engine_, prefixed, mine, static_cast<int>(ranks.size()), std::move(options));
}

}  // namespace smddp
