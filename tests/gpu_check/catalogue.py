"""The steps, in the order in which they run: cheap proofs first, measurements last."""

from __future__ import annotations

from gpu_check.step import LONGEST, Step

STEPS = (
    Step(
        "build",
        "an environment from the bundle, and the extension",
        "building:build",
        470,
        0,
        False,
    ),
    Step("machine", "GPUs, driver, limits; which ways lead from GPU to GPU", "building:look", 90),
    Step("forms", "every form of call, in several layouts", "correctness:forms", 300),
    Step("types", "types, operations, sizes and places", "correctness:types", 300),
    Step("misaligned", "sums from and to addresses off alignment", "correctness:misaligned", 180),
    Step("large", "more than 4 GiB in one call", "correctness:large", 300),
    Step("queue", "a thousand operations in flight, and long ones", "order:queue", 300),
    Step("groups", "two groups, with memory freed in between", "order:groups", 240),
    Step("graphs", "CUDA graphs, recorded and replayed", "order:graphs", 180, simulated=False),
    Step("connections", "1, 8 and 32 hardware queues", "order:connections", 240),
    Step(
        "expandable",
        "expandable segments, few descriptors",
        "memory:expandable",
        300,
        simulated=False,
    ),
    Step(
        "memory", "freed memory returns; peak beside NCCL", "memory:returns", 300, simulated=False
    ),
    Step("death", "a killed rank is named, and streams are released", "failure:death", 240),
    Step("zero_sm", "AllGather while kernels hold all SMs", "held:zero_sm", 120, simulated=False),
    Step("calls", "host time of a call, and the rate of calls", "speed:calls", 240),
    Step(
        "speed-2", "2 ranks: bandwidth, and beside a matmul", "speed:two", LONGEST, simulated=False
    ),
    Step(
        "speed-4", "4 ranks: bandwidth, and beside a matmul", "speed:four", LONGEST, simulated=False
    ),
    Step(
        "speed-hosts", "4 ranks as 2 hosts over loopback", "speed:hosts", LONGEST, simulated=False
    ),
    Step("ddp", "DDP's losses, and NCCL's", "training:ddp", 240),
    Step("fsdp2", "FSDP2's losses, and NCCL's", "training:fsdp2", 240),
    Step("zero3", "ZeRO-3's losses, and NCCL's", "training:zero3", LONGEST, simulated=False),
    Step("memcheck", "compute-sanitizer on the shortest program", "sanitizer:memcheck", LONGEST),
    Step("speed-node", "one rank per GPU: bandwidth", "speed:node", LONGEST, 2, False),
)


def by_name(name: str) -> Step:
    """The step of this name; ends the program with a sentence if there is none."""
    for step in STEPS:
        if step.name == name:
            return step
    known = ", ".join(step.name for step in STEPS)
    raise SystemExit(f"{name} is not a step of the check; known: {known}")
