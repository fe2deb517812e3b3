"""A small model in a file, as the command line takes it."""

import pytest

PERCEPTRON = """
import torch
from torch import nn


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def build():
    torch.manual_seed(0)
    return Perceptron(), (torch.randn(8, 16),)
"""


@pytest.fixture
def perceptron(tmp_path):
    """Writes a model of two linear layers to the test's folder; returns its ``--model`` argument."""
    (tmp_path / "perceptron.py").write_text(PERCEPTRON)
    return f"{tmp_path}/perceptron.py:build"
