"""transformers' Trainer, all arguments from the command line: ``trainer.py MODEL ARGUMENTS``.

With ``lora`` after the model, peft's adapters are trained and the model is frozen.
"""

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

parser = HfArgumentParser(TrainingArguments)
arguments, (folder, *lora) = parser.parse_args_into_dataclasses(return_remaining_strings=True)


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


class Telling(Trainer):
    def compute_loss(self, *given, **named):
        loss = super().compute_loss(*given, **named)
        print({"rank": self.args.process_index, "loss": loss.item()}, flush=True)
        return loss


model = AutoModelForCausalLM.from_pretrained(folder)
if lora:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
Telling(model=model, args=arguments, train_dataset=Counting()).train()
