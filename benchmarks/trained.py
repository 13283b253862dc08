"""Values of a small transformer that is trained for this, and what coding makes of them.

    python benchmarks/trained.py            # a table by kind of tensor and type
    python benchmarks/trained.py FOLDER     # also files of raw elements, FOLDER/weights.bf16, ...

A GPT-NeoX of 3.3 million parameters learns the demo's text for some hundred steps in fp32.
Gradients and activations (what the layers hand on) are those of the last step, rounded in bf16 and
fp16, as mixed precision does. Training takes about a minute on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from shared.host_set import ROOT
from steps.rank import neox
from steps.workload import Workload

from deepspeed_smddp import _C

sys.path.insert(0, str(ROOT / "examples"))
import byte_text

LOAD = Workload("trained", 4, 256, 4, 256, sequence=128, batch=4)
STEPS = 200
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def train(steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The elements of each kind in fp32, tensor after tensor, and the losses."""
    window = LOAD.sequence + 1
    text = byte_text.load(None, 4 << 20, window)
    model = neox(LOAD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(steps):
        windows = byte_text.training_batch(text, 1, step, LOAD.batch, 0, window, LOAD.batch)
        optimizer.zero_grad()
        tokens = windows[:, :-1]
        found = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(found.loss.item())
    kinds = {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "activations": [states.detach() for states in found.hidden_states],
    }
    return {kind: torch.cat([t.flatten() for t in of]) for kind, of in kinds.items()}, losses


def write(folder: Path, kinds: dict[str, torch.Tensor]) -> None:
    """Files of raw elements."""
    for kind, values in kinds.items():
        for name, dtype in TYPES.items():
            raw = values.to(dtype).view(torch.uint8).numpy()
            (folder / f"{kind}.{name}").write_bytes(raw.tobytes())


def main() -> int:
    kinds, losses = train()
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps\n")
    print("| type |", " | ".join(kinds), "|")
    print("|---|" + "---|" * len(kinds))
    for name, dtype in TYPES.items():
        ratios = [
            _C.measure_coding(values.to(dtype))["sent_bytes"] / values.to(dtype).nbytes
            for values in kinds.values()
        ]
        print(f"| {name} |", " | ".join(f"{ratio:.2f}" for ratio in ratios), "|")
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]), kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
