"""Whether functions of DeepSpeed and torch are the ones that were read for a feature.

A replacement rests on what the functions around it do. ``versions`` lists those of each feature;
``known_sources.json`` has the digests of their sources in the releases that were read
(``tools/record_sources.py`` writes it). If the digests are not those of one of these releases, the
library's own path stays, and one warning says why.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed_smddp.config import settings
from deepspeed_smddp.errors import warn_once
from deepspeed_smddp.upstream import versions

_SWITCHED = ("gather", "reduce", "overlap")  # SMDDP_DEBUG=zero_paths=0 turns these off

MISSING = "-"  # in place of a digest: the module is there, and has no such name

# By digest, the releases in which a function has it.
Releases = dict[str, frozenset[str]]


def _read() -> dict[str, dict[str, Releases]]:
    recorded = json.loads(Path(__file__).with_name("known_sources.json").read_text("utf-8"))
    found = {}
    for feature, support in versions.SUPPORT.items():
        if support.read:
            oldest, newest = map(versions.order, support.read)
            releases = recorded["releases"][support.library]
            read = [v for v in releases if oldest <= versions.order(v) <= newest]
            digests = recorded["digests"]
            found[feature] = {
                place: _releases(digests.get(place, ()), read) for place in support.places
            }
    return found


def _releases(digests: Sequence[Sequence[str]], read: Sequence[str]) -> Releases:
    found: dict[str, set[str]] = defaultdict(set)
    for digest, *of in digests:
        since, until = map(versions.order, of)
        found[digest].update(v for v in read if since <= versions.order(v) <= until)
    return {digest: frozenset(of) for digest, of in found.items() if of}


# Feature -> place -> digest -> releases.
READ = _read()


@cache
def known(feature: str) -> bool:
    """Whether ``feature`` may replace its functions; if not, the first call logs why."""
    if feature in _SWITCHED and not settings.current().debug.zero_paths:
        return False
    reason = refusal(feature)
    if reason is not None:
        warn_once(
            f"upstream {feature}",
            f"smddp: {versions.SUPPORT[feature].otherwise}, as {reason}; the results are the same",
        )
    return reason is None


def refusal(feature: str) -> str | None:
    """Why a feature does not apply with the library that is installed, or None.

    The one guard of all features: by the version, or the first function that is not one of those
    that were read together.
    """
    support = versions.SUPPORT[feature]
    this = versions.installed(support.library)
    if support.minors is not None:
        oldest, newest = support.minors
        if oldest <= versions.order(versions.version(support.library) or "")[:2] <= newest:
            return None
        known = " to ".join(f"{major}.{minor}" for major, minor in support.minors)
        return f"it works with {support.library} {known}, and this is {this}"
    known = " to ".join(dict.fromkeys(support.read or ()))
    together: frozenset[str] | None = None
    for place, read in READ[feature].items():
        module, _, name = place.partition(":")
        function = f"{module}.{name}".rstrip(".")
        try:
            found = digest_in(_file(module), name)
        except LookupError:
            found = MISSING
        except (ImportError, OSError, SyntaxError):
            return f"the source of {module} of {this} can't be read"
        releases = read.get(found, frozenset())
        together = releases if together is None else together & releases
        if not together and found == MISSING:
            return f"{this} has no {function}"
        if not together:
            return f"{function} of {this} is not that of {known}"
    return None


def digest_in(file: Path, name: str) -> str:
    """The digest of the whole file of a module for no name, else :func:`digest_of`."""
    if not name:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return digest_of(_parsed(file), name)


def digest_of(tree: ast.Module, name: str) -> str:
    """A digest of the syntax trees, with decorators, of all definitions of a class or function.

    Comments, line breaks and the version of Python have no part in it. Of the tree of a module:
    nothing is imported.

    Raises:
        LookupError: there is no such name in it.
    """
    found: list[ast.AST] = [tree]
    for part in name.split("."):
        found = [inner for node in found for inner in _definitions(node, part)]
    if not found:
        raise LookupError(f"there is no {name}")
    return hashlib.sha256(_text(found).encode()).hexdigest()[:16]


def _definitions(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """The definitions of a name in a module or class, also below ``if`` and ``try``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if child.name == name:
                yield child
        elif isinstance(child, (ast.stmt, ast.excepthandler)):
            yield from _definitions(child, name)


def _text(part: Any) -> str:
    """A part of a syntax tree as text; that of ``ast.dump`` depends on the version of Python."""
    if isinstance(part, ast.AST):
        fields = (f"{name}={_text(value)}" for name, value in ast.iter_fields(part) if value != [])
        return f"{type(part).__name__}({', '.join(fields)})"
    if isinstance(part, list):
        return f"[{', '.join(map(_text, part))}]"
    return repr(part)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _file(module: str) -> Path:
    """The file of a module; raises ImportError if there is no such module."""
    spec = find_spec(module.partition(".")[0])
    for folder in (spec and spec.submodule_search_locations) or ():
        found = file_in(Path(folder).parent, module)
        if found is not None:
            return found
    raise ImportError(f"there is no module {module}")


def file_in(folder: Path, module: str) -> Path | None:
    """The file of a module whose library lies in ``folder``, or None."""
    path = folder.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)
