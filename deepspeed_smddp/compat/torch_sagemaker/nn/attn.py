"""``torch.sagemaker.nn.attn``: refused; served by deepspeed-smddp."""

from deepspeed_smddp.compat import refusing

__getattr__ = refusing(
    __name__, {}, "use torch's own attention, torch.nn.functional.scaled_dot_product_attention"
)
