"""Real processes: torchrun and gloo."""

import time

import pytest
import torch
from thinned import thinned
from torch._subclasses import FakeTensorMode

from autotp.errors import AutotpError
from autotp.runtime.parallelize import _kind_of_device

pytestmark = pytest.mark.distributed


def passes(done, said="passed"):
    assert done.returncode == 0, done.stderr[-3000:]
    assert said in done.stdout


@pytest.mark.parametrize(
    ("processes", "arguments"),
    thinned(
        [
            (2, "llama zero3 2 --recompute full"),
            (2, "llama zero3 2 2 --recompute full"),  # in two panels
            (2, "unet megatron-1d 2 --recompute selective"),
            (4, "unet tensor3d 2x2"),
            (4, "llama megatron-sp 2x2 --recompute full"),
            (4, "llama summa-2d 2x2 2"),
            (8, "llama 3d 2x2x2"),
        ],
        slow=1,
    ),
)
def test_three_steps_equal_one_device(torchrun, processes, arguments):
    passes(torchrun(processes, "train.py", *arguments.split()), "exact")


@pytest.mark.parametrize(
    ("backend", "model_on", "runs_on"),
    [("gloo", "cpu", "cpu"), ("gloo", "cuda", "cuda"), ("nccl", "cpu", "cuda"), ("cpu:gloo,cuda:nccl", "meta", "cuda")],
)
def test_a_module_runs_on_gpus_if_its_processes_do_or_the_model_is_there(backend, model_on, runs_on, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(2, device=model_on)])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    if (backend, runs_on) == ("gloo", "cuda"):
        with pytest.raises(AutotpError, match=r"init_process_group\('nccl'\)"):
            _kind_of_device(model)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert _kind_of_device(model) == runs_on


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("model", "strategy"), [("llama", "zero3"), ("unet", "megatron-1d")])
def test_three_steps_on_a_gpu(torchrun, model, strategy):
    passes(torchrun(1, "train.py", model, strategy, "1", "--backend", "nccl", "--device", "cuda", gpus=True), "exact")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "cases"),
    thinned(
        [
            (2, "accumulate checkpoints own_gradients uneven_chunks special:once,dropout,local_inputs,orders,hooks,state"),
            (2, "written as_eager:overlapped programs:parts_of_the_batch,rows_of_the_batch,as_with_other_modules"),
            (2, "trainer:losses pretrained:errors programs:ranks_disagree precision:one_rank_overflows special:lone_parts"),
            (4, "staged special:collectives,collectives_between_nodes,resting"),
            (2, "programs observed"),
            (2, "pretrained:round_trip trainer:resume"),
            (2, "special:destroyed"),  # checks how the process ends
            (1, "as_eager own_gradients"),
            (2, "as_eager"),
            (2, "precision"),
            (2, "special:meta,twice"),
            (2, "pretrained:heads"),
            (2, "trainer:resume_with_another_plan,adapters,accelerated"),
            (4, "programs"),
            (4, "observed"),
            (8, "special:short_dims"),
        ],
        first=4,
    ),
)
def test_a_distributed_module_does_what_the_model_does(torchrun, processes, cases):
    """In scripts, with hooks and states, and in training loops of other libraries: see the programs."""
    passes(torchrun(processes, "together.py", *cases.split(), timeout=290))


@pytest.mark.slow
def test_compiled_regions_equal_one_device(torchrun):
    passes(torchrun(2, "compiled.py", timeout=400))  # compiled regions are in torch's cache the next time


@pytest.mark.slow
@pytest.mark.parametrize("case", thinned(["by_norm", "by_value", "resumes", "resumes_with_dropout"], first=1, whole=True))
def test_loops_of_lightning(torchrun, case):
    passes(torchrun(2, "lightning_fit.py", case, timeout=290))


@pytest.mark.exact
@pytest.mark.parametrize("adamw", ["fused", "foreach"])
def test_what_four_processes_save_others_load(torchrun, adamw):
    passes(torchrun(4, "resuming.py", adamw))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    thinned(
        [
            ("refused", "choose a batch that is a multiple of 2"),
            ("mismatch", "the plan is for 4 devices (mesh (4,)), but 2 processes run"),
        ]
    ),
)
def test_errors_reach_every_rank_and_end_the_job(torchrun, case, message):
    begun = time.monotonic()
    done = torchrun(2, "together.py", f"special:{case}")
    assert done.returncode != 0
    assert message in done.stderr, done.stderr[-3000:]
    assert time.monotonic() - begun < 90
