"""``torch.sagemaker.delayed_param``: refused; served by deepspeed-smddp."""

import deepspeed_smddp
from deepspeed_smddp.compat import refusing

if hasattr(deepspeed_smddp, "delayed_init"):
    _INSTEAD = (
        "build the model by deepspeed_smddp.delayed_init(lambda: ...), shard it with fully_shard, "
        "then call deepspeed_smddp.materialize(model)"
    )
else:
    _INSTEAD = (
        "build the model on the meta device, shard it with fully_shard, then "
        "model.to_empty(device=...) and set its values"
    )
__getattr__ = refusing(__name__, {"DelayedParamIniter": _INSTEAD})
