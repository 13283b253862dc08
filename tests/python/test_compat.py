"""Scripts written for the closed library run unchanged, with the results of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deepspeed_smddp
import ranks
from deepspeed_smddp.compat import Unsupported, modelparallel, parameters
from deepspeed_smddp.compat.modelparallel import state
from deepspeed_smddp.compat.parameters import ModelParallelParameters, SageMakerParameters
from deepspeed_smddp.errors import SmddpConfigError
from harness.training import Trainer

pytestmark = [
    pytest.mark.timeout(400, method="signal"),  # DeepSpeed may compile an operation first
]

PARAMETERS = "SM_HP_MP_PARAMETERS"


class Scripts:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.alone = self.run("alone", "A")["losses"]

    def run(self, script: str, layout: str = "AA", **env: str) -> dict[str, Any]:
        """Rank 0's answer; all ranks have the same losses."""
        answers = self._trainer.call(
            "harness.scripts:run", layout, "smddp", limit=300, script=script, env=env
        )
        assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
        assert answers[0]["backend"] in ("smddp", None)
        return answers[0]

    def failure(self, script: str, **env: str) -> str:
        answers = self._trainer.call(
            "harness.scripts:run", "AA", "smddp", script=script, env=env, fails=True
        )
        return answers[0]["raised"] or "nothing"


@pytest.fixture(scope="module")
def scripts(trainer: Trainer) -> Scripts:
    return Scripts(trainer)


def carried(answer: dict[str, Any], collective: str) -> int:
    """Bytes that smddp itself moved."""
    rows = [row for row in answer["statistics"] if row["collective"] == collective]
    return sum(row["bytes"] for row in rows if not row["path"].startswith("fallback"))


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_ddp(scripts: Scripts, layout: str) -> None:
    answer = scripts.run("smddp_ddp", layout)
    assert answer["losses"] == pytest.approx(scripts.alone, rel=1e-5)
    assert carried(answer, "all_reduce") > 0


def test_deepspeed(scripts: Scripts) -> None:
    answer = scripts.run("smddp_deepspeed")
    assert answer["losses"] == pytest.approx(scripts.alone, rel=1e-5)
    assert carried(answer, "all_gather") > 0


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"microbatches": 2, "shard_optimizer_state": True},
        {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0},
    ],
)
def test_smp_step(scripts: Scripts, given: dict[str, Any]) -> None:
    given = {"ddp": True, "sdp_reduce_bucket_size": 20_000, **given}
    answer = scripts.run("smp_step", **{PARAMETERS: json.dumps(given)})
    assert answer["losses"] == pytest.approx(scripts.alone, rel=1e-5)


def test_smp_gpt2_sharded(scripts: Scripts, tmp_path: Path) -> None:
    given = {
        "sharded_data_parallel_degree": 2,
        "sdp_reduce_bucket_size": 20_000,
        "sdp_param_persistence_threshold": 100,
        "offload_activations": True,
    }
    env = {PARAMETERS: json.dumps(given), "CHECKPOINT_DIR": str(tmp_path)}
    answer = scripts.run("smp_gpt2_sharded", "AABB", **env)
    assert carried(answer, "all_gather") > 0 and carried(answer, "reduce_scatter") > 0
    alone = scripts.run("alone_gpt2", "A")["losses"]
    assert answer["losses"] == pytest.approx(alone, rel=1e-5)
    kept = {path.name for path in tmp_path.iterdir() if path.suffix != ".py"}
    assert kept == {"total_steps3", "total_steps4", "fullmodel.pt", "latest"}


@pytest.mark.parametrize(
    ("layout", "degree", "strategy", "within"),
    [
        ("AA", 0, "FULL_SHARD", 2),
        ("AA", 1, "NO_SHARD", 2),
        ("AA", 2, "FULL_SHARD", 2),
        ("AABB", 2, "HYBRID_SHARD", 2),
    ],
)
def test_sagemaker_fsdp(
    scripts: Scripts, tmp_path: Path, layout: str, degree: int, strategy: str, within: int
) -> None:
    path = tmp_path / "smp_config.json"
    path.write_text(json.dumps({"hybrid_shard_degree": degree, "activation_loading_horizon": 2}))
    answer = scripts.run("sagemaker_fsdp", layout, SMP_CONFIG=str(path))
    assert answer["losses"] == pytest.approx(scripts.alone, rel=1e-5)
    assert answer["found"] == {
        "strategy": strategy,
        "sharded_within": within,
        "degree": degree,
        "initialized": True,
    }


def test_sagemaker_offload(scripts: Scripts) -> None:
    asked = json.dumps({"sm_activation_offloading": True, "activation_loading_horizon": 2})
    losses = scripts.run("sagemaker_offload", **{PARAMETERS: asked})["losses"]
    assert losses == pytest.approx(scripts.alone, rel=1e-5)
    native = '{"sm_activation_offloading": false}'
    losses = scripts.run("sagemaker_offload", **{PARAMETERS: native})["losses"]
    assert losses == pytest.approx(scripts.alone, rel=1e-5)


def test_sagemaker_tensor_parallelism(scripts: Scripts) -> None:
    asked = {PARAMETERS: json.dumps({"tensor_parallel_degree": 2})}
    alone = scripts.run("alone_llama", "A")["losses"]
    answer = scripts.run("sagemaker_tp", "AABB", **asked)
    assert answer["losses"] == pytest.approx(alone, rel=1e-5)
    assert answer["found"] == {"tp_rank": 0, "sharded_within": 2}


def test_accelerate(scripts: Scripts) -> None:
    launcher = {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
        # accelerate expects that smddp uses GPUs.
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "ACCELERATE_BYPASS_DEVICE_MAP": "true",
    }
    answer = scripts.run("accelerate_smddp", **launcher)
    assert answer["found"] == {"type": "DistributedType.MULTI_GPU", "backend": "smddp"}
    assert answer["losses"] == pytest.approx(scripts.alone, rel=1e-5)
    assert carried(answer, "all_reduce") > 0


@pytest.mark.parametrize(
    ("kind", "given", "raised", "says"),
    [
        (ModelParallelParameters, {"pipeline_parallel_degree": 2}, Unsupported, "sharded_data"),
        (ModelParallelParameters, {"tensor_parallel_degree": 2}, Unsupported, "autotp_size"),
        (ModelParallelParameters, {"fp16": True, "bf16": True}, SmddpConfigError, "one of them"),
        (ModelParallelParameters, {"microbatche": 2}, SmddpConfigError, 'mean "microbatches"'),
        (ModelParallelParameters, {"microbatches": 0}, SmddpConfigError, '"microbatches" is 0'),
        (SageMakerParameters, {"context_parallel_degree": 2}, Unsupported, "Ulysses"),
        (SageMakerParameters, {"hybrid_shard_degree": -1}, SmddpConfigError, "is -1"),
        (SageMakerParameters, "/nowhere/smp.json", SmddpConfigError, "/nowhere/smp.json"),
    ],
)
def test_parameters_that_are_refused(
    kind: Any, given: Any, raised: type[Exception], says: str
) -> None:
    with pytest.raises(raised, match=says):
        parameters.read(kind, given)


def test_the_launchers_parameters_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARAMETERS, '{"sdp_max_live_parameters": 1e6, "bf16": true}')
    found = parameters.read(ModelParallelParameters, {"bf16": False, "microbatches": 3})
    assert found.bf16 and found.microbatches == 3 and found.sdp_max_live_parameters == 10**6
    monkeypatch.setenv(PARAMETERS, "[1]")
    with pytest.raises(SmddpConfigError, match="JSON dictionary"):
        parameters.read(ModelParallelParameters, None)


def test_defaults_become_a_deepspeed_config() -> None:
    config = ModelParallelParameters(sharded_data_parallel_degree=8, bf16=True).ds_config(4)
    assert config["smddp"]["sharded_data_parallel_degree"] == 8
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and zero["reduce_bucket_size"] == 5e8
    assert zero["stage3_max_live_parameters"] == 1e9
    assert zero["stage3_param_persistence_threshold"] == 1e6
    assert config["gradient_clipping"] == 1.0 and config["bf16"] == {"enabled": True}
    assert config["gradient_accumulation_steps"] == 4
    plain = ModelParallelParameters().ds_config(1)
    assert plain["zero_optimization"]["stage"] == 0 and plain["gradient_clipping"] == 0


def test_a_step_cuts_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(state, "cfg", ModelParallelParameters(microbatches=2))
    seen = []

    @modelparallel.step(non_split_inputs=["table"], input_split_axes={"wide": 1})
    def function(batch: Any, wide: Any, table: Any, flag: bool = False) -> Any:
        seen.append((batch["x"].tolist(), wide.shape, table.shape, flag))
        return {"sum": batch["x"].sum().float()}, batch["x"]

    x = torch.arange(4)
    sums, parts = function({"x": x}, torch.ones(3, 6), torch.ones(5), flag=True)
    assert seen == [([0, 1], (3, 3), (5,), True), ([2, 3], (3, 3), (5,), True)]
    assert sums["sum"].reduce_mean() == 3 and sums["sum"].reduce_sum() == 6
    assert torch.equal(parts.concat(), x) and parts.stack().shape == (2, 2)
    with pytest.raises(SmddpConfigError, match=r"\[3\].*does not divide"):
        function({"x": torch.arange(3)}, torch.ones(3, 6), torch.ones(5))


def test_refused_names_say_what_to_use_instead() -> None:
    program = """
    import smdistributed.dataparallel.torch.torch_smddp  # before torch
    import smdistributed.modelparallel.torch as smp
    import torch.sagemaker
    assert "deepspeed_smddp" in smdistributed.__path__[-1]
    for statement in (
        "smp.amp.GradScaler()",
        "smp.nn.DistributedLinear",
        "from torch.sagemaker.moe.moe_config import MoEConfig",
        "from torch.sagemaker.delayed_param import DelayedParamIniter",
        "from torch.sagemaker.nn.attn import FlashSelfAttention",
        "from smdistributed.dataparallel.torch import distributed",
    ):
        try:
            exec(statement)
        except NotImplementedError as error:
            print(error)
        else:
            raise SystemExit(statement)
    try:
        smp.nothing
    except AttributeError as error:
        print(error)
    """
    ended = ranks.python(program)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    wanted = [
        "fp16",
        "torch.nn",
        "moe.layer",
        "delayed_init",
        "scaled_dot",
        "torch_smddp",
        "nothing",
    ]
    for line, part in zip(said, wanted, strict=True):
        assert part in line


@pytest.mark.parametrize("with_init", [True, False])
def test_installed_packages_of_these_names_have_precedence(tmp_path: Path, with_init: bool) -> None:
    real = tmp_path / "smdistributed" / "dataparallel" / "torch"
    real.mkdir(parents=True)
    for folder in (real, real.parent, *([real.parents[1]] if with_init else [])):
        (folder / "__init__.py").write_text("")
    (real / "torch_smddp.py").write_text("print('the real one')")
    program = "import smdistributed.dataparallel.torch.torch_smddp"
    root = Path(deepspeed_smddp.__file__).parents[1]
    for path in ((tmp_path, root), (root, tmp_path)):
        if with_init and path[0] == root:
            continue  # the first directory on the path wins, as for any package
        prefix = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}; "
        ended = subprocess.run(
            [sys.executable, "-c", prefix + program], capture_output=True, text=True, timeout=60
        )
        assert ended.stdout == "the real one\n", ended.stderr
