"""Every command of the documentation is run by a test or by CI, or its page says what it needs.

A page says that in a comment, "# needs GPUs", behind the command or on the line above it; above the
first command of a block it holds for the whole block.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ranks
from test_docs_commands import PAGES

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"\$ |smddp (doctor|bench|tune|plan|report|trace)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"#.*\bneeds [a-z0-9]", re.IGNORECASE)

# The test that runs what a command runs. Sizes, numbers of ranks and names of files may be others
# there.
TESTS = {
    r"make demo( .*)?|.*deepspeed --num_gpus 2 examples/train.py .*": (
        "test_demo.py::test_run_writes_losses_curve_and_summary"
    ),
    r"make demo-two-hosts|SMDDP_FABRIC_INTERFACE=lo torchrun .*": (
        "test_demo.py::test_two_hosts_have_the_same_losses"
    ),
    r"torchrun --nproc-per-node 2 examples/ddp.py": "test_examples.py::test_ddp",
    r"(srun|mpirun).* smddp exec python train.py.*": (
        "test_launchers.py::test_a_program_of_torch_under_mpirun"
    ),
    r"(torchrun|deepspeed|mpirun) .*smddp doctor": "test_doctor_launched.py::test_by_a_launcher",
    r"srun .*smddp doctor": "test_doctor_launched.py::test_by_srun",
    r"(torchrun|deepspeed|mpirun|srun) .*smddp bench.*": (
        "test_bench.py::test_a_signal_to_one_rank_stops_all_after_the_turn"
    ),
    r"smddp bench .*": "test_bench.py::test_local_ranks_measure_all_operations",
    r"torchrun .*smddp tune .* --check .*": (
        "test_tune_gain.py::test_check_runs_real_steps_before_and_after"
    ),
    r"smddp trace.*": "test_trace_jobs.py::test_zero3_on_two_hosts",
    r"smddp plan llama-2-13b p4d .*": "test_plan.py::test_docs_show_the_page",
    r"smddp plan gpt3-175b p4d --gpus 64": "test_plan.py::test_what_does_not_fit",
    r"python benchmarks/planner.py": (
        "test_plan_validation.py::test_the_committed_page_is_what_the_command_writes"
    ),
    r"python -m hjson.tool .*": (
        "test_ds_configs.py::test_hjson_becomes_json_by_the_command_in_the_readme"
    ),
    r"\$SIMULATE .*|SIMULATE=.*": "test_simulator.py::test_two_hosts_take_what_the_model_says",
    r"torchrun --nnodes 1:2 .* --elastic": (
        "test_restarts.py::test_ranks_restart_over_one_store_in_other_numbers"
    ),
}
# What is run below: the command of the documentation, and what is changed in it.
RUN = {
    "python benchmarks/collectives.py --help": ("", ""),
    "torchrun --nproc-per-node 8 --no-python smddp tune --ds-config ds.json --write tuned.json": (
        "--nproc-per-node 8",
        "--nproc-per-node 2",
    ),
}


def lines(text: str) -> Iterator[tuple[str, bool]]:
    """The commands of a page with their comments, and whether they are marked."""
    for kind, block in FENCE.findall(text):
        whole, above, first = False, "", True
        for line in block.replace("\\\n", " ").splitlines():
            if not line.strip():
                above = ""
            elif kind == "sh" and line.startswith("#"):
                above = line
                whole = whole or (first and bool(NEEDS.search(line)))
            elif kind == "sh" or OURS.match(line):
                first = False
                yield line.removeprefix("$ ").strip(), whole or bool(NEEDS.search(above + line))
                above = ""
    for line in re.findall(r"^    ((?:smddp|python|torchrun) .*)$", FENCE.sub("", text), re.M):
        yield line, bool(NEEDS.search(line))


@cache
def steps_of_ci() -> list[str]:
    """Targets of make that CI runs; "test" builds, and is the three others."""
    found = re.findall(r'^step "make ([\w-]+)', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    parts = ["build", "test-cpp", "test-python", "test-quick"] if "test" in found else []
    # "lint" fails where "format" would change something.
    return [*found, *parts, *(["format"] if "lint" in found else [])]


def shown_by(line: str) -> str | None:
    """What runs the command: "CI", a test, or "here"."""
    command = line.split(" #")[0].strip()
    words = command.split()
    if command == ".ci/run" or (words[0] == "make" and words[1] in steps_of_ci()):
        return "CI"
    if command in RUN:
        return "here"
    return next((test for form, test in TESTS.items() if re.fullmatch(form, command)), None)


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_or_marked(page: str) -> None:
    text = (ROOT / page).read_text()
    neither = [line for line, marked in lines(text) if not marked and not shown_by(line)]
    assert neither == []


@pytest.mark.quick
def test_a_command_without_a_test_or_a_mark_is_noticed() -> None:
    page = """
```sh
make lint
smddp tune --unknown    # what
smddp doctor --fast     # needs EFA
```

```sh
# needs root
smddp tune
```

```
$ smddp plan llama p5
Memory of a GPU
```

    smddp doctor --slow
"""
    found = {line.split(" #")[0].strip(): (marked, shown_by(line)) for line, marked in lines(page)}
    assert found == {
        "make lint": (False, "CI"),
        "smddp tune --unknown": (False, None),
        "smddp doctor --fast": (True, None),
        "smddp tune": (True, None),
        "smddp plan llama p5": (False, None),
        "smddp doctor --slow": (False, None),
    }


@pytest.mark.quick
@pytest.mark.parametrize("test", sorted(set(TESTS.values())))
def test_the_named_tests_exist(test: str) -> None:
    file, name = test.split("::")
    assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.quick
def test_no_entry_is_left_over() -> None:
    commands = [
        line.split(" #")[0].strip()
        for page in PAGES
        for line, _ in lines((ROOT / page).read_text())
    ]
    unused = [form for form in TESTS if not any(re.fullmatch(form, c) for c in commands)]
    assert unused == [] and set(RUN) <= set(commands)


@pytest.mark.parametrize("command", RUN)
def test_commands_run(command: str, tmp_path: Path) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = shlex.split(command.replace(*RUN[command]))
    words = [str(ROOT / word) if word.startswith("benchmarks/") else word for word in words]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=ranks.environment(XDG_CACHE_HOME=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "--write" in words:
        written = json.loads((tmp_path / words[words.index("--write") + 1]).read_text())
        assert written["zero_optimization"]["stage3_prefetch_bucket_size"] > 0
    else:
        assert "usage:" in done.stdout
