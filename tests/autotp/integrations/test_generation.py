"""Generation with a cache: tokens are transformers' own."""

import math

import pytest
import torch
from thinned import thinned
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import autotp
from autotp.integrations import WithCache, generate

LLAMA = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GPT2 = GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
ROOM = 24


def distributed(model, strategy, mesh, batch=2):
    cached = WithCache(model, batch, ROOM).eval()
    prompt = torch.zeros(batch, 7, dtype=torch.int64)
    example = (prompt, torch.tensor(0), torch.ones(batch, ROOM, dtype=torch.int64))
    topology = autotp.Topology.flat(math.prod(mesh))
    plan = autotp.plan(cached, topology, example, strategy=strategy, mesh=mesh, mode="inference")
    return autotp.simulate(cached, plan, example)


@pytest.mark.parametrize(
    ("kind", "config", "strategy", "mesh"),
    thinned([(LlamaForCausalLM, LLAMA, "auto", (2, 2)), (GPT2LMHeadModel, GPT2, "megatron-1d", (2,))]),
)
def test_tokens_are_those_of_the_model(kind, config, strategy, mesh):
    torch.manual_seed(0)
    model = kind(config).double().eval()
    prompt = torch.randint(3, 128, (2, 7))
    padded = torch.ones_like(prompt)
    padded[0, :3] = 0
    parallel = distributed(model, strategy, mesh)
    for options in ({}, {"attention_mask": padded}, {"do_sample": True, "top_k": 20}, {"repetition_penalty": 1.5}):
        found = []
        for run in (model.generate, lambda *args, **kwargs: generate(parallel, model, *args, **kwargs)):
            torch.manual_seed(1)
            found.append(run(prompt, **{"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False} | options))
        assert torch.equal(*found) and found[0].shape[1] > 7
    assert len(parallel.programs) == 2, "the prompt, and the next token"


def test_what_the_cache_has_no_room_for():
    model = GPT2LMHeadModel(GPT2).eval()
    parallel = distributed(model, "megatron-1d", (2,))
    prompt = torch.randint(3, 128, (2, 20))
    with pytest.raises(autotp.AutotpError, match=r"25 tokens, but the cache has room for 24; make WithCache"):
        generate(parallel, model, prompt, max_new_tokens=30, min_new_tokens=30, pad_token_id=0)
    with pytest.raises(autotp.AutotpError, match=r"3 sequences, but the cache is for 2"):
        generate(parallel, model, torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(autotp.AutotpError, match="4 sequences, but the cache is for 2: beams"):
        generate(parallel, model, prompt[:, :4], max_new_tokens=2, num_beams=2, pad_token_id=0)
    plain = torch.nn.Linear(4, 4)
    other = autotp.simulate(plain, autotp.plan(plain, autotp.Topology.flat(2), (torch.ones(2, 4),)), (torch.ones(2, 4),))
    with pytest.raises(autotp.AutotpError, match="a distributed autotp.integrations.WithCache"):
        generate(other, model, prompt)
    with pytest.raises(autotp.AutotpError, match="MambaForCausalLM: layer 0 keeps"):
        WithCache(MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1)), 1, 8)


@pytest.mark.parametrize("strategy", ["data", "zero3"])
def test_sequences_that_the_devices_do_not_divide_are_named(strategy):
    with pytest.raises(autotp.BatchError, match=r"splits the batch 4 ways .* choose a batch that is a multiple of 4"):
        distributed(GPT2LMHeadModel(GPT2).eval(), strategy, (4,))
