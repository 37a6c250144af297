"""A small Llama learns with the Trainer of Hugging Face."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

SHAPE = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, i):
        tokens = (i * 7 + torch.arange(17) * (1 + i % 3)) % 32
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
    args = TrainingArguments(
        output_dir="moved",
        max_steps=40,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=20,
        logging_steps=1,
        report_to="none",
        use_cpu="--local" in sys.argv,
    )
    Trainer(model, args, train_dataset=Counting()).train()
