#include "joining/process_directory.h"

#include <optional>
#include <set>

#include "common/siphash.h"
#include "joining/rank_table.h"

namespace smddp {
namespace {

Blob table_of(const std::vector<RankInfo>& infos) {
  std::vector<Blob> processes;
  for (const RankInfo& info : infos) processes.push_back(encode<ProcessInfo>(info));
  return pack_table(processes);
}

// The number of the directory that a value refers to; std::nullopt: it is no reference.
std::optional<uint64_t> directory_of(const Blob& value) {
  if (!is_reference(value)) return std::nullopt;
  auto reference = decode<Reference>(value);
  return reference ? std::optional(reference.value().directory) : std::nullopt;
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

Blob RankValues::describe(const RankInfo& mine) {
  whole_ = encode(mine);
  refers_ = place_.describes(mine);
  if (!refers_) return whole_;
  return encode(Reference{place_.directory->number(), place_.place - rank_, mine});
}

std::vector<int> RankValues::unclear(const std::vector<Blob>& values) {
  std::vector<int> referring;
  std::set<std::optional<uint64_t>> directories;
  for (size_t r = 0; r < values.size(); ++r) {
    directories.insert(directory_of(values[r]));
    if (is_reference(values[r])) referring.push_back(static_cast<int>(r));
  }
  bool one_directory = directories.size() == 1 && directories.begin()->has_value();
  return one_directory ? std::vector<int>() : referring;
}

bool RankValues::can_read(const Blob& value) const {
  return !is_reference(value) ||
         (place_.directory && directory_of(value) == place_.directory->number());
}

Result<std::vector<RankInfo>> RankValues::read_all(const std::vector<Blob>& values) const {
  std::vector<RankInfo> infos(values.size());
  std::vector<int> places;
  std::vector<size_t> referring;
  for (size_t r = 0; r < values.size(); ++r) {
    if (!is_reference(values[r])) {
      if (Status s = decode<RankInfo>(values[r]).into(infos[r]); !s) return s;
      continue;
    }
    auto reference = decode<Reference>(values[r]);
    if (!reference) return reference.status();
    if (!place_.directory || reference.value().directory != place_.directory->number())
      return Status(Code::kInternal, "a rank refers to a directory that this one does not have");
    static_cast<GroupPart&>(infos[r]) = reference.value().part;
    places.push_back(static_cast<int>(r) + reference.value().offset);
    referring.push_back(r);
  }
  if (places.empty()) return infos;
  auto processes = place_.directory->look_up(places);
  if (!processes) return processes.status();
  for (size_t i = 0; i < referring.size(); ++i) {
    RankInfo& info = infos[referring[i]];
    static_cast<ProcessInfo&>(info) = std::move(processes.value()[i]);
    if (info.serial > 0) info.key = own_key(info.token, info.serial);
  }
  return infos;
}

}  // namespace smddp
