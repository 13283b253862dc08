"""``torch.sagemaker.delayed_param``: refused; served by deepspeed-smddp."""

from deepspeed_smddp.compat import refusing

__getattr__ = refusing(
    __name__,
    {
        "DelayedParamIniter": "build the model on the meta device, fully_shard it, then "
        "model.to_empty(device=...) and set its values, as torch's FSDP2 does"
    },
)
