"""ZeRO-3's parameters gathered by the extension point that a DeepSpeed may have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness import zero


def gather(job: dict[str, Any]) -> dict[str, Any]:
    """What the extension point got, whether it gathers what was divided, and what is wrapped.

    ``job["known"]`` is False for a DeepSpeed whose functions are all different ones.
    """
    import deepspeed

    from deepspeed_smddp.deepspeed import gather as ours
    from deepspeed_smddp.upstream import source
    from deepspeed_smddp.upstream.wrapping import is_wrapped

    if not job["known"]:
        for places in source.READ.values():
            places.update({place: {} for place in places})
    given: list[Any] = []

    def set_parameter_gatherer(gatherer: Any) -> None:
        given.append(gatherer)

    deepspeed.zero.set_parameter_gatherer = set_parameter_gatherer
    settings = zero.config(job["backend"], {"stage": 3})
    wanted = [parameter.detach().clone() for parameter in zero.blocks().parameters()]
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = zero.blocks()
    params = list(model.parameters())
    released = [param.numel() for param in params]
    handle = given[0](params, [param.ds_tensor for param in params], None)
    handle.of(params[-1]).wait()
    handle.wait()
    same = all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))
    quantized = params[0].ds_tensor
    quantized.ds_quant_scale = 1.0
    answer = {
        "ours": [g is ours.gather for g in given],
        "released": released,
        "same": same,
        "refused": given[0](params[:1], [quantized], None) is None,
        "wrapped": is_wrapped(deepspeed.zero.Init._allgather_params_coalesced),
    }
    dist.destroy_process_group()
    return answer
