"""A network learns on two workers of Ray Train."""

import sys

import torch
from ray.train import ScalingConfig, report
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn


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


def train_loop_per_worker(config):
    model = prepare_model(Net(config["width"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.0)
    loader = prepare_data_loader(torch.utils.data.DataLoader(Waves(), batch_size=16, shuffle=True))
    for batch in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
    report({"loss": loss.item()})


if __name__ == "__main__":
    scaling = ScalingConfig(num_workers=1 if "--local" in sys.argv else 2)
    TorchTrainer(train_loop_per_worker, train_loop_config={"width": 32, "lr": 1e-2}, scaling_config=scaling).fit()
