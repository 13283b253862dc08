// Unix sockets between the processes of one user on a host, in the abstract namespace: nothing is left in a
// file system. A socket's name holds 16 random bytes, which only those know that were told.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>

#include "common/file_descriptor.h"
#include "common/status.h"

namespace smddp::device {

using SocketName = std::array<uint8_t, 16>;

// Messages on all of these keep their boundaries. A socket that listens under a new name, for what `label` says.
Result<FileDescriptor> listen_as(const char* label, SocketName* name, int flags = 0);
Result<FileDescriptor> connect_to(const char* label, const SocketName& name);
// Whether the other end is a process of this user.
bool of_this_user(int socket);

}  // namespace smddp::device
