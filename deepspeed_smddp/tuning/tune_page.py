"""The page of ``smddp tune``: the sizes and why, the expected gain, the measured one."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_smddp.commands.tune import Tuned, gain


def show(tuned: Tuned, console: Console) -> None:
    """Prints it."""
    if not tuned.open_keys:
        console.print(Text("The config leaves no size open; --all chooses them anew."))
        return
    table = Table("key", "before", "after", box=None, padding=(0, 2, 0, 0))
    for key in tuned.open_keys:
        before, after = (_size(key, getattr(of, key)) for of in (tuned.before, tuned.choice))
        table.add_row(key, before, after)
    console.print(table)
    console.print()
    for key in tuned.open_keys:
        console.print(Text(f"{key}: {tuned.choice.why[key]}"))
    sizes = tuned.asked.model
    console.print()
    console.print(
        Text(
            f"A step of a decoder of {sizes.parameters / 1e6:.3g} million parameters "
            f"({sizes.layers} layers, hidden size {sizes.hidden}):"
        )
    )
    if tuned.expected is None:
        console.print(Text("expected  not known: the passes of a GPU are not timed"))
    else:
        console.print(Text(f"expected  {_times(*tuned.expected)}"))
    if tuned.steps is not None:
        console.print(Text(f"measured  {_times(*tuned.steps.medians)}, {_turns(tuned)}"))


def _times(before: float, after: float) -> str:
    return f"{before * 1e3:.4g} -> {after * 1e3:.4g} ms, {gain(before, after):+.1%} saved"


def _turns(tuned: Tuned) -> str:
    assert tuned.steps is not None
    pairs = list(zip(tuned.steps.before, tuned.steps.after, strict=True))
    faster = sum(after < before for before, after in pairs)
    return f"faster in {faster} of {len(pairs)} turns"


def _size(key: str, value: int) -> str:
    if key.startswith(("allgather", "reduce_scatter")) and not value:
        return "no bound"
    return f"{value:,}"
