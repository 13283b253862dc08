"""Which reductions of a program give another result over smddp than over Gloo.

The ranks of a run with ``--digests`` write one line for each AllReduce and ReduceScatter that they
call through torch: the operation, its group, and digests of what goes in and what comes out. A
reduction over smddp is an origin of a difference if each of its ranks puts in what it puts in over
Gloo, and gets something else.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VARIABLE = "REAL_DIGESTS"  # a path with "{rank}" in it; unset: nothing is recorded
# The argument that goes in, by name and place, and the one that comes out.
_CALLS = {
    "all_reduce": (("tensor", 0), ("tensor", 0)),
    "reduce_scatter_tensor": (("input", 1), ("output", 0)),
    "_reduce_scatter_base": (("input", 1), ("output", 0)),
}


@dataclass(frozen=True)
class Reduction:
    """One call of one rank."""

    operation: str
    reduce_op: str
    dtype: str
    elements: int
    ranks: tuple[int, ...]
    given: str  # digest of the input
    found: str  # digest of the output

    def __str__(self) -> str:
        return (
            f"{self.operation} ({self.reduce_op}) of {self.elements} elements, {self.dtype}, "
            f"over ranks {', '.join(map(str, self.ranks))}"
        )


def install(template: str, rank: int) -> None:
    """Records each reduction of this process; an asynchronous one is waited for at once."""
    path = Path(template.format(rank=rank))
    path.unlink(missing_ok=True)
    for name in _CALLS:
        setattr(dist, name, _recorded(name, getattr(dist, name), path))


def _recorded(name: str, original: Any, path: Path) -> Any:
    (given, given_at), (found, found_at) = _CALLS[name]

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        source = named[given] if given in named else args[given_at]
        target = named[found] if found in named else args[found_at]
        before = digest(source)
        work = original(*args, **named)
        if work is not None:
            work.wait()
        made = Reduction(
            name,
            str(named.get("op", dist.ReduceOp.SUM)).rpartition(".")[2],
            str(source.dtype).removeprefix("torch."),
            source.numel(),
            tuple(dist.get_process_group_ranks(named.get("group") or dist.group.WORLD)),
            before,
            digest(target),
        )
        with path.open("a") as file:
            file.write(json.dumps(asdict(made)) + "\n")
        return work

    return call


def digest(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def read(path: Path) -> list[Reduction]:
    """What one rank recorded."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [Reduction(**line | {"ranks": tuple(line["ranks"])}) for line in lines]


def other_sums(
    ones: Sequence[Sequence[Reduction]], others: Sequence[Sequence[Reduction]]
) -> Counter[str]:
    """The reductions that make another result of the same values, and how often each does.

    Args:
        ones: what each rank of the first run recorded, by rank.
        others: of the second run.
    """
    found: Counter[str] = Counter()
    first, second = _by_call(ones), _by_call(others)
    for call in first.keys() & second.keys():
        one, other = first[call], second[call]
        if [r.given for r in one] != [r.given for r in other]:
            continue  # a consequence of an earlier one
        if one != other:
            found[str(one[0])] += 1
    return found


def _by_call(runs: Sequence[Sequence[Reduction]]) -> dict[Any, list[Reduction]]:
    """Each call with the records of its ranks: the n-th call on a group is the same on each."""
    calls: dict[Any, list[Reduction]] = {}
    for recorded in runs:
        counts: Counter[tuple[int, ...]] = Counter()
        for entry in recorded:
            calls.setdefault((entry.ranks, counts[entry.ranks]), []).append(entry)
            counts[entry.ranks] += 1
    return calls
