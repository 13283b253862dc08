"""Whether a program's own config code, and then DeepSpeed's, take files of ``ds_configs/``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .runs import ROOT

FOLDER = ROOT / "ds_configs"


def refused(
    command: Sequence[str], code: Path, program: str, wanted: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What is wrong with the files.

    Args:
        command: a script that prints a line for each file, in their order: {"passed": what the
            program hands to DeepSpeed, "accepted": what DeepSpeed makes of it}.
        code: a copy of the program, in which the command runs.
        program: its name, for the sentences.
        wanted: by file, the settings that it has, with DeepSpeed's names.
    """
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=code, env=env, capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = []
    for name, settings in wanted.items():
        if not answers:
            return [*wrong, f"{program} does not load {name}: {done.stderr[-1000:]}"]
        answer = answers.pop(0)
        wrong += [
            f"{name}: {program} passes {key}: {answer['passed'].get(key)} to DeepSpeed, not {value}"
            for key, value in settings.items()
            if answer["passed"].get(key) != value
        ]
        wrong += [f"{name}: {sentence}" for sentence in changed(settings, answer["accepted"])]
    return wrong


def changed(given: Mapping[str, Any], found: Mapping[str, Any], inside: str = "") -> list[str]:
    """The settings of ``given`` that ``found`` has, but with another value."""
    wrong = []
    for key, value in found.items():
        if key not in given:
            continue
        if isinstance(value, dict):
            wrong += changed(given[key], value, f"{key}.")
        elif given[key] != value:
            wrong.append(f"DeepSpeed takes {inside}{key} for {value}, not {given[key]}")
    return wrong
