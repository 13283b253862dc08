"""The keys of a section: what each may hold, and how a whole section is checked.

Every process that uses smddp imports it. It does without pydantic, whose import takes longer than
the rest of the package's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


class WrongKeyError(ValueError):
    """A key is unknown, or holds a wrong value. ``path`` leads to it from the outermost section."""

    def __init__(self, path: tuple[str, ...], held: Any, known: bool) -> None:
        super().__init__(".".join(path))
        self.path, self.held, self.known = path, held, known


@dataclass(frozen=True)
class Key:
    """One key. ``parse`` returns the value that counts, or raises ValueError.

    ``description`` completes the sentence "<key> is ..., but may hold ...".
    """

    default: Any
    parse: Callable[[Any], Any]
    description: str


def key(default: Any, parse: Callable[[Any], Any], description: str) -> Any:
    """A key of the class of sections in whose body it stands."""
    return Key(default, parse, description)


def subsection(kind: type[Section], description: str) -> Any:
    """A key that holds a section of its own."""
    return Key(kind(), kind.of, description)


class Section:
    """Values by key. A section has no unknown keys, and does not change.

    Raises:
        WrongKeyError: the first key, in the order of the class, that may not hold its value; else
            the first unknown one.
    """

    keys: ClassVar[Mapping[str, Key]]
    given: frozenset[str]  # keys that were given a value

    def __init_subclass__(cls) -> None:
        cls.keys = {name: held for name, held in vars(cls).items() if isinstance(held, Key)}

    def __init__(self, **values: Any) -> None:
        found = {
            name: _parsed(name, known, values[name]) if name in values else known.default
            for name, known in self.keys.items()
        }
        for name, value in values.items():
            if name not in self.keys:
                raise WrongKeyError((name,), value, known=False)
        self.__dict__.update(found, given=frozenset(values))

    @classmethod
    def of(cls, values: Any) -> Section:
        """The section of a mapping, or the section itself."""
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ValueError("an object is expected")
        return cls(**{str(name): value for name, value in values.items()})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} does not change; make another one")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in self.keys)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self)
        return f"{type(self).__name__}({values})"


def _parsed(name: str, known: Key, value: Any) -> Any:
    try:
        return known.parse(value)
    except WrongKeyError as error:
        raise WrongKeyError((name, *error.path), error.held, error.known) from None
    except ValueError:
        raise WrongKeyError((name,), value, known=True) from None


def boolean(value: Any) -> bool:
    """True or false, and no number."""
    if not isinstance(value, bool):
        raise ValueError("true or false is expected")
    return value


def text(value: Any) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise ValueError("a text is expected")
    return value


def one_of(*choices: str) -> Callable[[Any], str]:
    """One of these texts."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError("another text is expected")
        return value

    return parse


def whole(least: int, most: int) -> Callable[[Any], int]:
    """A whole number. JSON and hjson read 5e8 as a float, which DeepSpeed takes for a count too."""

    def parse(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError("another number is expected")
        return value

    return parse


def seconds(may_be_zero: bool) -> Callable[[Any], float]:
    """A number of seconds, at most a billion."""

    def parse(value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError("a number is expected")
        if not (0 < value <= 1e9 or (may_be_zero and value == 0)):
            raise ValueError("another number is expected")
        return float(value)

    return parse
