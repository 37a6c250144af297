"""A model, a loss and a dataset of your own.  Nothing here knows how many workers there are."""

import torch
from torch import nn


class Net(nn.Sequential):
    def init_weights(self):  # sets every parameter: the model is built without values
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)


def build(width):  # gets model_args
    return Net(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def loss(model, batch):  # a sum, and the number of terms in it: never a mean
    errors = model(batch["x"]) - batch["y"]
    return errors.square().sum(), torch.tensor(errors.numel())


class Waves:
    def __len__(self):
        return 4096

    def read(self, ids):  # the samples with these numbers, always the same
        x = torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in ids])
        return {"x": x, "y": x.sin().sum(1, keepdim=True)}

    def fingerprint(self):  # changes when any sample changes
        return "waves-1"
