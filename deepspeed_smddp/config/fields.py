"""Sets of settings: what a field of one is, and how the values that are given are checked.

pydantic checks them by the types in ``kinds``. A process without a value to check imports neither.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, get_args, get_type_hints

from deepspeed_smddp.errors import SmddpConfigError

PREFIX = "SMDDP_"


@dataclass(eq=False)
class Field:
    """One setting of a :class:`Model`, whose objects have its default unless a value was given.

    Args:
        when: to change it, and to what.
        holds: completes the sentence "<key> is ..., but may hold ..."; "": as its type says.
        since: the first version that has it.
        variable: whether an environment variable of its own sets it.
        secret: its value is never shown.
        of_engine: it says how one engine is built; the others hold for the process.
    """

    default: Any
    meaning: str
    when: str = ""
    holds: str = ""
    since: str = "0.1"
    variable: bool = True
    secret: bool = False
    of_engine: bool = False

    def __set_name__(self, owner: type[Model], name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else self.default

    @cached_property
    def kind(self) -> Any:
        """The type of its values, for pydantic."""
        from deepspeed_smddp.config import kinds

        hints = get_type_hints(self._owner, localns={"kinds": kinds}, include_extras=True)
        return hints[self._name]

    @cached_property
    def _validate(self) -> Callable[[Any], Any]:
        from pydantic import TypeAdapter

        return TypeAdapter(self.kind).validate_python

    def checked(self, value: Any, named: Callable[[str], str]) -> Any:
        """The value as the model has it; ``named`` is how an error calls a setting, of its path.

        Raises:
            SmddpConfigError: it may not hold this, in one sentence.
        """
        if isinstance(self.default, Model):
            kind = type(self.default)
            if isinstance(value, Mapping):
                given = {str(key): of for key, of in value.items()}
                return kind(lambda path: named(f"{self._name}.{path}"), **given)
            if isinstance(value, kind):
                return value
        else:
            try:
                return self._validate(value)
            except ValueError:  # pydantic's
                pass
        raise SmddpConfigError(
            f"{named(self._name)} is {show(value)}, but may hold {self.may_hold()}"
        )

    def may_hold(self) -> str:
        """What it may hold, in words that follow "may hold"."""
        titles = (getattr(mark, "title", None) for mark in getattr(self.kind, "__metadata__", ()))
        stated = self.holds or next(filter(None, titles), None)
        if stated:
            return stated
        *choices, last = (f'"{choice}"' for choice in get_args(self.kind))
        return ", ".join(choices) + f" or {last}"


class Model:
    """A set of settings, which does not change.

    An object has the values that were given as attributes of its own. ``named`` is how an error
    calls a setting, of its dotted path.

    Raises:
        SmddpConfigError: an unknown key or a wrong value, in one sentence.
    """

    def __init__(self, named: Callable[[str], str] = str, /, **given: Any) -> None:
        fields = self.fields()
        for name, value in given.items():
            if name not in fields:
                guess = nearest(name, fields)
                hint = f'did you mean "{guess}"?' if guess else "known keys: " + ", ".join(fields)
                raise SmddpConfigError(f"{named(name)}: {show(value)} is not a known key; {hint}")
            vars(self)[name] = fields[name].checked(value, named)

    @classmethod
    def fields(cls) -> dict[str, Field]:
        """The settings by name."""
        return {name: one for name, one in vars(cls).items() if isinstance(one, Field)}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in self.fields())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and dict(self) == dict(other)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: settings do not change")

    def __repr__(self) -> str:
        shown = (f"{name}={v!r}" for name, v in self if not self.fields()[name].secret)
        return f"{type(self).__name__}({', '.join(shown)})"


class Setting(NamedTuple):
    """One setting: its key, with the keys of the sections around it, and its field."""

    model: type[Model]  # the outermost
    path: str
    field: Field

    @property
    def variable(self) -> str | None:
        """The environment variable that sets it, or None."""
        own = self.field.variable and "." not in self.path
        return PREFIX + self.path.upper() if own else None


def settings_of(model: type[Model]) -> Iterator[Setting]:
    """The settings of a model, and of the sections in it."""
    for name, field in model.fields().items():
        if isinstance(field.default, Model):
            for _, path, inner in settings_of(type(field.default)):
                yield Setting(model, f"{name}.{path}", inner)
        else:
            yield Setting(model, name, field)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt word most likely stands for."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def show(value: Any) -> str:
    """A value in the syntax of the file, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
