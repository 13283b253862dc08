"""``torch.sagemaker.grad_norm``; served by deepspeed-smddp."""

from deepspeed_smddp.compat.sagemaker import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
