"""The settings that apply in this process, and the source of each value.

Environment variables have precedence over the file (the "smddp" section, or :func:`configure`), and
the file over the defaults. The sections of several engines are one: each adds its keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed_smddp.config import parsing
from deepspeed_smddp.config.fields import PREFIX, nearest, settings_of, show
from deepspeed_smddp.config.schema import (
    DEBUG,
    VARIABLES,
    DebugSettings,
    ProcessSettings,
    SmddpConfig,
)
from deepspeed_smddp.errors import SmddpConfigError, warn_once

DEFAULT = "default"
DS_CONFIG = "ds_config"
CONFIGURE = "configure()"
ZERO_BUCKET = "zero_optimization.allgather_bucket_size"
BUCKETS = ("allgather_bucket_size", "reduce_scatter_bucket_size")
_OF_ONE_ENGINE = {one.path for one in settings_of(SmddpConfig) if one.field.of_engine}


@dataclass(frozen=True)
class Settings:
    """The resolved section, and the source of each of its keys (dotted path)."""

    section: SmddpConfig
    sources: Mapping[str, str]
    process: ProcessSettings
    debug: DebugSettings
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
            "coding": section.coding,
            "fallback": section.fallback,
            "max_sms": min(max(section.max_sms, 1), 1024),  # no GPU has as many
            "reduce_on_cpu": section.reduce_on == "cpu",
            "check_first_use": self.debug.check_first_use,
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


@dataclass(frozen=True)
class _File:
    """What sections have given: by dotted path the value and its source."""

    given: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    zero_allgather_elements: int = 0
    job: int = 0  # whose sections these are


_file = _File()
_jobs = 0  # the default groups that this process has made
_measured: Mapping[str, int] = {}
_applied: Settings | None = None
_followers: list[Callable[[Settings], None]] = []


def resolve(
    section: SmddpConfig | None = None, source: str = DS_CONFIG, zero_allgather_elements: int = 0
) -> Settings:
    """The settings from the section and the environment, which has precedence.

    Raises:
        SmddpConfigError: an environment variable holds a value that its key may not hold.
    """
    return _resolved(_file_of(section or SmddpConfig(), source, zero_allgather_elements))


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
    """
    if isinstance(section, SmddpConfig):
        section = parsing.nested(parsing.given_keys(section))
    if keys and isinstance(section, Mapping):
        section = {**section, **keys}
    return set_file(parsing.parse_section(keys if section is None else section), CONFIGURE)


def set_file(
    section: SmddpConfig, source: str = DS_CONFIG, zero_allgather_elements: int = 0
) -> Settings:
    """Makes a validated section the one of this process."""
    return _apply_file(_file_of(section, source, zero_allgather_elements))


def merge_file(section: SmddpConfig, zero_allgather_elements: int = 0) -> Settings:
    """Adds the section of an engine's DeepSpeed config to what applies in this process.

    What says how an earlier engine was built (its degrees, its offloading) does not pass to this
    one. Sections of a job whose default group was destroyed no longer count. Of several
    bucket sizes, also of ``zero_optimization.allgather_bucket_size``, the smallest applies.

    Raises:
        SmddpConfigError: a key has another value in an earlier section or in ``configure()``.
    """
    added = _file_of(section, DS_CONFIG, zero_allgather_elements)
    same_job = _file.job == added.job
    given = dict(added.given)
    for key, (value, source) in _file.given.items():
        if source != CONFIGURE and (key in _OF_ONE_ENGINE or not same_job):
            continue
        if key in added.given:
            if key in _OF_ONE_ENGINE:
                continue
            asked, name = added.given[key][0], f"{parsing.SECTION}.{key}"
            if key in BUCKETS:
                if value == "auto" or (asked != "auto" and asked < value):
                    continue
            elif asked != value:
                by_call = source == CONFIGURE
                earlier = f'"{key}" of {CONFIGURE}' if by_call else f'"{name}" of an earlier one'
                raise SmddpConfigError(
                    f'"{name}" of the DeepSpeed config is {show(asked)}, but {earlier} is '
                    f"{show(value)}; all engines of a process share these settings: give both the "
                    "same value, or leave out one"
                )
        given[key] = (value, source)
    before = _file.zero_allgather_elements if same_job else 0
    bounds = [n for n in (before, zero_allgather_elements) if n]
    return _apply_file(_File(given, min(bounds, default=0), added.job))


def begin_job() -> None:
    """A default group is made: the sections that were given for an earlier one may be replaced."""
    global _jobs
    _jobs += 1


def set_measured(values: Mapping[str, int]) -> Settings:
    """Sets the values of "auto", by key of the section, in bytes (0: no bound)."""
    global _measured
    _measured = dict(values)
    return apply(force=current() != _applied)


def current() -> Settings:
    """The settings that apply now, or would apply if a group were made."""
    return _resolved(_file)


def apply(force: bool = False) -> Settings:
    """Tells the settings to those that follow them, once; with ``force``, again."""
    global _applied
    if _applied is not None and not force:
        return _applied
    _applied = settings = current()
    for follower in _followers:
        follower(settings)
    _warn_of_variables()
    return settings


def follow(follower: Callable[[Settings], None]) -> None:
    """Calls ``follower`` with the settings that apply, if they do, and whenever others do."""
    if follower not in _followers:
        _followers.append(follower)
        if _applied is not None:
            follower(_applied)


def _file_of(section: SmddpConfig, source: str, zero_allgather_elements: int) -> _File:
    given = {key: (value, source) for key, value in parsing.given_keys(section).items()}
    job = _jobs if dist.is_initialized() else _jobs + 1
    return _File(given, zero_allgather_elements, job)


def _resolved(file: _File) -> Settings:
    variables, process = parsing.parse_variables(os.environ)
    given = {**file.given, **{key: (of, PREFIX + key.upper()) for key, of in variables.items()}}
    return Settings(
        SmddpConfig(**parsing.nested({key: value for key, (value, _) in given.items()})),
        {key: source for key, (_, source) in given.items()},
        process,
        parsing.parse_debug(os.environ.get(DEBUG, "")),
        file.zero_allgather_elements,
        _measured,
    )


def _apply_file(file: _File) -> Settings:
    global _file
    settings = _resolved(file)  # raises before anything changes
    _file = file
    return apply(force=settings != _applied)


def _warn_of_variables() -> None:
    """Warns once of each environment variable with the prefix ``SMDDP_`` that nothing reads."""
    known = [*VARIABLES, DEBUG]
    for name in sorted(os.environ):
        if not name.startswith(PREFIX) or name in known:
            continue
        if instead := parsing.RETIRED_VARIABLES.get(name):
            warn_once(name, f"smddp: {name} has no effect any more: {instead}")
            continue
        guess = nearest(name[len(PREFIX) :], [word[len(PREFIX) :].lower() for word in known])
        hint = f"; did you mean {PREFIX}{guess.upper()}?" if guess else ""
        warn_once(name, f"smddp: the environment variable {name} is not known{hint}")
