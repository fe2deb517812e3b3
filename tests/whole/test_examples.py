"""The examples: their parts, and a short run of each on four processes."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from thinned import thinned
from transformers import AutoModelForCausalLM

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
    # The condition of the examples: a curve that became NaN is not the same curve.
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


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "processes"), thinned([("train_gpt.py", 2), ("train_gpt.py", 4), ("train_unet.py", 4)], first=1)
)
def test_processes_train_as_one(script: str, processes: int) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
            *(str(EXAMPLES / script), "--steps", "3"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same curve" in done.stdout and not any(word in done.stdout for word in ("NOT", "[/]", "[cyan]"))


def on_two_processes(script: str, *arguments: str) -> str:
    """Runs an example on two processes, and returns what it prints."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(EXAMPLES / script), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exact
@pytest.mark.distributed
def test_trainer_trains_on_two_processes() -> None:
    (loss,) = re.findall(r"evaluation: ([\d.]+)", on_two_processes("trainer.py"))
    assert float(loss) < 4.0


def resumed(folder: Path, *runs: tuple) -> list[float]:
    """The losses of consecutive runs of ``resume.py``, each resuming the last; 0 processes run PyTorch alone."""
    losses: list[str] = []
    for processes, *words in runs:
        started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
        done = subprocess.run(
            [sys.executable, *started, str(EXAMPLES / "resume.py"), *words],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses += re.findall(r"step \d+: (\S+)", done.stdout)
    return [float(loss) for loss in losses]


def uninterrupted(folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> list[float]:
    """The losses of that example's model with PyTorch alone, in one run."""
    import resume

    folder.mkdir()
    monkeypatch.chdir(folder)
    with torch.random.fork_rng():
        resume.main(steps=str(steps))
    return [float(loss) for loss in re.findall(r"step \d+: (\S+)", capsys.readouterr().out)]


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runs", [[(2, "megatron-1d"), (0,)], [(4, "tensor3d"), (2, "zero3"), (0,)]])
def test_a_resumed_run_drops_what_the_uninterrupted_one_drops(tmp_path, runs, monkeypatch, capsys) -> None:
    losses = resumed(tmp_path, *runs)
    assert len(losses) == 4 * len(runs)
    assert losses == pytest.approx(uninterrupted(tmp_path / "one", len(losses), monkeypatch, capsys), rel=1e-9, abs=0)


@pytest.mark.distributed
@pytest.mark.exact
@pytest.mark.timeout(900)
def test_a_run_that_is_resumed_with_its_own_plan_has_the_same_bits(tmp_path) -> None:
    parts = resumed(tmp_path, (2, "zero3", "2"), (2, "zero3", "2"))
    (tmp_path / "checkpoints").rename(tmp_path / "before")
    assert parts == resumed(tmp_path, (2, "zero3", "4"))


@pytest.mark.exact
@pytest.mark.distributed
def test_lora_is_trained_and_merged(tmp_path: Path) -> None:
    printed = on_two_processes("finetune_lora.py", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < 4.5  # at first it is log(128), 4.9
    from finetune_lora import BATCH, VALIDATION

    merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loss_of(merged, VALIDATION.split(BATCH)) == pytest.approx(losses[-1], abs=2e-4)


@pytest.mark.exact
@pytest.mark.distributed
def test_a_model_without_memory_is_loaded_trained_and_saved(tmp_path: Path) -> None:
    printed = on_two_processes("train_from_meta.py", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    from train_from_meta import BATCH, ROWS

    before = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert losses[0] == pytest.approx(
        loss_of(before, ROWS.split(BATCH)[3:4]), abs=0.02
    )  # of the first step's last micro-batch
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    dcp.load({"model": after.state_dict()}, checkpoint_id=tmp_path / "step-6", no_dist=True)
    assert len(losses) == 6 and loss_of(after, ROWS.split(BATCH)) < losses[-1] < losses[0]


@pytest.mark.exact
@pytest.mark.distributed
def test_text_is_generated_as_on_one_device() -> None:
    printed = on_two_processes("generate.py")
    assert "as on one device: True" in printed and printed.count("->") == 4


def loss_of(model: torch.nn.Module, batches: Sequence[torch.Tensor]) -> float:
    """The mean loss of a causal language model."""
    with torch.no_grad():
        return float(torch.stack([model(input_ids=ids, labels=ids).loss for ids in batches]).mean())


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_training_goes_on_after_a_kill_and_on_fewer_processes(tmp_path: Path) -> None:
    """Steps 0 to 11 on four processes, one of which is killed meanwhile, and the rest on two: the losses of one process."""
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
    assert [[on for on, _ in found[step]] for step in (5, 11)] == [[4, 4], [4, 2]]
    assert sorted(found) == list(range(16))
    for step, losses in found.items():
        assert all(loss == pytest.approx(curve[step], rel=1e-9) for _, loss in losses), step


@pytest.mark.slow
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
