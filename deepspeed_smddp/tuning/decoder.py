"""The decoder for which ``smddp tune`` states a step time, and whose steps ``--check`` runs.

How long its passes take on one rank without communication; and real ZeRO-3 steps with the sizes
before and after, in turns: A B A B. Two engines of one process, each with a model of its own, take
turns; the settings of smddp, which belong to the process, change with the turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.config.parsing import SECTION, parse_section
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.tuning import auto_keys
from deepspeed_smddp.tuning.choice import Choice
from deepspeed_smddp.tuning.expected_step import ModuleCost

_PASSES = 3
# The first step records the order of modules, the second one is the first that prefetches.
_WARM_UP = 3


@dataclass(frozen=True)
class DecoderSizes:
    """A decoder whose feed-forward network is four times as wide, without tied weights."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 256
    sequence: int = 64

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(sum(module) for module in self.modules())

    def modules(self) -> list[list[int]]:
        """Elements of the parameters of each module, in the order of the forward pass."""
        h, norm = self.hidden, [self.hidden, self.hidden]
        block = [norm, [3 * h * h, 3 * h], [h * h, h], norm, [4 * h * h, 4 * h], [4 * h * h, h]]
        ends = [self.vocabulary * h]
        return [ends, *(block * self.layers), norm, ends]


def of_text(text: str) -> DecoderSizes:
    """``layers=8,hidden=1024``; sizes that are not named have their defaults.

    Raises:
        SmddpConfigError: a name is not known, or a value is no number that it may hold.
    """
    names = [field.name for field in fields(DecoderSizes)]
    given: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in names or not value.isdecimal() or not 0 < int(value) < 1 << 31:
            raise SmddpConfigError(
                f"--model has {part!r}; it may have {', '.join(f'{n}=NUMBER' for n in names)}"
            )
        given[name] = int(value)
    sizes = DecoderSizes(**given)
    if sizes.hidden % sizes.heads:
        raise SmddpConfigError(
            f"--model: {sizes.heads} heads do not divide a hidden size of {sizes.hidden}"
        )
    return sizes


class _Block(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        h = sizes.hidden
        self.heads = sizes.heads
        self.norm_1, self.qkv, self.out = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.norm_2, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, sequence, hidden], the same."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return hidden


class Decoder(nn.Module):
    """A decoder of these sizes, the same on every rank."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next tokens, of [batch, sequence] whole numbers."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def tokens(sizes: DecoderSizes, batch: int, seed: int) -> torch.Tensor:
    """[batch, sequence] random tokens."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, sizes.vocabulary, (batch, sizes.sequence), generator=random)


def compute_seconds(sizes: DecoderSizes, batch: int, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass of one rank: the fastest of a few."""
    model = Decoder(sizes).to(dtype)
    given = tokens(sizes, batch, 0)
    times = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        loss = model(given)
        between = time.perf_counter()
        loss.backward()
        times.append((between - began, time.perf_counter() - between))
        model.zero_grad()
    return min(t for t, _ in times), min(t for _, t in times)


def optimizer_seconds(elements: int) -> float:
    """Seconds of AdamW on this rank's fp32 shard."""
    shard = nn.Parameter(torch.zeros(elements))
    shard.grad = torch.ones(elements)
    optimizer = torch.optim.AdamW([shard], fused=True)
    times = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return min(times)


def module_costs(sizes: DecoderSizes, forward: float, backward: float) -> list[ModuleCost]:
    """The passes divided over the modules, by the elements of their matrices.

    The embedding looks rows up: it takes no part.
    """
    modules = sizes.modules()
    work = [0, *(m[0] if m[0] > sizes.hidden else 0 for m in modules[1:])]
    total = sum(work)
    return [
        ModuleCost(module, forward * part / total, backward * part / total)
        for module, part in zip(modules, work, strict=True)
    ]


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
    return int(ds_config.number(config, "train_micro_batch_size_per_gpu", 1))


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


def compare_steps(
    config: Mapping[str, Any],
    sizes: DecoderSizes,
    before: Choice,
    after: Choice,
    *,
    turns: int,
    steps: int,
) -> StepTimes:
    """Trains a decoder with both sizes, in ``turns`` turns each; collective, with equal results.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    engines = []
    base = runnable(config)
    for choice in (before, after):
        full = auto_keys.set_all(base, choice)
        apply(full)  # engines of a job otherwise share their settings
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
    model = Decoder(sizes)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=dict(config)
    )
    return engine


def apply(config: Mapping[str, Any]) -> None:
    """Makes the "smddp" section of a config and its bound on AllGather those of this process."""
    bound = int(ds_config.number(config, settings.ZERO_BUCKET))
    settings.set_file(parse_section(config.get(SECTION, {})), zero_allgather_elements=bound)


def _turn(
    engine: Any, config: Mapping[str, Any], sizes: DecoderSizes, batch: int, steps: int
) -> float:
    """Seconds of a step on the slowest rank."""
    apply(config)
    given = [tokens(sizes, batch, dist.get_rank() + 1000 * n) for n in range(steps)]
    dist.barrier()
    began = time.perf_counter()
    for sequence in given:
        engine.backward(engine(sequence))
        engine.step()
    took = torch.tensor([(time.perf_counter() - began) / steps], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)
