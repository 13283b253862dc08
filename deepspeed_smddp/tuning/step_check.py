"""Real ZeRO-3 steps with the sizes before and after, in turns: A B A B.

Two engines of one process, each with a model of its own, take turns; the settings of smddp, which
belong to the process, change with the turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.config.parsing import SECTION, parse_section
from deepspeed_smddp.tuning import auto_keys, decoder
from deepspeed_smddp.tuning.choice import Choice
from deepspeed_smddp.tuning.decoder import DecoderSizes

# The first step records the order of modules, the second one is the first that prefetches.
_WARM_UP = 3


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step on the slowest rank, of each turn."""

    before: Sequence[float]
    after: Sequence[float]

    @property
    def medians(self) -> tuple[float, float]:
        """Before and after."""
        return statistics.median(self.before), statistics.median(self.after)


def batch_of(config: Mapping[str, Any]) -> int:
    """Sequences of a rank and step; 1 if the config does not say."""
    found = config.get("train_micro_batch_size_per_gpu")
    return int(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else 1


def runnable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config for one micro-batch per step on the CPU, without what a script would fill in."""
    dropped = ("train_batch_size", "scheduler", "gradient_accumulation_steps")
    found = {k: v for k, v in config.items() if k not in dropped and v != "auto"}
    found["train_micro_batch_size_per_gpu"] = batch_of(config)
    found["gradient_accumulation_steps"] = 1
    found["comm_backend"] = "smddp"
    found["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}
    found.setdefault("steps_per_print", 1 << 40)
    return {
        key: {k: v for k, v in value.items() if v != "auto"}
        if isinstance(value, Mapping)
        else value
        for key, value in found.items()
    }


def run(
    config: Mapping[str, Any],
    sizes: DecoderSizes,
    before: Choice,
    after: Choice,
    *,
    turns: int,
    steps: int,
) -> StepTimes:
    """Trains a decoder with both sizes; collective, with the same result on all ranks.

    Args:
        turns: of each; a turn has ``steps`` steps.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    engines = []
    base = runnable(config)
    for choice in (before, after):
        full = auto_keys.set_all(base, choice)
        _apply(full)  # engines of a job otherwise share their settings
        engines.append((_engine(full, sizes), full))
    batch = batch_of(config)
    for engine, full in engines:
        _turn(engine, full, sizes, batch, _WARM_UP)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for (engine, full), found in zip(engines, times, strict=True):
            found.append(_turn(engine, full, sizes, batch, steps))
    return StepTimes(*times)


def _engine(config: Mapping[str, Any], sizes: DecoderSizes) -> Any:
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    model = decoder.Decoder(sizes)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=dict(config)
    )
    return engine


def _apply(config: Mapping[str, Any]) -> None:
    settings.set_file(
        parse_section(config[SECTION]),
        zero_allgather_elements=ds_config.allgather_elements(config),
    )


def _turn(
    engine: Any, config: Mapping[str, Any], sizes: DecoderSizes, batch: int, steps: int
) -> float:
    """Seconds of a step on the slowest rank."""
    _apply(config)
    given = [decoder.tokens(sizes, batch, dist.get_rank() + 1000 * n) for n in range(steps)]
    dist.barrier()
    began = time.perf_counter()
    for sequence in given:
        engine.backward(engine(sequence))
        engine.step()
    took = torch.tensor([(time.perf_counter() - began) / steps], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)
