"""The import names of a closed library, for scripts that were written for it.

``smdistributed`` and ``torch.sagemaker`` lead here where no package of those names is installed.
The adapters are thin: data-parallel names lead to the backend, ``smdistributed.modelparallel`` to
DeepSpeed with ``sharded_data_parallel_degree``, ``torch.sagemaker`` to torch's FSDP. What they
can't do raises :class:`Unsupported`, which names what to use instead. See ``docs/compat.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["Unsupported"]


class Unsupported(NotImplementedError):
    """One sentence: what the adapter can't do, and what to use instead."""


def refuse(what: str, instead: str) -> NoReturn:
    """Raises :class:`Unsupported`."""
    raise Unsupported(f"deepspeed-smddp has no {what}: {instead}")


def refusing(
    module: str, instead: Mapping[str, str], otherwise: str | None = None
) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that refuses the names in ``instead``.

    Args:
        module: its name, for the sentence.
        instead: what to use in place of each name.
        otherwise: the same for every other name; None: those are unknown, as in any module.
    """

    def getattribute(name: str) -> Any:
        sentence = instead.get(name, otherwise)
        if sentence is None or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        refuse(f"{module}.{name}", sentence)

    return getattribute
