#include "common/replace_file.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace smddp {

Status replace_file(const std::string& path, std::string_view contents) {
  std::string part = path + ".XXXXXX";
  const int fd = ::mkstemp(part.data());
  if (fd < 0) return errno_status("could not write " + path);
  bool written =
      ::write(fd, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size());
  written = ::close(fd) == 0 && written;
  if (written && ::rename(part.c_str(), path.c_str()) == 0) return {};
  Status failed = errno_status("could not write " + path);
  ::unlink(part.c_str());
  return failed;
}

}  // namespace smddp
