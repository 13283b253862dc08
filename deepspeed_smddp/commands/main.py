"""The command ``smddp``: its commands put together."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deepspeed_smddp import __version__
from deepspeed_smddp.commands import bench, doctor, plan, report, trace, tune
from deepspeed_smddp.errors import CommandError, SmddpConfigError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Runs a command; an error that users can mend ends it with its sentence."""
        try:
            return super().invoke(ctx)
        except (CommandError, SmddpConfigError, ImportError) as error:
            from rich.console import Console
            from rich.text import Text

            # Unfolded: names of files stay whole.
            Console(stderr=True, soft_wrap=True).print(Text(f"failed  {error}", "red"))
            raise typer.Exit(getattr(error, "status", 1)) from None


app = typer.Typer(
    cls=_Commands,
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


app.command()(doctor.doctor)


@app.command(
    name="exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def execute(
    context: typer.Context,
    program: Annotated[str, typer.Argument(help="What to run; its arguments follow.")],
) -> None:
    """Run a program as the rank that mpirun or srun started, with the variables of torchrun.

    mpirun -n 8 smddp exec python train.py --its-own options
    """
    from deepspeed_smddp.distributed import launchers

    launchers.apply()
    try:
        os.execvp(program, [program, *context.args])
    except OSError as error:
        raise CommandError(f"{program} could not be started: {error.strerror}") from None


for command in (tune.tune, bench.bench, report.report, trace.trace, plan.plan):
    app.command()(command)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
