"""``smddp tune``: the sizes that a job's network suggests, written into a config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from deepspeed_smddp.commands.json_option import JsonFile


def tune(
    ds_config: Annotated[Path, Option(exists=True, dir_okay=False, help="A ZeRO-3 config.")],
    write: Annotated[
        Path | None, Option(dir_okay=False, help="File for the config with the sizes filled in.")
    ] = None,
    everything: Annotated[
        bool, Option("--all", help="Choose also the sizes that the config states.")
    ] = False,
    model: Annotated[
        str, Option(help="layers=,hidden=,heads=,vocabulary=,sequence= of a decoder.")
    ] = "",
    check: Annotated[
        bool, Option("--check", help="Run steps of that decoder before and after, in turns.")
    ] = False,
    turns: Annotated[int, Option(min=1, help="Of --check, each.")] = 5,
    steps: Annotated[int, Option(min=1, help="Of a turn of --check.")] = 3,
    as_json: JsonFile = None,
) -> None:
    """Measure the network of a job and choose the bucket sizes that a ZeRO-3 config leaves open.

    Start it in the same way as the job: torchrun --nproc-per-node 8 --no-python smddp tune ...
    """
    from rich.console import Console
    from rich.text import Text

    from deepspeed_smddp.diagnostics import output_files
    from deepspeed_smddp.distributed import launchers
    from deepspeed_smddp.tuning import decoder, tune_job

    launchers.apply()
    if os.environ.get("RANK", "0") == "0":
        output_files.check_writable([write, as_json])
    asked = tune_job.Asked(decoder.of_text(model), everything, turns if check else 0, steps)
    tuned = tune_job.run(ds_config, asked)
    if tuned.rank != 0:
        raise Exit
    page = as_json != output_files.STANDARD_OUTPUT
    if page:
        tune_job.show(tuned, Console())
    for path, data in ((write, tuned.config), (as_json, tuned.to_json())):
        output_files.write_json(path, data)
        if path is not None and page:
            Console().print(Text(f"Written to {path}."))
