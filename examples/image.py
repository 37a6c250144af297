"""A small convolutional network learns ten kinds of stripes: a model of images, with BatchNorm, and its accuracy on images kept aside."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, SIZE = 10, 16


class Net(nn.Sequential):
    def __init__(self, width):
        layers = []
        for before, after, stride in ((3, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))

    def init_weights(self):
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # torch's usual values, and the statistics of a norm


def loss(model, batch):
    """Returns the cross-entropy; in a validation the number of wrong answers, so that the validation loss is 1 - accuracy."""
    logits, labels = model(batch["image"]), batch["label"]
    if not model.training:
        return (logits.argmax(1) != labels).sum().float(), torch.tensor(len(labels))
    return F.cross_entropy(logits, labels, reduction="sum"), torch.tensor(len(labels))


class Stripes:
    """Images of noisy stripes, [3, 16, 16]; the label is their direction.  All else is drawn from the number of an image."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def read(self, ids):
        images, labels = zip(*(self.one(self.first + i) for i in ids), strict=True)
        return {"image": torch.stack(images), "label": torch.tensor(labels)}

    def one(self, number):
        chance = torch.Generator().manual_seed(number)
        label, (phase, *colour) = number % CLASSES, torch.rand(4, generator=chance).tolist()
        angle, at = math.pi * label / CLASSES, torch.arange(SIZE)
        stripes = torch.sin(at[:, None] * math.sin(angle) + at * math.cos(angle) + 2 * math.pi * phase)
        noise = torch.randn(3, SIZE, SIZE, generator=chance)
        return stripes * torch.tensor(colour)[:, None, None] + 0.3 * noise, label

    def fingerprint(self):
        return f"stripes-{self.first}-{self.count}"
