"""Which versions are supported: the page, the results that it shows, and what ``doctor`` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_smddp.diagnostics.doctor import version_support
from deepspeed_smddp.diagnostics.doctor.finding import Verdict
from deepspeed_smddp.upstream import source, versions
from tests.versions import outcomes, tables
from tests.versions.environments import ROOT


@pytest.mark.parametrize(
    ("page", "made"), [("docs/versions.md", tables.whole), ("README.md", tables.short)]
)
def test_the_pages_show_the_results(page: str, made: Callable[[Any], str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = text.split(tables.BEGIN)[1].split(tables.END)[0]
    assert shown.strip() == made(outcomes.read()).strip(), "make test-versions writes it"


def test_doctor_knows_the_results() -> None:
    assert tables.TRAINED.read_text(encoding="utf-8") == tables.trained(outcomes.read())
    trained = version_support.trained
    assert "equal to Gloo's" in trained("0.19.8", "2.13.0+cpu", (3, 11))
    assert trained("0.19.8", "2.9.0", (3, 11)).startswith("not torch 2.9.0;")
    assert "not all together" in trained("0.16.9", "2.14.1", (3, 11))


def test_a_row_of_several_releases_says_where_it_changes() -> None:
    versions_ = ["0.17.0", "0.17.1", "0.17.2"]
    assert tables._together(["yes"] * 3, versions_) == "yes"
    assert tables._together(["no", "yes", "yes"], versions_) == "yes from 0.17.1"
    mixed = tables._together(["equal", "**fails**", "equal"], versions_)
    assert mixed == "0.17.0: equal; 0.17.1: **fails**; 0.17.2: equal"


@pytest.mark.parametrize("name", outcomes.read())
def test_every_cell_is_as_promised(name: str) -> None:
    assert not outcomes.is_bad(outcomes.read()[name]), outcomes.summary(outcomes.read()[name])


def test_a_cell_that_breaks_a_promise_is_bad() -> None:
    good = {"deepspeed": "0.16.0", "install": "installed", "alone": "trains"}
    good.update(beside="equal", smddp="equal", resume="equal")
    assert not outcomes.is_bad(good)
    for name in ("beside", "smddp", "resume"):
        assert outcomes.is_bad({**good, name: "losses [1.0] in place of [2.0]"}), name
    assert outcomes.is_bad({**good, "deepspeed": "0.14.0", "beside": "KeyError: 1"})
    assert not outcomes.is_bad({**good, "alone": "ImportError: x"})
    assert outcomes.is_bad({**good, "fsdp2 alone": "trains", "fsdp2": "KeyError: 1"})
    assert outcomes.is_bad({**good, "install": "CMake Error: x"})
    assert not outcomes.is_bad({**good, "deepspeed": "0.14.0", "install": "ImportError: x"})


def test_doctor_names_features_that_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    assert all(finding.verdict is Verdict.OK for finding in version_support.findings())
    assert set(version_support._NAMES) == set(versions.SUPPORT)
    place = next(iter(source.READ["gather"]))
    monkeypatch.setitem(source.READ["gather"], place, {})
    _, applying, *refused = version_support.findings()
    assert "gathers without copies" not in applying.text
    assert "reductions without copies" in applying.text
    assert [finding.verdict for finding in refused] == [Verdict.LIMITED]
    assert place.partition(":")[2] in refused[0].text


def test_doctor_compares_versions_of_whole_releases() -> None:
    reason = version_support.refusal("sharded_data_parallel_degree", "0.17.6")
    assert reason == "works with DeepSpeed 0.19.8, and this is 0.17.6"
    assert version_support.refusal("comm_backend", "0.17.6+unknown") is None
