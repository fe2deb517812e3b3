"""What the strategy of Lightning refuses; that it trains as one process does is in ``tests/whole/test_torchrun.py``."""

import lightning
import pytest
import torch
from torch import nn

import autotp
from autotp.integrations.lightning import AutotpStrategy


class Plain(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(2, 2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_a_precision_is_refused(precision):
    with pytest.raises(autotp.AutotpError, match=f"{precision}.*pass precision= to autotp.parallelize"):
        lightning.Trainer(strategy=AutotpStrategy(), accelerator="cpu", devices=2, precision=precision, logger=False)


def test_a_module_that_was_not_distributed_is_refused():
    with pytest.raises(autotp.AutotpError, match="Plain has no distributed module: override its hook configure_model"):
        AutotpStrategy()._setup_model(Plain())


def test_a_trainer_of_the_strategy_deals_out_no_rows():
    trainer = lightning.Trainer(strategy=AutotpStrategy(), accelerator="cpu", devices=2, use_distributed_sampler=True)
    loader = torch.utils.data.DataLoader(torch.arange(4))
    assert not trainer._data_connector._requires_distributed_sampler(loader)
