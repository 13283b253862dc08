"""The command ``smddp``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_smddp import __version__
from deepspeed_smddp.errors import SmddpConfigError

_STYLES = {"ok": "green", "limited": "yellow", "failed": "red"}

app = typer.Typer(
    name="smddp",
    help="Collective communication backend smddp for torch.distributed.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
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
) -> None:
    """Show what works on this machine, and which settings apply and why.

    Exits with 1 if the extension does not load or a setting is wrong.
    """
    from deepspeed_smddp.diagnose import doctor as checks

    console = Console()
    failed = False
    report = Table.grid(padding=(0, 2))
    for _ in range(3):
        report.add_column(overflow="fold")
    for finding in checks.findings():
        verdict = finding.verdict.value
        failed |= finding.verdict is checks.Verdict.FAILED
        report.add_row(Text(verdict, _STYLES[verdict]), finding.name, Text(finding.text))
    console.print(report)
    try:
        rows = checks.setting_rows(config)
    except SmddpConfigError as error:
        console.print(Text(f"failed  settings  {error}", _STYLES["failed"]))
        raise typer.Exit(1) from None
    settings = Table("setting", "value", "source", "meaning", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        settings.add_row(row.name, Text(row.value), row.source, row.meaning)
    console.print()
    console.print(settings)
    raise typer.Exit(int(failed))


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
    from deepspeed_smddp import launchers

    try:
        launchers.apply()
        os.execvp(program, [program, *context.args])
    except launchers.LauncherError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{program} could not be started: {error.strerror}"
    Console(stderr=True).print(Text(f"smddp exec: {problem}", _STYLES["failed"]))
    raise typer.Exit(1)


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
) -> None:
    """Measure the network of a job and choose the bucket sizes that a ZeRO-3 config leaves open.

    Start it in the same way as the job: torchrun --nproc-per-node 8 --no-python smddp tune ...
    """
    from deepspeed_smddp.tune import command

    console = Console()
    try:
        tuned = command.run(ds_config)
    except (SmddpConfigError, ImportError) as error:
        console.print(Text(f"failed  {error}", _STYLES["failed"]))
        raise typer.Exit(1) from None
    if tuned.rank != 0:
        return
    table = Table("key", "value", "why", box=None, padding=(0, 2, 0, 0))
    for key in tuned.open_keys:
        table.add_row(key, str(getattr(tuned.choice, key) or "auto"), tuned.choice.why[key])
    console.print(table if tuned.open_keys else Text("The config leaves no size open."))
    if write is not None:
        command.write(tuned, write)
        console.print(Text(f"Written to {write}."))


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
    from deepspeed_smddp.diagnose import report_command

    try:
        if target and Path(target).is_dir():
            text = report_command.of_folder(Path(target))
        else:
            text = report_command.of_job(target)
    except report_command.ReportError as error:
        Console(stderr=True).print(Text(f"failed  {error}", _STYLES["failed"]))
        raise typer.Exit(1) from None
    typer.echo(text, nl=False)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
