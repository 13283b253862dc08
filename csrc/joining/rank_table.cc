#include "joining/rank_table.h"

#include <algorithm>
#include <utility>

namespace smddp {
namespace {

// The longest run that its byte can count, and the fewest equal bytes that end a run of others.
constexpr size_t kLongestRun = 255, kWorthARun = 3;

// Seven bits in each byte, the lowest first; all bytes but the last have the highest bit.
void write_size(Encoder& w, size_t size) {
  for (; size > 127; size >>= 7) w.number(static_cast<uint8_t>(size | 128));
  w.number(static_cast<uint8_t>(size));
}

size_t read_size(Decoder& r) {
  size_t size = 0;
  for (int shift = 0; r.good; shift += 7) {
    auto byte = r.number<uint8_t>();
    size |= static_cast<size_t>(byte & 127) << shift;
    if (byte < 128) break;
    r.good = r.good && shift < 28;
  }
  return size;
}

size_t equal_bytes(const Blob& blob, const Blob& before, size_t at) {
  size_t end = std::min({blob.size(), before.size(), at + kLongestRun}), i = at;
  while (i < end && blob[i] == before[i]) ++i;
  return i > at ? i - at : 0;
}

// The size, then runs: how many bytes are as in `before`, how many others follow, and these.
void write_difference(Encoder& w, const Blob& blob, const Blob& before) {
  write_size(w, blob.size());
  for (size_t at = 0; at < blob.size();) {
    size_t equal = equal_bytes(blob, before, at);
    at += equal;
    size_t others = 0;
    while (at + others < blob.size() && others < kLongestRun &&
           equal_bytes(blob, before, at + others) < kWorthARun) {
      ++others;
    }
    w.number(static_cast<uint8_t>(equal));
    w.number(static_cast<uint8_t>(others));
    auto from = blob.begin() + static_cast<std::ptrdiff_t>(at);
    w.out.insert(w.out.end(), from, from + static_cast<std::ptrdiff_t>(others));
    at += others;
  }
}

Blob read_difference(Decoder& r, const Blob& before) {
  const size_t size = read_size(r);
  Blob blob;
  while (r.good && blob.size() < size) {
    size_t equal = r.number<uint8_t>(), others = r.number<uint8_t>();
    size_t left = size - blob.size();
    r.good = r.good && equal + others > 0 && equal + others <= left &&
             (equal == 0 || blob.size() + equal <= before.size());
    if (!r.good) break;
    auto from = before.begin() + static_cast<std::ptrdiff_t>(equal == 0 ? 0 : blob.size());
    blob.insert(blob.end(), from, from + static_cast<std::ptrdiff_t>(equal));
    Blob rest = r.take<Blob>(others);
    blob.insert(blob.end(), rest.begin(), rest.end());
  }
  return blob;
}

}  // namespace

Blob pack_table(const std::vector<Blob>& blobs) {
  Encoder w;
  const Blob none;
  const Blob* before = &none;
  for (const Blob& blob : blobs) write_difference(w, blob, *std::exchange(before, &blob));
  return std::move(w.out);
}

Result<std::vector<Blob>> unpack_table(const Blob& table) {
  Decoder r(table);
  std::vector<Blob> blobs;
  const Blob none;
  while (r.good && !r.at_end())
    blobs.push_back(read_difference(r, blobs.empty() ? none : blobs.back()));
  if (!r.good) return Status(Code::kInternal, "a rank handed on a damaged table of ranks");
  return blobs;
}

}  // namespace smddp
