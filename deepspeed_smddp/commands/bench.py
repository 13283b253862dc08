"""``smddp bench``: the collectives of a job's ranks, measured and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Exit, Option

from deepspeed_smddp.bench import bench_case
from deepspeed_smddp.commands.json_option import JsonFile


def bench(
    ranks: Annotated[
        int, Option("--ranks", help="Without a launcher: ranks to start on this host.")
    ] = 0,
    ops: Annotated[str, Option(help=f"{', '.join(bench_case.TITLES)}; with commas.")] = "all",
    dtypes: Annotated[str, Option(help="bf16, fp16, fp32.")] = "bf16",
    smallest: Annotated[str, Option("--min", help="The smallest size.")] = "4K",
    largest: Annotated[str, Option("--max", help="The largest size.")] = "16M",
    factor: Annotated[int, Option(min=2, help="From a size to the next.")] = 4,
    turns: Annotated[int, Option(min=1, help="Of each backend, A B A B.")] = 5,
    repeats: Annotated[int, Option(min=0, help="Calls of a turn; 0: as many as take 0.1 s.")] = 0,
    warm_up: Annotated[int, Option(min=1, help="Calls before.")] = 2,
    beside: Annotated[
        Literal["auto", "gloo", "nccl", "none"], Option(help="auto: by the device.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], Option()] = "auto",
    network: Annotated[float, Option(min=0, help="Gbit/s of a host; 0: what its NICs state.")] = 0,
    data: Annotated[
        str,
        Option(
            help="What the timed calls move, as it decides what coding saves between hosts: "
            "weights or gradients as of a model, random bits (never coded), zeros (shrink as no "
            "model's data does), or a file: .npy, .pt, .safetensors, else its bytes.",
        ),
    ] = "weights",
    csv: Annotated[
        Path | None, Option(dir_okay=False, help="File for the figures, a row each.")
    ] = None,
    as_json: JsonFile = None,
    figure: Annotated[
        Path | None, Option(dir_okay=False, help="File for a picture of the bandwidth.")
    ] = None,
) -> None:
    """Measure the collectives of these ranks beside Gloo or NCCL, and check every result.

    Started as the job is (torchrun --no-python, deepspeed --no_python, mpirun, srun), on its ranks;
    else on --ranks ranks of this host. Ctrl-C keeps what was measured. `smddp plan` reads what
    --json writes. Exits with 1 if a result is wrong, with 2 if the question is, with 130 after
    Ctrl-C.
    """
    from deepspeed_smddp.bench import bench_job, sweep, timed_values

    question = bench_job.Question(
        bench_case.chosen(ops, list(bench_case.TITLES), "--ops"),
        bench_case.chosen(dtypes, list(bench_case.DTYPES), "--dtypes"),
        bench_case.sizes(smallest, largest, factor),
        sweep.Rules(turns, repeats, warm_up),
        ranks=ranks,
        beside=beside,
        device=device,
        network=network,
        values=timed_values.TimedValues.of(data),
        csv=csv,
        json=as_json,
        figure=figure,
    )
    raise Exit(bench_job.run(question))
