"""``smddp plan``: memory, time and cost of a training, from the words of the command line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from typer import Argument, Exit, Option

from deepspeed_smddp.commands.json_option import JsonFile
from deepspeed_smddp.config import ds_json
from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.planning import (
    PlanError,
    config_keys,
    hardware,
    plan_page,
    real_activations,
    training_job,
)
from deepspeed_smddp.planning.answer import answer
from deepspeed_smddp.planning.model_shape import SIZES, ModelShape, of_text


def plan(
    model: Annotated[
        str,
        Argument(
            help="A model of the list (a wrong name prints it), a transformers config.json, a name "
            "of the Hugging Face Hub, or "
            "layers=,hidden=,heads=,kv_heads=,ffn=,vocabulary=,sequence= (and gated=0)."
        ),
    ],
    cluster: Annotated[
        str, Argument(help="p4d, p4de, p5, p5en, p6-b200; or a GPU, as h100 or rtx4090.")
    ],
    gpus: Annotated[int, Option(help="GPUs of the job.")] = 8,
    config: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="A DeepSpeed config to plan, not to find."),
    ] = None,
    sequence: Annotated[int, Option(help="Tokens of a sequence.")] = 0,
    batch_tokens: Annotated[str, Option(help="Tokens of a step, as 4M; else the config's.")] = "",
    tokens: Annotated[str, Option(help="Of the whole training, as 2T.")] = "",
    network: Annotated[float, Option(help="Gbit/s of a host.")] = 0,
    gpus_per_host: Annotated[int, Option(help="Else those of the cluster, or 8.")] = 0,
    hardware_file: Annotated[
        Path | None,
        Option("--hardware", exists=True, dir_okay=False, help="GPUs and clusters of your own."),
    ] = None,
    network_from: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="What smddp bench --json wrote.")
    ] = None,
    price: Annotated[float, Option(help="Of a host and hour.")] = 0,
    recomputation: Annotated[
        Literal["none", "selective", "full"], Option(help="With --config.")
    ] = "full",
    lora: Annotated[int, Option(help="Rank of LoRA's adapters; 0: all parameters train.")] = 0,
    base_bits: Annotated[int, Option(help="Of LoRA's frozen matrices: 16, 8 or 4.")] = 16,
    as_json: JsonFile = None,
    png: Annotated[
        Path | None, Option(dir_okay=False, help="A picture of the curve to 4,096 GPUs.")
    ] = None,
) -> None:
    """Predict memory, step time and cost of a training before it starts, and what to change.

    Exits with 1 if it does not fit, with 2 if the question is wrong.
    """
    output_files.check_writable([as_json])
    output_files.check_picture("the chart", png)
    shape = shape_of(model)
    if sequence:
        shape = replace(shape, sequence=sequence)
    if network and network_from:
        raise PlanError("--network and --network-from exclude each other")
    measured = training_job.measured_gbit(network_from) if network_from else {}
    network = network or max(measured.values(), default=0)
    zero3 = {"zero_optimization": {"stage": 3}}
    planned = ds_json.read(config or zero3)
    if planned is None:
        raise PlanError(f"{config} is neither JSON nor hjson with an object in it")
    job = training_job.of_config(
        shape,
        hardware.cluster(cluster, network, gpus_per_host, hardware_file).having(
            price=price, measured_gbit=measured
        ),
        gpus,
        planned,
        recomputation=recomputation,
        batch_tokens=int(number(batch_tokens, "--batch-tokens")) if batch_tokens else 0,
        lora_rank=lora,
        base_bits=base_bits,
        counted_layer=real_activations.of_text(model, shape.sequence),
    )
    length = number(tokens, "--tokens") if tokens else 0
    left_out = config_keys.not_considered(planned)
    found = answer(job, length, asked=config is not None, not_considered=left_out)
    if png is not None and found.shown is not None:
        plan_page.draw(found, png)
    output_files.write_json(as_json, found.as_json())
    if as_json != output_files.STANDARD_OUTPUT:
        plan_page.show(Console(), found)
    raise Exit(0 if found.fits else 1)


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
        raise PlanError(f"the model lacks {', '.join(missing)}: {text},{missing[0]}=...")
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
