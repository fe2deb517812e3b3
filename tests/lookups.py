"""A language model whose vocabulary is sharded, and tensors with one element changed."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 32


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS, bias=False)

    def forward(self, ids, labels):
        return F.cross_entropy(self.out(self.table(ids)).flatten(0, 1), labels.flatten())


#: Pins that shard the vocabulary over one axis; tokens may be sharded over another.
SHARDED = ["embedding=v@y", "linear=n@y", "cross_entropy_loss=v@y"]


def changed(tensor, value):
    return torch.cat([tensor.flatten()[:-1], torch.tensor([value])]).view_as(tensor)
