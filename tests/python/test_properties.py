"""Random collectives on random layouts: several at once, finished in any order.

``HYPOTHESIS_PROFILE=deep`` runs many more examples. A failure prints the example and the blob that
reproduces it; the message of the failing check has the seed of its data.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given, note
from hypothesis import strategies as st

from harness import cases, model
from harness.cases import ALIKE, HOST_FORMS, MANY, MOVES, Case
from harness.worker import Context
from harness.world import Pool

LAYOUTS = ("A", "AA", "AAAA", "AB", "AABB", "AAB", "ABBB", "ABAB", "ABC", "AAABBCC")

# Bytes of a shard: mostly small, sometimes on either side of a threshold between two paths.
_near = st.sampled_from([4096, 8192, 32 * 1024, 64 * 1024, 128 * 1024, 256 * 1024, 1024 * 1024])
_sizes = st.one_of(
    st.integers(0, 200),
    st.integers(0, 20_000),
    st.builds(lambda base, delta: max(0, base + delta), _near, st.integers(-70, 70)),
)


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """One collective in any valid combination of form, type, size and placement."""
    collective = draw(st.sampled_from(sorted(HOST_FORMS)))
    form = draw(st.sampled_from(HOST_FORMS[collective]))
    moved = collective in MOVES
    dtype = draw(st.sampled_from(model.MOVABLE if moved else model.REDUCIBLE))
    operations = [o for o in model.OPERATIONS if o != "AVG" or dtype in model.FLOATING]
    operation = "SUM" if moved else draw(st.sampled_from(operations))
    count = draw(st.integers(1, 6)) if form in MANY else 1
    numels = tuple(draw(_sizes) // dtype.itemsize for _ in range(count))
    places = ["apart"]
    apart = collective in ("all_gather", "reduce_scatter")
    if form in ("base", "list", "manager", "single") and apart:
        places.append("in_place")
        if collective == "reduce_scatter":
            places.append("other_slot")
    return Case(
        collective,
        form,
        dtype,
        numels,
        operation,
        draw(st.sampled_from(places)),
        draw(st.sampled_from([0, 0, dtype.itemsize, 3 * dtype.itemsize, 1])),
        draw(st.booleans()),
        draw(st.integers(0, 2**20)),
    )


@given(layout=st.sampled_from(LAYOUTS), case=calls())
def test_any_collective(worlds: Pool, layout: str, case: Case) -> None:
    note(f"{layout}: {case}, seed {case.seed}")
    digests = worlds(layout).run(cases.check, case, timeout=30)
    if case.collective in ALIKE:
        assert len(set(digests)) == 1, "ranks hold different results"


def on_overlapping_groups(
    ctx: Context, groups: list[list[int]], plan: list[tuple[int, Case]], order: list[int]
) -> None:
    """The members of each group start its case; all cases are in flight together."""
    handles = []
    for ranks in groups:
        key = tuple(ranks)
        if key not in ctx.groups:
            ctx.groups[key] = dist.new_group(ranks)
        handles.append(ctx.groups[key])
    running = {
        i: cases.begin(ctx, case, handles[g], groups[g])
        for i, (g, case) in enumerate(plan)
        if ctx.rank in groups[g]
    }
    for i in order:
        if i in running:
            running[i].finish()


@pytest.mark.parametrize("grouped", ["AAAA", "AABB", "ABAB", ""])
@given(
    data=st.data(),
    plan=st.lists(st.tuples(st.integers(0, 4), calls()), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_several_in_flight_in_overlapping_groups_finished_in_any_order(
    worlds: Pool, grouped: str, data: st.DataObject, plan: list[tuple[int, Case]], order: object
) -> None:
    layout = grouped or data.draw(st.sampled_from(LAYOUTS))
    groups = [[0, 1, 2, 3], [0, 1], [1, 2, 3], [0, 2], [3]]
    if not grouped:
        groups = [list(range(len(layout)))] * len(groups)
    sequence = list(range(len(plan)))
    order.shuffle(sequence)  # type: ignore[attr-defined]
    note(f"{layout}: {[(groups[g], str(case)) for g, case in plan]}, finished as {sequence}")
    worlds(layout).run(on_overlapping_groups, groups, plan, sequence, timeout=30)
