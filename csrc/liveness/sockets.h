// TCP sockets, of which none lasts longer than a question and its answer. Called by Responder and Prober.
#pragma once

#include <cstddef>
#include <string>

#include "common/file_descriptor.h"
#include "common/status.h"
#include "liveness/contact.h"

namespace smddp::liveness {

// Listens at `ip`, an address of this host ("": the first of its interfaces that is not loopback), and
// fills in the contact's address.
Result<FileDescriptor> listen_at(const std::string& ip, Contact* contact);
// Begins to connect: 0, or the error. `*socket` is closed by a reset, which leaves nothing behind.
int begin_connect(const Contact& to, FileDescriptor* socket);

// Moves bytes of a message of `size` bytes of which `*done` were moved before. kMore: call again when the
// socket is ready. `*error`: an errno, or 0 if the other side has closed the connection.
enum class Moved { kAll, kMore, kFailed };
Moved read_some(const FileDescriptor& socket, void* data, size_t size, size_t* done, int* error);
Moved write_some(const FileDescriptor& socket, const void* data, size_t size, size_t* done);

}  // namespace smddp::liveness
