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
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

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
            found[feature] = {place: _releases(digests[place], read) for place in support.places}
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
    """The first function that is not one of those that were read together, or None."""
    together: frozenset[str] | None = None
    for place, read in READ[feature].items():
        module, _, name = place.partition(":")
        try:
            found = digest_of(*parsed(module), name)
        except LookupError:
            found = MISSING
        except (ImportError, OSError, SyntaxError):
            return f"the source of {module} of {versions.installed(feature)} can't be read"
        releases = read.get(found, frozenset())
        together = releases if together is None else together & releases
        if not together and found == MISSING:
            return f"{versions.installed(feature)} has no {module}.{name}"
        if not together:
            return f"{module}.{name} of {versions.installed(feature)} is not one this package knows"
    return None


def digest_of(text: str, tree: ast.Module, name: str) -> str:
    """A digest of the source of a class or function, without comments and indentation.

    Of the text of a module and its tree: nothing is imported.

    Raises:
        LookupError: there is no such name in it.
    """
    body, first, last = tree.body, 0, 0
    for part in name.split("."):
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part:
                body, first, last = node.body, node.lineno, node.end_lineno or node.lineno
                break
        else:
            raise LookupError(f"there is no {name}")
    lines = (line.strip() for line in text.splitlines()[first - 1 : last])
    kept = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


@cache
def parsed(module: str) -> tuple[str, ast.Module]:
    """The text of a module, and its tree.

    Raises:
        ImportError: there is no such module.
        OSError: the module's source is not available.
    """
    library, *rest = module.split(".")
    spec = find_spec(library)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                return text, ast.parse(text)
    raise ImportError(f"there is no module {module}")
