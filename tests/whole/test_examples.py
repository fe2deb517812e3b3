"""The examples: their parts, and a short run of each on four processes."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_mesh_is_as_square_as_it_can_be() -> None:
    from common import square_mesh

    assert [square_mesh(devices) for devices in (1, 2, 4, 6, 7, 12)] == [
        (1, 1),
        (1, 2),
        (2, 2),
        (2, 3),
        (1, 7),
        (3, 4),
    ]


def test_curves_are_compared_relatively() -> None:
    from common import TOLERANCE, largest_difference

    assert largest_difference([2.0, 1.0], [2.0, 1.0]) == 0
    assert largest_difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert math.isnan(largest_difference([math.nan], [1.0]))
    # What the examples ask: a curve that became NaN is not the same curve.
    assert not largest_difference([1.0, math.nan], [1.0, 1.0]) <= TOLERANCE


def test_a_long_curve_is_thinned_with_both_ends() -> None:
    from common import curve_table

    curve = [float(60 - step) for step in range(60)]
    table = curve_table(curve, curve, rows=5)
    assert list(table.columns[0].cells) == ["0", "15", "30", "44", "59"]


def test_batches_follow_from_the_step_alone() -> None:
    import train_gpt
    import train_unet

    text = train_gpt.corpus()
    digits = train_unet.images()
    assert len(text) > 1_000_000
    assert digits.shape[1:] == (1, 16, 16) and digits.abs().max() <= 1
    for first, repeated, other in (
        tuple(train_gpt.batches(text, step) for step in (3, 3, 4)),
        tuple(train_unet.batches(digits, step) for step in (3, 3, 4)),
    ):
        assert all(torch.equal(first[name], repeated[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_unet_keeps_shapes_and_uses_every_parameter() -> None:
    from unet import UNet

    model = UNet(channels=1, width=8, levels=3, groups=4)
    images = torch.randn(2, 1, 16, 16)
    assert model(images).shape == images.shape
    model(images, images).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.distributed
@pytest.mark.parametrize("script", ["train_gpt.py", "train_unet.py"])
def test_four_processes_train_as_one(script: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *(str(EXAMPLES / script), "--steps", "3"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same curve" in done.stdout and "NOT" not in done.stdout


@pytest.mark.distributed
def test_trainer_trains_on_two_processes() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            str(EXAMPLES / "trainer.py"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (loss,) = re.findall(r"evaluation: ([\d.]+)", done.stdout)
    assert float(loss) < 4.0


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_training_goes_on_after_a_kill_and_on_fewer_processes(tmp_path: Path) -> None:
    """Steps 0 to 11 on four processes, one of which is killed in between, and the rest on two: the curve of one process."""
    from elastic import build, loss_of

    model, curve = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(16):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    found: dict[int, list[tuple[int, float]]] = {}
    for ranks, steps in ((4, "12"), (2, "16")):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
                *("--max-restarts", "1", str(EXAMPLES / "elastic.py"), str(tmp_path), "--steps", steps, "--kill-at", "7"),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for step, on, loss in re.findall(r"step (\d+) on (\d) processes: ([\d.]+)", done.stdout):
            found.setdefault(int(step), []).append((int(on), float(loss)))
    assert [on for on, _ in found[5]] == [
        4,
        4,
    ] and [on for on, _ in found[11]] == [4, 2]
    assert sorted(found) == list(range(16))
    for step, losses in found.items():
        assert all(loss == pytest.approx(curve[step], rel=1e-9) for _, loss in losses), step


def test_without_torchrun_the_message_says_how_to_start() -> None:
    launched = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_unet.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={n: v for n, v in os.environ.items() if n not in launched} | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode != 0
    assert "torchrun --standalone --nproc-per-node 4" in done.stderr
