"""``"activation_offload"`` in the "smddp" section of a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import comm_backend
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.models.offload.model import offload_activations
from deepspeed_smddp.upstream.wrapping import Call


@contextmanager
def around_initialize(call: Call) -> Iterator[None]:
    """Puts offloading on the engine's module, if the section asks for it.

    Raises:
        SmddpConfigError: it can't be put on this module.
    """
    yield
    if not comm_backend.serves_default_group():
        return
    asked = settings.current().section.activation_offload
    if not asked.enabled:
        return
    module = call.result[0].module
    try:
        offload_activations(module, asked.horizon, directory=asked.directory or None)
    except (ValueError, NotADirectoryError) as error:
        raise SmddpConfigError(f'"smddp.activation_offload" can\'t be applied: {error}') from None
