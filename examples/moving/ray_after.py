"""A network learns on two workers of Elastic."""

import sys

import torch
from torch import nn

from elastic import Job, launch


class Net(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.init_weights()

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)


class Waves(torch.utils.data.Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x.sin().sum(0, keepdim=True)}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), torch.tensor(batch["y"].numel())


if __name__ == "__main__":
    given = {"model": Net, "model_args": {"width": 32}, "loss": loss, "data": {"dataset": Waves}, "workers": {"max": 2}}
    usual = {"optim": {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0, "clip_norm": 1e9}, "schedule": {"kind": "constant"}}
    launch(Job(name="waves", bucket="moved", steps=64, global_batch=32, microbatch=4, **given, **usual), local="--local" in sys.argv)
