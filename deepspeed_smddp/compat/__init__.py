"""The import names of a closed library, for scripts that were written for it.

``smdistributed`` and ``torch.sagemaker`` lead here if no package of that name is installed. The
adapters are thin: data-parallel names lead to the backend, ``smdistributed.modelparallel`` to
DeepSpeed with ``sharded_data_parallel_degree``, ``torch.sagemaker`` to torch's FSDP. A call that
they do not support raises :class:`Unsupported`, which names a replacement. See ``docs/compat.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["Unsupported"]


class Unsupported(NotImplementedError):
    """The adapter does not support this; one sentence names a replacement."""


def refuse(what: str, instead: str) -> NoReturn:
    """Raises :class:`Unsupported`."""
    raise Unsupported(f"deepspeed-smddp has no {what}: {instead}")


def refusing(
    module: str, instead: Mapping[str, str], otherwise: str | None = None
) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that refuses the names in ``instead``.

    Args:
        module: the module's name, for the sentence.
        instead: the replacement for each name.
        otherwise: the replacement for all other names; None: other names raise AttributeError.
    """

    def getattribute(name: str) -> Any:
        sentence = instead.get(name, otherwise)
        if sentence is None or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        refuse(f"{module}.{name}", sentence)

    return getattribute
