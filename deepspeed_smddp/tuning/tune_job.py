"""``smddp tune``: makes the same choice as the start of training, and writes it into a config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.distributed import coding_gain, launchers
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.tuning import auto_keys, decoder, measure
from deepspeed_smddp.tuning.choice import Choice, NetworkModel, choose
from deepspeed_smddp.tuning.decoder import DecoderSizes, StepTimes
from deepspeed_smddp.tuning.expected_step import StepKind, step_seconds

# The share of a step's time that other sizes have to save, so that they are taken.
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Asked:
    """What the command line asks for besides the config.

    ``everything``: choose also what the config states. ``turns``: of the real steps before and
    after, of ``steps`` steps each; 0: no real steps.
    """

    model: DecoderSizes = field(default_factory=DecoderSizes)
    everything: bool = False
    turns: int = 0
    steps: int = 3


@dataclass(frozen=True)
class Tuned:
    """The result on one rank.

    ``open_keys``: those with a chosen value; ``config``: the config with all of them. ``expected``:
    seconds of a step of ``asked.model`` before and after, None on GPUs; ``steps``: of real ones.
    ``coding``: how far coding between hosts is in the measured times.
    """

    asked: Asked
    open_keys: list[str]
    before: Choice
    choice: Choice
    config: Mapping[str, Any]
    rank: int
    expected: tuple[float, float] | None = None
    steps: StepTimes | None = None
    coding: str = ""

    def to_json(self) -> dict[str, Any]:
        """For ``--json``: sizes, seconds, and gains as shares of the time before."""
        found: dict[str, Any] = {
            "model": asdict(self.asked.model),
            "parameters": self.asked.model.parameters,
            "coding": self.coding,
            "keys": {
                key: {"before": getattr(self.before, key), "after": getattr(self.choice, key)}
                for key in self.open_keys
            },
        }
        if self.expected is not None:
            found["expected"] = _times(*self.expected)
        if self.steps is not None:
            found["measured"] = {
                **_times(*self.steps.medians),
                "turns_before": list(self.steps.before),
                "turns_after": list(self.steps.after),
            }
        return found


def gain(before: float, after: float) -> float:
    """The share of the time that is saved."""
    return 1 - after / before


def better(
    before: Choice, after: Choice, expected: tuple[float, float]
) -> tuple[Choice, tuple[float, float]]:
    """The sizes to take, and the seconds of a step before and with them.

    The choice looks at the network alone, the expected step also at what computing hides.
    """
    if gain(*expected) >= _LEAST_GAIN:
        return after, expected
    why = dict.fromkeys(after.why, f"kept: {gain(*expected):+.1%} is expected of another choice")
    return replace(before, why=why), (expected[0], expected[0])


def _times(before: float, after: float) -> dict[str, float]:
    return {"before": before, "after": after, "gain": gain(before, after)}


def run(path: Path, asked: Asked) -> Tuned:
    """Measures the job's network for the config at ``path``; every rank of the job calls it.

    Raises:
        SmddpConfigError: the config can't be read, is not of ZeRO-3, has a wrong "smddp" section,
            or the process is not one of several ranks.
        ImportError: the extension is missing or was built for another torch; or real steps are
            asked for, and there is no DeepSpeed.
    """
    given = _read(path)
    before = auto_keys.stated(given)
    config = auto_keys.without_sizes(given) if asked.everything else given
    decoder.apply(config)
    _check_ranks()
    if asked.turns and _on_gpu():
        raise SmddpConfigError("--check runs steps on CPUs: set DS_ACCELERATOR=cpu for it")
    dist.init_process_group("smddp")
    try:
        group = dist.group.WORLD
        assert group is not None
        network = measure.find(group)[0]
        chosen = choose(network, auto_keys.element_size(config))
        open_keys = auto_keys.open_keys(config)
        after = replace(before, why=chosen.why, **{k: getattr(chosen, k) for k in open_keys})
        expected = None
        if not _on_gpu():
            expected = _expected(config, asked.model, network, before, after)
            if asked.everything:
                after, expected = better(before, after, expected)
        filled = auto_keys.fill(config, after)
        found = Tuned(
            asked, open_keys, before, after, filled, group.rank(), expected, coding=_coding()
        )
        if asked.turns:
            ways = {"turns": asked.turns, "steps": asked.steps}
            steps = decoder.compare_steps(config, asked.model, before, after, **ways)
            found = replace(found, steps=steps)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


def _read(path: Path) -> Mapping[str, Any]:
    config = ds_config.read(str(path))
    if config is None:
        raise SmddpConfigError(f"{path} is neither JSON nor hjson with an object in it")
    if ds_config.at(config, "zero_optimization.stage") != 3:
        raise SmddpConfigError(
            f'{path} has no "zero_optimization": {{"stage": 3}}; only ZeRO-3 has sizes to choose'
        )
    return config


def _check_ranks() -> None:
    if not launchers.has_all_variables():
        raise SmddpConfigError(
            "smddp tune measures the network between a job's ranks: start it with the job's "
            "launcher, for instance torchrun --nproc-per-node 8 --no-python smddp tune ..."
        )
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise SmddpConfigError("a job of one rank has no network to measure")


def _on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") != "cpu"


def _coding() -> str:
    ratio, setting = coding_gain.RATIOS["bf16"], settings.current().section.coding
    if setting == "off":
        return '"off": the network is measured and counted without'
    return (
        f'"{setting}": measured with bf16 values like weights, which coding between hosts leaves '
        f"{ratio} of the bytes of where it is used"
    )


def _expected(
    config: Mapping[str, Any],
    model: DecoderSizes,
    network: NetworkModel,
    before: Choice,
    after: Choice,
) -> tuple[float, float]:
    """Seconds of a step with both sizes; collective, as the slowest rank's passes count."""
    bytes_of = auto_keys.element_size(config)
    dtype = torch.bfloat16 if bytes_of == 2 else torch.float32
    ranks = dist.get_world_size()
    own = decoder.compute_seconds(model, decoder.batch_of(config), dtype)
    optimizer = decoder.optimizer_seconds(-(-model.parameters // ranks))
    slowest = torch.tensor([*own, optimizer], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    forward, backward, optimizer = slowest.tolist()
    modules = decoder.module_costs(model, forward, backward)
    kind = StepKind(
        network,
        modules,
        ranks,
        bytes_of,
        optimizer,
        max_live=_elements(config, "max_live_parameters"),
        max_reuse=_elements(config, "max_reuse_distance"),
    )
    return step_seconds(kind, before), step_seconds(kind, after)


def _elements(config: Mapping[str, Any], key: str) -> float:
    zero = "zero_optimization."
    found = ds_config.number(config, zero + key, 1e9)  # DeepSpeed's default
    return ds_config.number(config, f"{zero}stage3_{key}", found)


def show(tuned: Tuned, console: Console) -> None:
    """Prints the page: the sizes and why, the expected gain, the measured one."""
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
    console.print(Text(f"coding {tuned.coding}"))
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
        console.print(Text(f"expected  {_change(*tuned.expected)}"))
    if tuned.steps is not None:
        pairs = list(zip(tuned.steps.before, tuned.steps.after, strict=True))
        faster = sum(after < before for before, after in pairs)
        text = f"{_change(*tuned.steps.medians)}, faster in {faster} of {len(pairs)} turns"
        console.print(Text(f"measured  {text}"))


def _change(before: float, after: float) -> str:
    return f"{before * 1e3:.4g} -> {after * 1e3:.4g} ms, {gain(before, after):+.1%} saved"


def _size(key: str, value: int) -> str:
    if key.startswith(("allgather", "reduce_scatter")) and not value:
        return "no bound"
    return f"{value:,}"
