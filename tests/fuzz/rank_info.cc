// What ranks publish in the store: rank information, tables of them, fabric addresses, contacts and failures.
#include <cstdlib>

#include "bootstrap/exchange.h"
#include "bootstrap/rank_table.h"
#include "input.h"
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

}  // namespace

using namespace smddp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint8_t> blob(data, data + size);
  // What can be read is read again from its own encoding.
  if (auto info = decode(blob); info.ok()) {
    auto again = decode(encode(info.value()));
    if (!again.ok() || encode(again.value()) != encode(info.value())) std::abort();
  }
  if (auto fabric = decode_fabric(blob); fabric.ok()) {
    auto again = decode_fabric(encode(fabric.value()));
    if (!again.ok() || encode(again.value()) != encode(fabric.value())) std::abort();
  }
  if (auto table = unpack_table(blob); table.ok()) {
    auto again = unpack_table(pack_table(table.value()));
    if (!again.ok() || again.value() != table.value()) std::abort();
  }
  if (auto leader = decode_leader(blob); leader.ok()) {
    auto again = decode_leader(encode(leader.value()));
    if (!again.ok() || encode(again.value()) != encode(leader.value())) std::abort();
  }
  (void)decode_handed(blob);
  if (auto contact = liveness::unpack(blob); contact.ok()) (void)contact.value().text();
  OneValue store(blob);
  if (published_failure(store).ok()) std::abort();
  return 0;
}
