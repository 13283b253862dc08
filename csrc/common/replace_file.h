// Writes small files that other processes read meanwhile. Knows no format.
#pragma once

#include <string>
#include <string_view>

#include "common/status.h"

namespace smddp {

// Under another name first, then renamed: a reader finds the old file or the new one, whole.
Status replace_file(const std::string& path, std::string_view contents);

}  // namespace smddp
