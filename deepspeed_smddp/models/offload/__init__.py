"""Activation offloading: keeps in host memory what layers save for the backward pass.

``offload_activations(model, horizon=2)``, or ``"activation_offload": {"enabled": true}`` in the
"smddp" section of a DeepSpeed config. See docs/larger-models.md.
"""

from __future__ import annotations

from deepspeed_smddp.models.offload.model import Offload, offload_activations
from deepspeed_smddp.models.offload.window import Statistics

__all__ = ["Offload", "Statistics", "offload_activations"]
