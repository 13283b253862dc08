"""The first steps: the build, and a look at the machine.

The build runs where nothing but torch is installed: what needs more is imported by the functions
that use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_check import build as building
from gpu_check import machine
from gpu_check.step import Run

if TYPE_CHECKING:
    from harness.worker import Context


def build(run: Run) -> None:
    """Needs no GPU."""
    run.note("machine", machine.facts())
    building.main()
    run.note("extension", "built, and loads")


def look(run: Run) -> None:
    """What the other steps rest on: their results are read beside these."""
    from gpu_check.ranks import world

    run.note("machine", machine.facts())
    with world(run, "AA", SMDDP_FALLBACK="warn") as ranks:
        run.note("paths", ranks.run(first_calls))
        run.note("nccl", ranks.run(try_nccl)[0])


def first_calls(ctx: Context) -> dict[str, int]:
    """The path of each collective; a fallback shows with its name."""
    from gpu_check import place
    from harness import host_device

    here = place.here()
    part, whole = here.empty(1024), here.empty(1024 * ctx.size)
    part.fill_(ctx.rank + 1)
    place.gather(whole, part).wait()
    place.scatter(part, whole).wait()
    place.reduce(part).wait()
    here.synchronize()
    return host_device.calls(ctx, 3)


def try_nccl(ctx: Context) -> Any:
    """``works``, or why not: several steps compare with NCCL where it works."""
    from gpu_check.ranks import beside_nccl

    group, why = beside_nccl(ctx)
    return "works" if group is not None else why
