"""From the words of the command line to the question of ``smddp plan``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hjson

from deepspeed_smddp.planning import PlanError, asked_job
from deepspeed_smddp.planning.answer import Answer, answer
from deepspeed_smddp.planning.hardware import cluster
from deepspeed_smddp.planning.model_shape import SIZES, ModelShape, of_text
from deepspeed_smddp.planning.training_job import RECOMPUTATIONS


def plan(
    model: str,
    where: str,
    gpus: int,
    *,
    config: Path | None = None,
    sequence: int = 0,
    batch_tokens: str = "",
    tokens: str = "",
    network: float = 0,
    network_from: Path | None = None,
    price: float = 0,
    recomputation: str = "full",
) -> Answer:
    """Plans what the command line asks for.

    Args:
        model: a name of the list, a transformers config, or ``layers=40,hidden=5120,...``.
        tokens, batch_tokens: numbers such as ``2T`` or ``4M``; empty: none.
        network: Gbit/s of a host; 0: the cluster's.
        network_from: the JSON of ``smddp bench`` on hosts of this network.
        price: of a host and hour, in any currency; 0: not known.

    Raises:
        PlanError: what is wrong, in one sentence.
    """
    if recomputation not in RECOMPUTATIONS:
        raise PlanError(
            f"--recomputation is {recomputation!r}; it may be {', '.join(RECOMPUTATIONS)}"
        )
    shape = shape_of(model)
    if sequence:
        shape = shape.with_sequence(sequence)
    if network and network_from:
        raise PlanError("--network and --network-from exclude each other")
    if network_from:
        network = asked_job.gbit_of_host(network_from)
    there = replace(cluster(where, network), price=price)
    job = asked_job.of_config(
        shape,
        there,
        gpus,
        _read(config) if config else {"zero_optimization": {"stage": 3}, "comm_backend": "smddp"},
        recomputation=recomputation,
        batch_tokens=int(number(batch_tokens, "--batch-tokens")) if batch_tokens else 0,
    )
    return answer(job, number(tokens, "--tokens") if tokens else 0, asked=config is not None)


def shape_of(text: str) -> ModelShape:
    """A model by name, by config, or by its sizes; ``gated=0``: a feed-forward of two matrices.

    Raises:
        PlanError: none of these.
    """
    if "=" not in text:
        return of_text(text)
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in (*SIZES, "gated"):
            raise PlanError(f"a model has no {key!r}; its sizes are {', '.join(SIZES)}, and gated")
        try:
            sizes[key] = int(value)
        except ValueError:
            raise PlanError(f"{key} is {value!r}; it is a whole number") from None
    sizes.setdefault("kv_heads", sizes.get("heads", 0))
    missing = [key for key in SIZES if key not in sizes]
    if missing:
        raise PlanError(f"the model lacks {', '.join(missing)}: --model {text},{missing[0]}=...")
    return ModelShape("the model", **{**sizes, "gated": bool(sizes.get("gated", 1))})


def number(text: str, option: str) -> float:
    """``4M``, ``2T``, ``1e12`` or ``4_194_304``.

    Raises:
        PlanError: it is none of these, or not above 0.
    """
    match = re.fullmatch(r"([0-9_.]+(?:e[0-9]+)?)\s*([kKMBGT]?)", text.strip())
    units = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    try:
        found = float(match[1].replace("_", "")) * units[match[2]] if match else 0.0
    except ValueError:
        found = 0.0
    if not 1 <= found < 1e18:
        raise PlanError(f"{option} is {text!r}; it is a number such as 2T, 300B or 4M")
    return found


def _read(path: Path) -> Mapping[str, object]:
    try:
        config = hjson.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, hjson.HjsonDecodeError) as error:
        raise PlanError(f"{path} can't be read: {error}") from None
    if not isinstance(config, Mapping):
        raise PlanError(f"{path} is no DeepSpeed config: it holds no object")
    return config
