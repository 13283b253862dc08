// The job's secret: who knows it is a member of the job. Each group derives the key of its messages from
// it. It comes from the user, by a file or the environment, or the first rank of a group draws it and the
// store hands it out. Knows nothing of messages. Called where a group is made.
#pragma once

#include <cstdint>
#include <optional>

#include "common/signature.h"
#include "common/siphash.h"
#include "common/status.h"

namespace smddp {

// The fewest characters of a secret that the user gives.
inline constexpr size_t kShortestSecret = 16;

// The secret of SMDDP_JOB_SECRET_FILE, or of SMDDP_JOB_SECRET if no file is named; std::nullopt if
// neither is set. An error if the file can't be read, or the secret is too short.
Result<std::optional<siphash::Key>> configured_secret();
// kUnavailable if the kernel gives no random bytes.
Result<siphash::Key> random_secret();

// The key of the messages of the group `group`.
siphash::Key message_key(const siphash::Key& secret, const JobKey& group);
// Shows a process that has the same secret that this one has it; it does not show the secret. `own`: the
// random key of the rank that publishes it.
uint64_t proof_of_secret(const siphash::Key& secret, const JobKey& own);

}  // namespace smddp
