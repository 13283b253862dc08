"""``torch.sagemaker.moe.moe_config``: refused; served by deepspeed-smddp."""

from deepspeed_smddp.compat import refusing

__getattr__ = refusing(
    __name__, {}, "use DeepSpeed's MoE layer (deepspeed.moe.layer.MoE) over smddp"
)
