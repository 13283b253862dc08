"""The settings that apply in this process, and the source of each value.

Environment variables have precedence over the file (the "smddp" section, or :func:`configure`), and
the file over the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from deepspeed_smddp.config.config import (
    SmddpConfig,
    nearest,
    nested,
    parse_section,
    parse_variable,
    set_keys,
)
from deepspeed_smddp.config.variables import PREFIX, VARIABLES
from deepspeed_smddp.distributed import extension
from deepspeed_smddp.errors import logger

DEFAULT = "default"
DS_CONFIG = "ds_config"
ZERO_BUCKET = "zero_optimization.allgather_bucket_size"

# Keys of features that do not exist yet: which values ask for it, and what happens instead.
_LATER: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hierarchical_allgather": (
        lambda hierarchical: not hierarchical,
        "AllGather between hosts always runs along the rails and then inside each host",
    ),
}


@dataclass(frozen=True)
class Settings:
    """The resolved section, and the source of each of its keys (dotted path)."""

    section: SmddpConfig
    sources: Mapping[str, str]
    zero_allgather_elements: int = 0  # zero_optimization.allgather_bucket_size; 0: not set
    measured: Mapping[str, int] = field(default_factory=dict)  # value of "auto"; 0: no bound

    def source(self, key: str) -> str:
        """``default``, ``ds_config``, ``configure()`` or the name of an environment variable."""
        return self.sources.get(key, DEFAULT)

    def timeout(self, asked: timedelta | None) -> timedelta:
        """The deadline of a group's operations: ``timeout_seconds`` if it was set, else ``asked``.

        ``asked`` is None if no caller asked for a timeout: then the key's default applies.
        """
        if self.source("timeout_seconds") == DEFAULT and asked is not None:
            return asked
        return timedelta(seconds=self.section.timeout_seconds)

    def exceeds_allgather(self, size: int, elements: int) -> bool:
        """Whether an AllGather with an output of this size exceeds a bound in bytes or elements."""
        bucket = self._bytes("allgather_bucket_size")
        return 0 < bucket < size or 0 < self.zero_allgather_elements < elements

    def core_options(self) -> dict[str, Any]:
        """Keyword arguments of ``_C.configure``; the smaller of two bounds on AllGather applies."""
        section = self.section
        return {
            "allgather_bucket_bytes": self._bytes("allgather_bucket_size"),
            "allgather_bucket_elements": self.zero_allgather_elements,
            "reduce_scatter_bucket_bytes": self._bytes("reduce_scatter_bucket_size"),
            "reduce_precision_fp32": section.reduce_precision == "fp32",
            "fallback": section.fallback,
            "max_sms": min(max(section.max_sms, 1), 1024),  # no GPU has as many
            "reduce_on_cpu": section.reduce_on == "cpu",
            "check_first_use": section.check_first_use,
            "silence_seconds": section.silence_seconds,
            "routes": {
                name: list(steps)
                for name, steps in section.routes
                if any(path != "smddp" for _, path in steps)
            },
        }

    def _bytes(self, key: str) -> int:
        bucket = getattr(self.section, key)
        return bucket if isinstance(bucket, int) else self.measured.get(key, 0)


_measured: Mapping[str, int] = {}
_file: tuple[SmddpConfig, str, int] = (SmddpConfig(), DS_CONFIG, 0)
_applied: Settings | None = None
_warned: set[str] = set()
_followers: list[Callable[[Settings], None]] = []


def resolve(
    section: SmddpConfig | None = None, source: str = DS_CONFIG, zero_allgather_elements: int = 0
) -> Settings:
    """The settings from the section and the environment, which has precedence.

    Raises:
        SmddpConfigError: an environment variable holds a value that its key may not hold.
    """
    values = {} if section is None else set_keys(section)
    sources = dict.fromkeys(values, source)
    for variable in VARIABLES:
        text = os.environ.get(variable.environment_name, "")
        if variable.key is not None and text:
            values[variable.key] = parse_variable(variable, text)
            sources[variable.key] = variable.environment_name
    return Settings(parse_section(nested(values)), sources, zero_allgather_elements, _measured)


def configure(section: SmddpConfig | Mapping[str, Any] | None = None, /, **keys: Any) -> Settings:
    """Sets keys of the "smddp" section from Python, for programs without a DeepSpeed config.

    It replaces the section of an earlier call or of a DeepSpeed config, and applies to operations
    that start afterwards, in every group of the process; ``timeout_seconds``,
    ``silence_seconds`` and ``routes`` apply to groups made afterwards. Environment variables still
    have precedence::

        deepspeed_smddp.configure(fallback="error", allgather_bucket_size=64 << 20)

    Args:
        section: the whole section, as a mapping or a model; what ``keys`` name has precedence over
            a mapping.
        keys: single keys of the section; without a section, the others get their defaults.

    Returns:
        The settings that apply now, with the source of each.

    Raises:
        SmddpConfigError: an unknown key or a wrong value.
        ImportError: the extension is missing or was built for another torch.
    """
    if isinstance(section, SmddpConfig):
        section = nested(set_keys(section))
    if keys and isinstance(section, Mapping):
        section = {**section, **keys}
    return set_file(parse_section(keys if section is None else section), "configure()")


def set_file(
    section: SmddpConfig, source: str = DS_CONFIG, zero_allgather_elements: int = 0
) -> Settings:
    """Makes a validated section the one of this process and passes it to the core."""
    global _file
    settings = resolve(section, source, zero_allgather_elements)  # raises before anything changes
    _file = (section, source, zero_allgather_elements)
    return apply(force=settings != _applied)


def set_measured(values: Mapping[str, int]) -> Settings:
    """Sets the values of "auto", by key of the section, in bytes (0: no bound)."""
    global _measured
    _measured = dict(values)
    return apply(force=current() != _applied)


def current() -> Settings:
    """The settings that apply now, or would apply if a group were made."""
    return resolve(*_file)


def apply(force: bool = False) -> Settings:
    """Passes the settings to the core once; with ``force``, again."""
    global _applied
    if _applied is not None and not force:
        return _applied
    settings = current()
    extension.load()
    from deepspeed_smddp import _C

    _C.configure(**settings.core_options())
    _applied = settings
    for follower in _followers:
        follower(settings)
    warn_of_later_keys(settings)
    warn_of_unknown_variables()
    return settings


def follow(follower: Callable[[Settings], None]) -> None:
    """Calls ``follower`` with the settings whenever they are passed to the core."""
    if follower not in _followers:
        _followers.append(follower)


def warn_of_later_keys(settings: Settings) -> None:
    """Warns once of each key that was set but has no effect in this version."""
    for key, source in settings.sources.items():
        if key not in _LATER:
            continue
        asks, consequence = _LATER[key]
        value: Any = settings.section
        for part in key.split("."):
            value = getattr(value, part)
        if asks(value):
            warn_once(key, f"smddp: {key} ({source}) has no effect in this version: {consequence}")


def warn_of_unknown_variables() -> None:
    """Warns once of each environment variable with the prefix ``SMDDP_`` that nothing reads."""
    known = [variable.name for variable in VARIABLES]
    for name in sorted(os.environ):
        if not name.startswith(PREFIX) or name[len(PREFIX) :] in known:
            continue
        guess = nearest(name[len(PREFIX) :].lower(), [word.lower() for word in known])
        hint = f"; did you mean {PREFIX}{guess.upper()}?" if guess else ""
        warn_once(name, f"smddp: the environment variable {name} is not known{hint}")


def warn_once(key: str, message: str) -> None:
    """Logs a warning on rank 0, at the first call with this key."""
    if key not in _warned and os.environ.get("RANK", "0") == "0":
        logger.warning(message)
    _warned.add(key)
