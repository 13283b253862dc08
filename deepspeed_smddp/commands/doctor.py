"""``smddp doctor``: of one process, or of all ranks if a launcher started it as one of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from deepspeed_smddp.commands.json_option import JsonFile


def doctor(
    config: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="A DeepSpeed config to check.")
    ] = None,
    as_json: JsonFile = None,
    wait: Annotated[float, Option(min=1, help="Seconds to wait for the other ranks.")] = 60,
    measure: Annotated[
        bool, Option("--measure/--no-measure", help="Measure links, cores and clocks of a job.")
    ] = True,
) -> None:
    """Show what works on this machine, and which settings apply and why; or compare all ranks.

    Started as the job is (torchrun --no-python, deepspeed --no_python, mpirun, srun), it compares
    the ranks. Exits with 1 if something fails, with 3 if ranks differ or something is limited.
    Of one process alone, only what fails counts.
    """
    from deepspeed_smddp.diagnostics.doctor import job_doctor

    raise Exit(job_doctor.run(config, as_json, wait, measure))
