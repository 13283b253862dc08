// Which way is faster between the ranks of a host: the host is asked, by collectives of the first group that its ranks
// make, both ways in turns. GroupBuilder calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "collectives/selector.h"
#include "common/status.h"
#include "group/group.h"

namespace smddp {

// Carries out a collective with so many bytes in each rank's block, by reads of the peers' memory or through slots.
// Nanoseconds that the slowest rank took: the same on all ranks.
using TimeCollective =
    std::function<Result<double>(Collective collective, size_t bytes, bool by_reads)>;

// Of `ranks` ranks on one host, which call it together and get the same. About 10 ms with a core for each rank.
Result<ReadsFrom> measure_reads(int ranks, const TimeCollective& time);

// The same of a group that is used for nothing else yet. `use`: its operations go this way from now on.
Result<ReadsFrom> measure_host(Engine& engine, Group& group,
                               const std::function<void(const ReadsFrom&)>& use);

// What to assume where reads are asked for, not measured.
ReadsFrom usual_reads();

// A word for other ranks, which is 0 if nothing is known, and what it stands for.
uint64_t word_of(const ReadsFrom& reads);
ReadsFrom reads_of(uint64_t word);
// For people: "gathers by reads from 512 KiB on, sums through slots".
std::string text_of(const ReadsFrom& reads);

}  // namespace smddp
