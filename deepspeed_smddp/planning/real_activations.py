"""What a layer of a transformers model keeps for its backward pass, counted by autograd itself.

The model is built from its config with two and with three layers, under ``FakeTensorMode``: no
memory and no weights. The difference of what ``saved_tensors_hooks`` sees is one layer's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepspeed_smddp.planning.model_shape import config_file


def of_text(model: str, sequence: int) -> float:
    """Bytes per token of one layer of the config that this names; 0 if none can be counted."""
    path = None if "=" in model else config_file(model)
    if path is None:
        return 0.0
    return layer_bytes(json.loads(path.read_text(encoding="utf-8")), sequence) or 0.0


def layer_bytes(config: Mapping[str, Any], sequence: int) -> float | None:
    """Bytes per token of one layer, in bf16 with torch's own attention.

    None where transformers is missing, does not know the model, or can't run it without data (a
    router that sorts tokens): then the formulas count.
    """
    try:
        import transformers

        cls = transformers.CONFIG_MAPPING[config["model_type"]]
        depths = []
        for layers in (2, 3):
            # Without a cache transformers makes a mask, which no kernel for GPUs needs.
            made = cls.from_dict({**config, "use_cache": True})
            made.num_hidden_layers = layers
            if getattr(made, "layer_types", None):
                made.layer_types = made.layer_types[:1] * layers
            depths.append(_saved(made, sequence))
    except Exception:  # whatever the code of a model raises
        return None
    return (depths[1] - depths[0]) / sequence


def _saved(config: Any, sequence: int) -> int:
    """Bytes that the forward pass of a whole model saves, without its parameters."""
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
        return tensor

    with FakeTensorMode(), torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        tokens = torch.zeros((1, sequence), dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.train()(input_ids=tokens, labels=tokens)
    return sum(storage.nbytes() for key, storage in found.items() if key not in own)
