"""The checks that `make neox-check` makes of a run, and the pages that it writes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import jobs  # noqa: E402
from tests.real_programs import program, runs  # noqa: E402
from tests.real_programs.runs import STEPS, Case, Run  # noqa: E402

CASE = Case("zero3", stage=3)
LOSSES = {step: 6.0 - 0.1 * step for step in range(1, STEPS + 1)}


def row(collective: str, path: str = "shm + fabric") -> dict[str, object]:
    return {"collective": collective, "path": path, "calls": 3, "bytes": 24}


def ledger() -> list[dict[str, object]]:
    owned = [row(name) for name in ("all_gather", "reduce_scatter", "all_reduce")]
    return [*owned, row("send", "fallback:gloo")]


@pytest.fixture
def reference() -> Run:
    return Run("zero3", "released", "gloo", False, dict(LOSSES))


@pytest.fixture
def good() -> Run:
    return Run("zero3", "released", "smddp", False, dict(LOSSES), ledger())


@pytest.mark.parametrize("precision", runs.TOLERANCE)
def test_the_losses_must_be_gloos(good: Run, reference: Run, precision: str) -> None:
    case = replace(CASE, precision=precision)
    assert runs.check(good, reference, case) == []
    factor = 1 + 2 * runs.TOLERANCE[precision]
    changed = replace(good, losses=good.losses | {7: good.losses[7] * factor})
    [sentence] = runs.check(changed, reference, case)
    assert sentence.startswith("step 7: loss")
    flat = dict.fromkeys(LOSSES, 6.0)
    wrong = runs.check(replace(good, losses=flat), replace(reference, losses=flat), case)
    assert wrong == ["nothing was learnt"]


def test_no_step_may_be_missing(good: Run, reference: Run) -> None:
    assert runs.check(replace(good, losses={}), reference, CASE)
    assert runs.check(good, replace(reference, losses={}), CASE)
    later = {step: loss for step, loss in LOSSES.items() if step > runs.CHECKPOINT}
    assert runs.check(replace(good, resumed=True, losses=later), reference, CASE) == []
    assert "steps [1, 2" in runs.check(replace(good, resumed=True), reference, CASE)[0]


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_fallback_is_wrong(good: Run, reference: Run, collective: str) -> None:
    rows = [r for r in ledger() if r["collective"] != collective]
    assert runs.check(replace(good, ledger=rows), reference, CASE)
    if collective != "reduce_scatter":
        rows = [*ledger(), row(collective, "fallback:gloo")]
        assert runs.check(replace(good, ledger=rows), reference, CASE)


def test_a_failed_program_shows_the_end_of_its_log(tmp_path: Path) -> None:
    def run(code: str, limit: float = 60) -> str:
        command = [sys.executable, "-c", code]
        return jobs.run(command, tmp_path, tmp_path / "log", limit, os.environ, os.environ)

    assert run("print('begin')") == "begin\n" * 2
    with pytest.raises(jobs.JobError, match="no CUDA\nexit status 1"):
        run("import sys; sys.exit('no CUDA')")
    with pytest.raises(jobs.JobError, match="no end after 1 s"):
        run("import time; time.sleep(60)", 1)


def test_a_shipped_config_that_a_program_takes_otherwise(tmp_path: Path) -> None:
    given = {"comm_backend": "smddp", "train_batch_size": 8, "zero_optimization": {"stage": 3}}
    accepted = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_clipping": 0}

    def refused(passed: object, accepted: object) -> list[str]:
        answer = json.dumps({"passed": passed, "accepted": accepted})
        command = [sys.executable, "-c", f"print({answer!r})"]
        return program.refused(command, tmp_path, {"a.json": given})

    assert refused(given, accepted) == []
    [sentence] = refused({**given, "comm_backend": "nccl"}, accepted)
    assert sentence == "a.json: comm_backend reaches DeepSpeed as nccl, not smddp"
    [sentence] = refused(given, {**accepted, "zero_optimization": {"stage": 2}})
    assert sentence == "a.json: DeepSpeed takes zero_optimization.stage for 2, not 3"
    failing = [sys.executable, "-c", "import sys; sys.exit('no such key')"]
    [sentence] = program.refused(failing, tmp_path, {"a.json": given})
    assert sentence.startswith("a.json is not loaded: no such key")
