// The values of all ranks of a large group in one table, each as its difference from the one before: ranks of one
// host have much in common. Knows no value's format. The exchange of a large group and the directory of
// processes call it.
#pragma once

#include <vector>

#include "common/status.h"
#include "joining/encoding.h"

namespace smddp {

Blob pack_table(const std::vector<Blob>& blobs);
Result<std::vector<Blob>> unpack_table(const Blob& table);

}  // namespace smddp
