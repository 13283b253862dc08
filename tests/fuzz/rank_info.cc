// What ranks publish in the store: rank information, tables of them, fabric addresses, contacts and failures.
#include <cstdlib>

#include "input.h"
#include "joining/process_directory.h"
#include "joining/rank_info.h"
#include "joining/rank_table.h"
#include "joining/store.h"
#include "liveness/contact.h"

namespace {

// A store that answers each question with the same bytes.
class OneValue : public smddp::Store {
 public:
  explicit OneValue(std::vector<uint8_t> value) : value_(std::move(value)) {}
  smddp::Status set(const std::string&, const std::vector<uint8_t>&) override { return {}; }
  smddp::Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                       const std::string&) override {
    return std::vector<std::vector<uint8_t>>(keys.size(), value_);
  }
  bool has(const std::string&) override { return true; }
  void remove(const std::string&) override {}

 private:
  std::vector<uint8_t> value_;
};

std::vector<smddp::RankInfo> infos_of(int ranks) {
  std::vector<smddp::RankInfo> infos(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) infos[static_cast<size_t>(r)].pid = 1 + r;
  return infos;
}

// What can be read is read again from its own encoding.
template <class T>
void read_again(const smddp::Blob& blob) {
  auto read = smddp::decode<T>(blob);
  if (!read.ok()) return;
  auto again = smddp::decode<T>(smddp::encode(read.value()));
  if (!again.ok() || smddp::encode(again.value()) != smddp::encode(read.value())) std::abort();
}

}  // namespace

using namespace smddp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint8_t> blob(data, data + size);
  read_again<RankInfo>(blob);
  read_again<Reference>(blob);
  read_again<ProcessInfo>(blob);
  read_again<FabricAddress>(blob);
  read_again<HostLeader>(blob);
  // Ranks that read a value are those whose directory all values name.
  static const OwnPlace place{
      std::make_shared<const ProcessDirectory>(JobKey{}, infos_of(3)), 1, {}};
  const std::vector<Blob> values = {encode(RankInfo()), blob, blob};
  if (RankValues::unclear(values).size() > values.size()) std::abort();
  if (auto infos = RankValues(1, place).read_all(values); infos.ok() && infos.value().size() != 3)
    std::abort();
  if (auto table = unpack_table(blob); table.ok()) {
    auto again = unpack_table(pack_table(table.value()));
    if (!again.ok() || again.value() != table.value()) std::abort();
  }
  (void)decode<HandedTable>(blob);
  if (auto contact = liveness::unpack(blob); contact.ok()) (void)contact.value().text();
  OneValue store(blob);
  if (published_failure(store).ok()) std::abort();
  return 0;
}
