"""Functions of other libraries are wrapped without a change to their callers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from deepspeed_smddp.diagnostics.doctor import checks
from deepspeed_smddp.diagnostics.doctor.facts import Verdict
from deepspeed_smddp.upstream import source, versions
from deepspeed_smddp.upstream.wrapping import Call, is_wrapped, surround, wrap


def test_a_context_surrounds_the_call_and_may_change_its_arguments() -> None:
    notes: list[str] = []

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        notes.append(f"before: {dict(call.arguments)}")
        call.change(right=5)
        call.leave_out("scale")
        yield
        notes.append(f"after: {call.result}")

    def product(left: int, right: int = 2, scale: int = 1) -> int:
        notes.append("product")
        return left * right * scale

    wrapped = surround(product, around)
    assert wrapped(3, scale=100) == 15
    assert notes == ["before: {'left': 3, 'scale': 100}", "product", "after: 15"]
    assert is_wrapped(wrapped) and not is_wrapped(product)
    assert inspect.signature(wrapped) == inspect.signature(product)
    assert wrapped.__name__ == "product"


@contextmanager
def passing(call: Call) -> Iterator[None]:
    yield


def test_without_a_change_the_arguments_are_passed_as_given() -> None:
    def original(*args: object, **kwargs: object) -> tuple[object, object]:
        return args, kwargs

    original.__signature__ = inspect.signature(lambda left, right: None)  # type: ignore[attr-defined]
    assert surround(original, passing)(1, right=2) == ((1,), {"right": 2})


def test_wrong_arguments_get_the_functions_own_error() -> None:
    def function(left: int) -> None: ...

    with pytest.raises(TypeError, match=r"function.* got an unexpected keyword argument 'right'"):
        surround(function, passing)(right=1)


def test_wrap_passes_the_original() -> None:
    owner = SimpleNamespace(double=lambda value: 2 * value)
    wrap(owner, "double", lambda original, value: original(value) + 1)
    assert owner.double(4) == 9
    assert is_wrapped(owner.double)


@pytest.mark.parametrize(
    ("feature", "version", "said"),
    [
        ("comm_backend", (0, 14, 0), None),
        ("comm_backend", (0, 13, 9), "works with DeepSpeed 0.14 to 0.19, and this is 0.13.9"),
        ("comm_backend", (1, 0, 0), "works with DeepSpeed 0.14 to 0.19, and this is 1.0.0"),
        ("sharded_data_parallel_degree", (0, 19, 8), None),
    ],
)
def test_versions(feature: str, version: tuple[int, int, int], said: str | None) -> None:
    deepspeed = SimpleNamespace(
        __version__=".".join(map(str, version)),
        __version_major__=version[0],
        __version_minor__=version[1],
    )
    assert versions.refusal(feature, deepspeed) == said


def test_functions_must_have_been_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = "json:loads", "json:dumps"
    now = {
        place: source.digest_of(*source.parsed("json"), place.partition(":")[2])
        for place in (first, second)
    }
    read = {first: {now[first]: frozenset({"1"})}, second: {now[second]: frozenset({"1", "2"})}}
    monkeypatch.setitem(source.READ, "gather", read)
    assert source.refusal("gather") is None
    read[first] = {now[first]: frozenset({"3"})}
    assert "json.dumps of" in str(source.refusal("gather"))


def test_a_name_may_be_missing_where_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {"json:never_was": {source.MISSING: frozenset({"1"})}}
    monkeypatch.setitem(source.READ, "gather", read)
    assert source.refusal("gather") is None
    read["json:never_was"] = {"0" * 16: frozenset({"1"})}
    assert "has no json.never_was" in str(source.refusal("gather"))


# ---- what `doctor` says of versions


def test_doctor_knows_the_results() -> None:
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
