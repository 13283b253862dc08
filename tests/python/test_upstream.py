"""Functions of other libraries are wrapped without a change to their callers."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_smddp.diagnostics.doctor import checks
from deepspeed_smddp.diagnostics.doctor.facts import Verdict
from deepspeed_smddp.upstream import source, versions, wrapping
from deepspeed_smddp.upstream.wrapping import Call, is_wrapped, surround, wrap

FOUND = find_spec("deepspeed")


def test_a_context_surrounds_the_call_and_may_change_its_arguments() -> None:
    notes: list[str] = []

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        notes.append(f"before: {dict(call.arguments)}")
        call.change(right=5, scale=1)
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
        ("comm_backend", "0.14.0", None),
        ("comm_backend", "0.17.6+unknown", None),
        ("comm_backend", "0.13.9", "0.14 to 0.19, and this is DeepSpeed 0.13.9"),
        ("comm_backend", "1.0.0", "0.14 to 0.19, and this is DeepSpeed 1.0.0"),
        # Not the version counts, but what it has.
        ("sharded_data_parallel_degree", "0.19.9", None),
        ("tensor_parallel_degree", "0.19.8+abc123", None),
    ],
)
def test_versions(
    feature: str, version: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    monkeypatch.setattr(source, "find_spec", lambda name: FOUND)
    found = source.refusal(feature)
    assert (found is None) if said is None else (said in str(found))


@pytest.mark.parametrize(
    "after",
    [
        "@changed\ndef f(x):\n    if x:\n        g()\n    h()\n",  # a decorator
        "def f(x):\n    if x:\n        g()\n        h()\n",  # moved into the condition
        "def f(x):\n    if x:\n        g()\n    h()\nif True:\n    def f(x): ...\n",
    ],
)
def test_a_digest_is_of_what_is_executed(after: str) -> None:
    def digest(text: str) -> str:
        return source.digest_of(ast.parse(text), "f")

    before = "def f(x):\n    if x:\n        g()\n    h()\n"
    assert digest(before) == digest("# a comment\ndef f(x):\n  if x: g()\n\n  h()\n")
    assert digest(before) != digest(after)


def test_functions_must_have_been_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = "json:loads", "json:dumps"
    now = {
        place: source.digest_in(source._file("json"), place.partition(":")[2])
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


def arguments_of(function: Any) -> list[str]:
    """The names of a function's arguments, through decorators that hide them."""
    function = inspect.unwrap(function)
    names = list(inspect.signature(function).parameters)
    if names != ["args", "kwargs"]:
        return names
    return arguments_of(inspect.getclosurevars(function).nonlocals["func"])


def test_wrapped_functions_take_every_call_that_their_signature_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.runtime.engine import DeepSpeedEngine

    from deepspeed_smddp.compat import sagemaker
    from deepspeed_smddp.deepspeed import auto, gather, monitoring, overlap, reduce
    from deepspeed_smddp.deepspeed.sharding.sharded_checkpoint import ShardCheckpoints
    from deepspeed_smddp.distributed import split_group

    wrapped = {}

    def note(owner: object, name: str, around: object) -> None:
        wrapped[name] = (getattr(owner, name), partial(around, None))

    for module in (wrapping, split_group, sagemaker):
        monkeypatch.setattr(module, "wrap", note)
    for feature in (gather, reduce, overlap):
        feature.install(deepspeed)
    split_group.install()
    auto._install()
    monitoring.follow_engine(None)
    sagemaker._wrap_fsdp()
    sagemaker._wrap_offload()
    for name in ShardCheckpoints.METHODS:
        wrapped[name] = getattr(DeepSpeedEngine, name), getattr(ShardCheckpoints, name)
    assert len(wrapped) >= 17
    for original, ours in wrapped.values():
        names = arguments_of(original)
        one_by_one = inspect.signature(ours)
        one_by_one.bind(*names)
        first = names[:1] if names[0] == "self" else []
        one_by_one.bind(*first, **dict.fromkeys(names[len(first) :]))


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
