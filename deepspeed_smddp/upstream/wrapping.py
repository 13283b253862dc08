"""Wraps functions of other libraries; how they are called does not change.

Must not know a feature: callers say what to wrap and what to do around it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

MARK = "_smddp_wraps"  # of a wrapper that this module made; holds the original function


class Call:
    """One call of a function that :func:`surround` wrapped.

    ``result`` is what the function returned; None until it has.

    Raises:
        TypeError: the function does not take these arguments.
    """

    def __init__(
        self, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._bound = signature.bind(*args, **kwargs)
        self._args, self._kwargs = args, kwargs
        self.result: Any = None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments that the caller gave, by name, with the changes made so far."""
        return MappingProxyType(self._bound.arguments)

    def change(self, /, **arguments: Any) -> None:
        """Sets arguments for the function."""
        self._bound.arguments.update(arguments)
        self._args, self._kwargs = self._bound.args, self._bound.kwargs

    def run(self, function: Callable[..., Any]) -> None:
        """Calls the function: with the caller's own arguments if there were no changes."""
        self.result = function(*self._args, **self._kwargs)


Around = Callable[[Call], AbstractContextManager[None]]


def surround(function: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """A function with the same signature whose calls run inside the context ``around``, once."""
    if is_wrapped(function):
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            call = Call(signature, args, kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises, with its own message
        with around(call):
            call.run(function)
        return call.result

    setattr(wrapper, MARK, function)
    return wrapper


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """``owner.name`` becomes a call of ``around`` with the original before its arguments, once."""
    original = getattr(owner, name)
    if is_wrapped(original):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, MARK, original)
    setattr(owner, name, wrapper)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While the context lasts, ``owner.name`` is ``value``."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def is_wrapped(function: Callable[..., Any]) -> bool:
    """Whether :func:`surround` or :func:`wrap` made the function."""
    return hasattr(function, MARK)


def missing_argument(function: Callable[..., Any], names: Iterable[str]) -> str | None:
    """The first of ``names`` that the function has no argument of, or None."""
    parameters = inspect.signature(function).parameters
    return next((name for name in names if name not in parameters), None)
