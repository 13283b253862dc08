"""Which versions are supported, by the results of ``make test-versions``: what ``doctor`` says."""

from __future__ import annotations

import pytest

from deepspeed_smddp.diagnostics.doctor import checks
from deepspeed_smddp.diagnostics.doctor.facts import Verdict
from deepspeed_smddp.upstream import source, versions
from tests.versions import cells, tables


def test_doctor_knows_the_results() -> None:
    assert tables.TRAINED.read_text(encoding="utf-8") == tables.trained(cells.read())
    trained = checks.trained
    assert "equal to Gloo's" in trained("0.19.8", "2.13.0+cpu", (3, 11))
    assert trained("0.19.8", "2.9.0", (3, 11)).startswith("not torch 2.9.0;")
    assert "not all together" in trained("0.16.9", "2.14.1", (3, 11))


def test_doctor_names_features_that_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    assert all(finding.verdict is Verdict.OK for finding in checks.version_findings())
    assert set(checks._NAMES) == set(versions.SUPPORT)
    place = next(iter(source.READ["gather"]))
    monkeypatch.setitem(source.READ["gather"], place, {})
    _, applying, *refused = checks.version_findings()
    assert "gathers without copies" not in applying.text
    assert "reductions without copies" in applying.text
    assert [finding.verdict for finding in refused] == [Verdict.LIMITED]
    assert place.partition(":")[2] in refused[0].text


def test_doctor_compares_versions_of_whole_releases() -> None:
    reason = checks.refusal("sharded_data_parallel_degree", "0.17.6")
    assert reason == "works with DeepSpeed 0.19.8, and this is 0.17.6"
    assert checks.refusal("comm_backend", "0.17.6+unknown") is None
