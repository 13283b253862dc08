"""The steps, in the order in which they run: cheap proofs first, measurements last."""

from __future__ import annotations

from functools import partial

from gpu_check.step import LONGEST, Step

OnGpu = partial(Step, simulated=False)
STEPS = (
    OnGpu("build", "an environment from the bundle, and the extension", "build:main", 470, 0),
    Step("machine", "GPUs, driver, limits; which ways lead from GPU to GPU", "ranks:look", 90),
    Step("forms", "every form of call, in several layouts", "correctness:forms", 300),
    Step("types", "types, operations, sizes and places", "correctness:types", 300),
    Step("misaligned", "sums from and to addresses off alignment", "correctness:misaligned", 180),
    Step("large", "more than 4 GiB in one call", "correctness:large", 300),
    Step("queue", "a thousand operations in flight, and long ones", "order:queue", 300),
    Step("groups", "two groups, with memory freed in between", "order:groups", 240),
    OnGpu("graphs", "CUDA graphs, recorded and replayed", "order:graphs", 180),
    Step(
        "connections", "8 and 32 hardware queues; with one NCCL carries", "order:connections", 240
    ),
    OnGpu("expandable", "expandable segments, few descriptors", "memory:expandable", 300),
    OnGpu("memory", "freed memory returns; peak beside NCCL", "memory:returns", 300),
    Step("death", "a killed rank is named, and streams are released", "failure:death", 240),
    OnGpu("save", "after a failure nothing that counted on it is saved", "failure:save", 240),
    OnGpu("zero_sm", "AllGather while kernels hold all SMs", "held:zero_sm", 120),
    OnGpu("coding", "the coder's kernels", "speed:kernels", 120, arguments=("coding",)),
    OnGpu("sums", "the reduction's kernels", "speed:kernels", 120, arguments=("reduce",)),
    OnGpu("routes", "what is routed by default, measured beside NCCL", "speed:routes", 240),
    Step("calls", "host time of a call, and the rate of calls", "speed:calls", 240),
    *(
        OnGpu(f"speed-{name}", title, "speed:bandwidth", LONGEST, arguments=arguments)
        for name, title, *arguments in (
            ("2", "2 ranks: bandwidth, and beside a matmul", 2),
            ("4", "4 ranks: bandwidth, and beside a matmul", 4),
            ("hosts", "4 ranks as 2 hosts over loopback", 4, "--hosts", "2"),
        )
    ),
    Step("ddp", "DDP's losses, and NCCL's", "training:compare", 240, arguments=("ddp",)),
    Step("fsdp2", "FSDP2's losses, and NCCL's", "training:compare", 240, arguments=("fsdp2",)),
    OnGpu("zero3", "ZeRO-3's losses, and NCCL's", "training:zero3", LONGEST),
    Step("memcheck", "compute-sanitizer on the shortest program", "sanitizer:memcheck", LONGEST),
    OnGpu("speed-node", "one rank per GPU: bandwidth", "speed:bandwidth", LONGEST, 2),
)


def by_name(name: str) -> Step:
    """The step of this name; ends the program with a sentence if there is none."""
    for step in STEPS:
        if step.name == name:
            return step
    known = ", ".join(step.name for step in STEPS)
    raise SystemExit(f"{name} is not a step of the check; known: {known}")
