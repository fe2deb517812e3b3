"""The command for canonical jobs, run on a job that is planned in a second."""

import dataclasses
import math

import pytest

from benchmarks.canonical import JOBS, MODELS, Job, alone, model_of, planned, report

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 96}
TINY = Job("tiny", 4, batch=2, sequence=16, sizes=SIZES)
#: Published numbers of parameters, in billions.
PUBLISHED = {"Llama-3-8B": 8.03, "Llama-3-70B": 70.55, "Llama-3-405B": 405.85, "Llama-2-13B": 13.02, "MPT-1B": 1.32}


@pytest.mark.exact
def test_a_job_is_planned_in_a_process_of_its_own():
    found = alone(TINY)
    here = planned(TINY)
    assert found["step"] == here["step"] and found["mesh"] == list(here["mesh"])
    assert math.prod(found["mesh"]) == 4 and found["meshes"] > 1, "every mesh is looked at"
    assert found["speed"] == pytest.approx(32 / found["step"])
    assert 0 < found["memory"] < 80e9 and 0 < found["seconds"] < 60 and found["peak"] > 1e8


@pytest.mark.exact
def test_a_job_that_does_not_fit_is_reported():
    job = dataclasses.replace(TINY, batch=2**20, sequence=512, recompute="none", fits=False)
    found = planned(job)
    assert found["needed"] > 80e9
    page = report([(TINY, planned(TINY)), (job, found)])
    assert page.count("| tiny | 4 H100 |") == 2 and f"| {found['needed'] / 1e9:.1f} of 80 |" in page


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_published_size(name):
    model, (tokens, *_) = model_of(next(job for job in JOBS if job.model == name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    assert tokens.is_meta


def test_jobs_say_what_is_asked_for():
    assert len({(job.model, job.devices, job.recompute) for job in JOBS}) == len(JOBS)
    assert {job.model for job in JOBS} == set(MODELS)
