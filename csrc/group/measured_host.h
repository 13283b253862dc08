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

// Carries out an AllGather with so many bytes in each rank's block, by reads of the peers' memory or through slots.
// Nanoseconds that the slowest rank took: the same on all ranks.
using TimeGather = std::function<Result<double>(size_t bytes, bool by_reads)>;

// The largest block that is gathered by reads, 0: none (Shape::reads_up_to). Of `ranks` ranks on one host, which call it
// together and get the same. For two ranks 16 to 20 ms where reads pay (Intel Xeon).
Result<size_t> measure_reads(int ranks, const TimeGather& time);

// The same of a group that is used for nothing else yet. `use`: its gathers of up to so many bytes are reads from now on.
Result<size_t> measure_host(Engine& engine, Group& group, const std::function<void(size_t)>& use);

// A word for other ranks, which is 0 if nothing is known, and what it stands for.
uint64_t word_of_reads(size_t up_to);
size_t reads_of(uint64_t word);
// For people: "gathers of blocks of up to 4096 KiB by reads".
std::string text_of_reads(size_t up_to);

}  // namespace smddp
