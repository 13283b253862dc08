"""Lightning's DeepSpeed strategy: ``lightning_module.py MODEL RATE STEPS CONFIG BACKEND``.

Lightning makes the process group before DeepSpeed sees the config, so that it is told the backend
as well. It starts the other ranks itself.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from transformers import AutoModelForCausalLM

folder, rate, steps, config, backend = sys.argv[1:]


class Processors(CUDAAccelerator):
    """The strategy accepts no other accelerator than that of GPUs."""

    def setup_device(self, device):
        pass

    def setup(self, trainer):
        pass

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def is_available():
        return True


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def training_step(self, tokens):
        loss = self.model(input_ids=tokens, labels=tokens).loss
        print({"rank": self.global_rank, "loss": loss.item()}, flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=float(rate))


Trainer(
    accelerator=Processors(),
    devices=2,
    strategy=DeepSpeedStrategy(config=config, process_group_backend=backend),
    max_steps=int(steps),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(Module(), torch.utils.data.DataLoader([torch.arange(16) + n for n in range(32)], 2))
