"""Checks whether ``torch.nn.init.trunc_normal_`` can be recorded under the installed torch."""

from __future__ import annotations

from functools import cache

import torch

from deepspeed_smddp.models.delayed_init.operation import View
from deepspeed_smddp.models.delayed_init.recording import TRUNC_NORMAL, Record


@cache
def refusal() -> str | None:
    """Why calls of ``trunc_normal_`` can't be recorded under this torch, or None.

    The check records a call that draws several times, between other initialisers, and compares the
    replayed values with those of ordinary calls, to the bit.
    """
    if not callable(getattr(torch.nn.init, TRUNC_NORMAL, None)):
        return f"this torch ({torch.__version__}) has no torch.nn.init.{TRUNC_NORMAL}"

    def build() -> torch.Tensor:
        tensor = torch.nn.init.normal_(torch.empty(3, 64))
        torch.nn.init.trunc_normal_(tensor[1], 0.5, 1.0, 0.4, 0.6)
        torch.nn.init.uniform_(tensor[2])
        return tensor

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        expected = build()
        record = Record()
        try:
            with record:
                recorded = View.of(build())
            torch.manual_seed(0)
            found = [recorded.within(s.memory) for s in record.replay({recorded.storage})]
        except (RuntimeError, TypeError) as error:
            return f"recording that of this torch ({torch.__version__}) failed: {error}"
    if len(found) == 1 and torch.equal(found[0], expected):
        return None
    return f"that of this torch ({torch.__version__}) draws in another way than was recorded"
