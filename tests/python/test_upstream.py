"""Functions of other libraries are wrapped without a change to their callers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import pytest

from deepspeed_smddp.upstream import source, versions
from deepspeed_smddp.upstream.wrapping import Call, is_wrapped, surround, wrap


def noting(name: str, notes: list[str]) -> Callable[[Call], AbstractContextManager[None]]:
    @contextmanager
    def around(call: Call) -> Iterator[None]:
        notes.append(f"before {name}: {dict(call.arguments)}")
        yield
        notes.append(f"after {name}: {call.result}")

    return around


def test_contexts_are_entered_in_order_and_left_in_reverse() -> None:
    notes: list[str] = []

    def product(left: int, right: int = 2) -> int:
        notes.append("product")
        return left * right

    wrapped = surround(product, [noting("first", notes), noting("second", notes)])
    assert wrapped(3) == 6
    assert notes == [
        "before first: {'left': 3}",
        "before second: {'left': 3}",
        "product",
        "after second: 6",
        "after first: 6",
    ]
    assert is_wrapped(wrapped) and not is_wrapped(product)
    assert inspect.signature(wrapped) == inspect.signature(product)
    assert wrapped.__name__ == "product"


def test_a_change_reaches_later_contexts_and_the_function() -> None:
    notes: list[str] = []

    @contextmanager
    def changing(call: Call) -> Iterator[None]:
        call.change(right=5)
        call.leave_out("scale")
        yield

    def product(left: int, right: int = 2, scale: int = 1) -> int:
        return left * right * scale

    wrapped = surround(product, [changing, noting("later", notes)])
    assert wrapped(3, scale=100) == 15
    assert notes[0] == "before later: {'left': 3, 'right': 5}"


def test_without_a_change_the_arguments_are_passed_as_given() -> None:
    def original(*args: object, **kwargs: object) -> tuple[object, object]:
        return args, kwargs

    original.__signature__ = inspect.signature(lambda left, right: None)  # type: ignore[attr-defined]
    assert surround(original, [noting("", [])])(1, right=2) == ((1,), {"right": 2})


def test_an_error_skips_the_parts_that_follow() -> None:
    notes: list[str] = []

    @contextmanager
    def refusing(call: Call) -> Iterator[None]:
        yield
        raise ValueError("refused")

    def function() -> None:
        notes.append("function")

    with pytest.raises(ValueError, match="refused"):
        surround(function, [noting("first", notes), refusing, noting("last", notes)])()
    assert notes == ["before first: {}", "before last: {}", "function", "after last: None"]


def test_wrong_arguments_get_the_functions_own_error() -> None:
    def function(left: int) -> None: ...

    notes: list[str] = []
    with pytest.raises(TypeError, match=r"function.* got an unexpected keyword argument 'right'"):
        surround(function, [noting("", notes)])(right=1)
    assert not notes


def test_wrap_passes_the_original() -> None:
    owner = SimpleNamespace(double=lambda value: 2 * value)
    wrap(owner, "double", lambda original, value: original(value) + 1)
    assert owner.double(4) == 9
    assert is_wrapped(owner.double)


@pytest.mark.parametrize(
    ("feature", "version", "said"),
    [
        ("comm_backend", (0, 14, 0), None),
        ("comm_backend", (0, 19, 8), None),
        ("comm_backend", (0, 13, 9), "works with DeepSpeed 0.14 to 0.19, and this is 0.13.9"),
        ("comm_backend", (1, 0, 0), "works with DeepSpeed 0.14 to 0.19, and this is 1.0.0"),
        ("sharded_data_parallel_degree", (0, 19, 8), None),
        (
            "tensor_parallel_degree",
            (0, 19, 7),
            "works with DeepSpeed 0.19.8, and this is 0.19.7",
        ),
    ],
)
def test_versions(feature: str, version: tuple[int, int, int], said: str | None) -> None:
    deepspeed = SimpleNamespace(
        __version__=".".join(map(str, version)),
        __version_major__=version[0],
        __version_minor__=version[1],
    )
    assert versions.refusal(feature, deepspeed) == said


def test_every_feature_that_rests_on_sources_has_a_version() -> None:
    by_source = {name for name, support in versions.SUPPORT.items() if support.read}
    assert by_source == set(source.READ)


def test_functions_must_have_been_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = "json:loads", "json:dumps"
    now = {place: source.digest("json", place.partition(":")[2]) for place in (first, second)}
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


@pytest.mark.parametrize("feature", ["gather", "reduce", "bucket sizes"])
@pytest.mark.parametrize("release", ["0.16.9", "0.17.6", "0.18.9", "0.19.8"])
def test_features_know_the_last_release_of_each_minor(feature: str, release: str) -> None:
    for place, read in source.READ[feature].items():
        assert any(release in releases for releases in read.values()), place
