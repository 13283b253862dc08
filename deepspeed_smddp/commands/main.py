"""The command ``smddp``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.text import Text

from deepspeed_smddp import __version__
from deepspeed_smddp.errors import SmddpConfigError

app = typer.Typer(
    name="smddp",
    help="Collective communication backend smddp for torch.distributed.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    # DeepSpeed's launcher puts it before the command's own words; the environment says the same.
    _local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = 0,
) -> None:
    """Collective communication backend smddp for torch.distributed."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def doctor(
    config: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads the annotation under Python 3.10 as well)
        typer.Option("--config", exists=True, dir_okay=False, help="A DeepSpeed config to check."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON in place of tables.")] = False,
    wait: Annotated[
        float, typer.Option("--wait", min=1, help="Seconds to wait for the other ranks.")
    ] = 60,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure links, cores and clocks of a job."),
    ] = True,
) -> None:
    """Show what works on this machine, and which settings apply and why; or compare all ranks.

    Started as the job is (torchrun --no-python, deepspeed --no_python, mpirun, srun), it compares
    the ranks. Exits with 1 if something fails, with 3 if ranks differ or something is limited.
    Of one process alone, only what fails counts.
    """
    from deepspeed_smddp.commands import doctor as doctor_command

    raise typer.Exit(doctor_command.run(config, as_json, wait, measure))


@app.command(
    name="exec",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def execute(
    context: typer.Context,
    program: Annotated[str, typer.Argument(help="What to run; its arguments follow.")],
) -> None:
    """Run a program as the rank that mpirun or srun started, with the variables of torchrun.

    mpirun -n 8 smddp exec python train.py --its-own options
    """
    from deepspeed_smddp.distributed import launchers

    try:
        launchers.apply()
        os.execvp(program, [program, *context.args])
    except launchers.LauncherError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{program} could not be started: {error.strerror}"
    raise _failed(f"smddp exec: {problem}", 1)


@app.command()
def tune(
    ds_config: Annotated[
        Path, typer.Option("--ds-config", exists=True, dir_okay=False, help="A ZeRO-3 config.")
    ],
    write: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option(
            "--write", dir_okay=False, help="File for the config with the sizes filled in."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Choose also the sizes that the config states.")
    ] = False,
    model: Annotated[
        str,
        typer.Option("--model", help="layers=,hidden=,heads=,vocabulary=,sequence= of a decoder."),
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Run steps of that decoder before and after, in turns.")
    ] = False,
    turns: Annotated[int, typer.Option("--turns", min=1, help="Of --check, each.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of a turn of --check.")] = 3,
    as_json: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option("--json", dir_okay=False, help="File for sizes, expectation and truth."),
    ] = None,
) -> None:
    """Measure the network of a job and choose the bucket sizes that a ZeRO-3 config leaves open.

    Start it in the same way as the job: torchrun --nproc-per-node 8 --no-python smddp tune ...
    """
    from deepspeed_smddp.commands import tune as command
    from deepspeed_smddp.tuning import decoder

    console = Console()
    try:
        asked = command.Asked(decoder.of_text(model), everything, turns if check else 0, steps)
        tuned = command.run(ds_config, asked)
    except (SmddpConfigError, ImportError) as error:
        console.print(Text(f"failed  {error}", "red"))
        raise typer.Exit(1) from None
    if tuned.rank != 0:
        return
    command.show(tuned, console)
    for path, data in ((write, tuned.config), (as_json, tuned.to_json())):
        if path is not None:
            command.write(data, path)
            console.print(Text(f"Written to {path}."))


@app.command()
def bench(
    ranks: Annotated[
        int, typer.Option("--ranks", help="Without a launcher: ranks to start on this host.")
    ] = 0,
    ops: Annotated[
        str,
        typer.Option(
            "--ops",
            help="all_gather, reduce_scatter, all_reduce, all_gather_coalesced, "
            "reduce_scatter_coalesced; with commas.",
        ),
    ] = "all",
    dtypes: Annotated[str, typer.Option("--dtypes", help="bf16, fp16, fp32.")] = "bf16",
    smallest: Annotated[str, typer.Option("--min", help="The smallest size.")] = "4K",
    largest: Annotated[str, typer.Option("--max", help="The largest size.")] = "16M",
    factor: Annotated[int, typer.Option("--factor", help="From a size to the next.")] = 4,
    turns: Annotated[int, typer.Option("--turns", min=1, help="Of each backend, A B A B.")] = 5,
    repeats: Annotated[
        int, typer.Option("--repeats", min=0, help="Calls of a turn; 0: as many as take 0.1 s.")
    ] = 0,
    warm_up: Annotated[int, typer.Option("--warm-up", min=1, help="Calls before.")] = 2,
    beside: Annotated[
        str, typer.Option("--beside", help="gloo, nccl, none; auto: by the device.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, auto.")] = "auto",
    network: Annotated[
        float, typer.Option("--network", min=0, help="Gbit/s of a host; 0: what its NICs state.")
    ] = 0,
    csv: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option("--csv", dir_okay=False, help="File for the figures, a row each."),
    ] = None,
    as_json: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option("--json", dir_okay=False, help="File for everything; plan reads it."),
    ] = None,
    figure: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option("--figure", dir_okay=False, help="File for a picture of the bandwidth."),
    ] = None,
) -> None:
    """Measure the collectives of these ranks beside Gloo or NCCL, and check every result.

    Started as the job is (torchrun --no-python, deepspeed --no_python, mpirun, srun), on its ranks;
    else on --ranks ranks of this host. Ctrl-C keeps what was measured. Exits with 1 if a result is
    wrong, with 2 if the question is, with 130 after Ctrl-C.
    """
    from deepspeed_smddp.bench import bench_case, bench_report, sweep
    from deepspeed_smddp.commands import bench as bench_command

    try:
        for name, option, known in (
            (beside, "--beside", bench_command.PEERS),
            (device, "--device", bench_command.DEVICES),
        ):
            bench_case.one_of(name, known, option)
        question = bench_command.Question(
            bench_case.chosen(ops, list(bench_case.TITLES), "--ops"),
            bench_case.chosen(dtypes, list(bench_case.DTYPES), "--dtypes"),
            bench_case.sizes(smallest, largest, factor),
            sweep.Rules(turns, repeats, warm_up),
            ranks=ranks,
            beside=beside,
            device=device,
            network=network,
            csv=csv,
            json=as_json,
            figure=figure,
        )
        status = bench_command.run(question)
    except (bench_case.BenchError, ImportError) as error:
        raise _failed(f"failed  {error}", bench_report.REFUSED) from None
    raise typer.Exit(status)


@app.command()
def report(
    target: Annotated[
        str,
        typer.Argument(
            help="A process, a job, or a folder with dumps; none: the job of this host."
        ),
    ] = "",
) -> None:
    """Say why a job hangs: which rank is where, who waits for whom, and what to do.

    Asks a running job (SIGUSR2 to one of its ranks does the same), or reads the dumps in a folder.
    """
    from deepspeed_smddp.commands import report as report_command

    try:
        if target and Path(target).is_dir():
            text = report_command.of_folder(Path(target))
        else:
            text = report_command.of_job(target)
    except report_command.ReportError as error:
        raise _failed(f"failed  {error}", 1) from None
    typer.echo(text, nl=False)


@app.command()
def trace(
    dumps: Annotated[
        Optional[list[str]],  # noqa: UP045 (as above)
        typer.Argument(
            help="Files or folders with the dumps of a report, or a running job or process of it; "
            "none: the job of this host."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", dir_okay=False, help="The trace; .gz: compressed.")
    ] = Path("trace.json"),
    step: Annotated[
        Optional[int],  # noqa: UP045 (as above)
        typer.Option("--step", help="This step of the training only."),
    ] = None,
    png: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option(
            "--png", dir_okay=False, help="A picture of the step, else of the last whole one."
        ),
    ] = None,
) -> None:
    """Write what all ranks did, on one clock, as a trace for Perfetto and chrome://tracing.

    It has compute, waits and every collective. Asks a running job, or reads the dumps of a report.
    """
    from deepspeed_smddp.commands import trace as trace_command

    try:
        found = trace_command.make(dumps or [])
        drawn = trace_command.choose(found, step)
        trace_command.write(found, drawn, output)
        said = trace_command.draw(found, drawn, png) if png is not None else ""
    except trace_command.TraceError as error:
        raise _failed(f"failed  {error}", 1) from None
    for line in trace_command.summary(found):
        typer.echo(line)
    if png is not None:
        typer.echo(f"{png}: {said}")
    typer.echo(f"{output}: open it at https://ui.perfetto.dev or chrome://tracing")


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the list (a wrong name prints it), a transformers config.json, or "
            "layers=,hidden=,heads=,kv_heads=,ffn=,vocabulary=,sequence= (and gated=0)."
        ),
    ],
    cluster: Annotated[
        str,
        typer.Argument(help="p4d, p4de, p5, p5en, p6-b200; or a GPU with --network, as h100."),
    ],
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the job.")] = 8,
    config: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option(
            "--config", exists=True, dir_okay=False, help="A DeepSpeed config to plan, not to find."
        ),
    ] = None,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens of a sequence.")] = 0,
    batch_tokens: Annotated[
        str, typer.Option("--batch-tokens", help="Tokens of a step, as 4M; else the config's.")
    ] = "",
    tokens: Annotated[str, typer.Option("--tokens", help="Of the whole training, as 2T.")] = "",
    network: Annotated[float, typer.Option("--network", help="Gbit/s of a host.")] = 0,
    network_from: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option(
            "--network-from", exists=True, dir_okay=False, help="What smddp bench --json wrote."
        ),
    ] = None,
    price: Annotated[float, typer.Option("--price", help="Of a host and hour.")] = 0,
    recomputation: Annotated[
        str, typer.Option("--recomputation", help="none, selective or full, with --config.")
    ] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[
        Optional[Path],  # noqa: UP045 (as above)
        typer.Option("--png", dir_okay=False, help="A picture of the curve to 4,096 GPUs."),
    ] = None,
) -> None:
    """Predict memory, step time and cost of a training before it starts, and what to change.

    Exits with 1 if it does not fit, with 2 if the question is wrong.
    """
    import json

    from deepspeed_smddp.commands import plan as plan_command
    from deepspeed_smddp.planning import PlanError, plan_page

    try:
        answer = plan_command.plan(
            model,
            cluster,
            gpus,
            config=config,
            sequence=sequence,
            batch_tokens=batch_tokens,
            tokens=tokens,
            network=network,
            network_from=network_from,
            price=price,
            recomputation=recomputation,
        )
        if png is not None and answer.shown is not None:
            plan_page.draw(answer, png)
    except PlanError as error:
        raise _failed(f"failed  {error}", 2) from None
    if as_json:
        typer.echo(json.dumps(answer.as_json(), indent=1))
    else:
        plan_page.show(Console(), answer)
    raise typer.Exit(0 if answer.fits else 1)


def _failed(problem: str, status: int) -> typer.Exit:
    """Prints why a command ends, unfolded: names of files stay whole. Returns what to raise."""
    Console(stderr=True, soft_wrap=True).print(Text(problem, "red"))
    return typer.Exit(status)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
