"""A small Llama of transformers learns with Elastic."""

import sys

import torch

from elastic import Job, launch

SHAPE = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, i):
        tokens = (i * 7 + torch.arange(17) * (1 + i % 3)) % 32
        return {"input_ids": tokens, "labels": tokens}

    def read(self, ids):
        return {"tokens": torch.stack([self[i]["input_ids"] for i in ids])}

    def fingerprint(self):
        return "counting-1"


if __name__ == "__main__":
    model = {"model": "elastic.models.transformers_lm:build", "model_args": {"config": {"model_type": "llama", **SHAPE}}}
    job = Job(
        name="counting",
        bucket="moved",
        steps=40,
        global_batch=32,
        microbatch=4,
        optim={"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0},
        schedule={"kind": "constant"},
        checkpoint={"save_every": 20},
        data={"dataset": Counting},
        workers={"max": 2},
        **model,
    )
    launch(job, local="--local" in sys.argv)
