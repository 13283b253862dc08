"""``torch.sagemaker.delayed_param``: refused; served by deepspeed-smddp."""

from deepspeed_smddp.compat import refusing

_INSTEAD = (
    "build the model by deepspeed_smddp.delayed_init(lambda: ...), shard it with fully_shard, then "
    "call deepspeed_smddp.materialize(model)"
)
__getattr__ = refusing(__name__, {"DelayedParamIniter": _INSTEAD})
