"""``import torch.sagemaker as tsm``; served by deepspeed-smddp, see ``deepspeed_smddp.compat``."""

from deepspeed_smddp.compat import refusing
from deepspeed_smddp.compat.sagemaker import init, is_initialized, state, transform

__all__ = ["init", "is_initialized", "state", "transform"]
__version__ = "2.8.0+deepspeed.smddp"

_TORCH = "use torch's own attention, torch.nn.functional.scaled_dot_product_attention"
__getattr__ = refusing(
    __name__,
    {
        "nn": _TORCH,
        "moe": "use DeepSpeed's MoE layer (deepspeed.moe.layer.MoE) over smddp",
        "context_parallel": "use DeepSpeed's Ulysses (deepspeed.sequence) over smddp",
    },
)
