"""TRL's DPOTrainer with a policy and a reference model: ``dpo.py MODEL ARGUMENTS``."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer

parser = HfArgumentParser(DPOConfig)
arguments, (folder,) = parser.parse_args_into_dataclasses(return_remaining_strings=True)


class Telling(DPOTrainer):
    def compute_loss(self, *given, **named):
        loss = super().compute_loss(*given, **named)
        print({"rank": self.args.process_index, "loss": loss.item()}, flush=True)
        return loss


def pair(first):
    numbers = range(first, first + 4)
    return {
        "prompt": " ".join(map(str, numbers)),
        "chosen": f" {first + 4} {first + 5}",
        "rejected": f" {first}" * (1 + first % 3),  # ranks have batches of different lengths
    }


Telling(
    model=AutoModelForCausalLM.from_pretrained(folder),
    ref_model=AutoModelForCausalLM.from_pretrained(folder),
    args=arguments,
    train_dataset=Dataset.from_list([pair(first) for first in range(64)]),
    processing_class=AutoTokenizer.from_pretrained(folder),
).train()
