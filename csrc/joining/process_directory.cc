#include "joining/process_directory.h"

#include <utility>

#include "common/siphash.h"
#include "joining/rank_table.h"

namespace smddp {
namespace {

Blob table_of(const std::vector<RankInfo>& infos) {
  std::vector<Blob> processes;
  for (const RankInfo& info : infos) processes.push_back(encode<ProcessInfo>(info));
  return pack_table(processes);
}

}  // namespace

ProcessDirectory::ProcessDirectory(const JobKey& key, const std::vector<RankInfo>& infos)
    : number_(siphash::hash({}, key.data(), key.size())), table_(table_of(infos)) {}

Result<std::vector<ProcessInfo>> ProcessDirectory::look_up(const std::vector<int>& places) const {
  auto blobs = unpack_table(table_);
  if (!blobs) return blobs.status();
  std::vector<ProcessInfo> found;
  for (int place : places) {
    if (place < 0 || static_cast<size_t>(place) >= blobs.value().size())
      return Status(Code::kInternal, "a rank refers to a place that its directory does not have");
    auto process = decode<ProcessInfo>(blobs.value()[static_cast<size_t>(place)]);
    if (!process) return process.status();
    found.push_back(std::move(process.value()));
  }
  return found;
}

}  // namespace smddp
