"""Which versions are supported: the page, the results that it shows, and what ``doctor`` says."""

from __future__ import annotations

import pytest

from deepspeed_smddp.diagnose import version_support
from deepspeed_smddp.diagnose.finding import Verdict
from deepspeed_smddp.upstream import source, versions
from tests.versions import outcomes

PAGE = outcomes.PAGE.read_text(encoding="utf-8")


def test_the_page_shows_the_results() -> None:
    shown = PAGE.split(outcomes.BEGIN)[1].split(outcomes.END)[0]
    assert shown.strip() == outcomes.tables(outcomes.read()).strip(), "make test-versions writes it"


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


def test_doctor_names_features_that_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    assert all(finding.verdict is Verdict.OK for finding in version_support.findings())
    assert set(version_support._NAMES) == set(versions.SUPPORT)
    place = next(iter(source.READ["gather"]))
    monkeypatch.setitem(source.READ["gather"], place, {})
    applying, *refused = version_support.findings()
    assert "gathers without copies" not in applying.text
    assert "reductions without copies" in applying.text
    assert [finding.verdict for finding in refused] == [Verdict.LIMITED]
    assert place.partition(":")[2] in refused[0].text


def test_doctor_compares_versions_of_whole_releases() -> None:
    reason = version_support.refusal("sharded_data_parallel_degree", "0.17.6")
    assert reason == "works with DeepSpeed 0.19.8, and this is 0.17.6"
    assert version_support.refusal("comm_backend", "0.17.6+unknown") is None
