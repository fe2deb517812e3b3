"""Generation with a cache gives the tokens that transformers gives."""

import copy
import math
from unittest import mock

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance_scale": 1.5}, "calls the model without the module's cache"),
        ({"prompt_lookup_num_tokens": 3}, "asks for the logits of several tokens"),
        ({"position_ids": torch.arange(6)[None].repeat(2, 1) + 1}, "passes position_ids to the model"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "more than logits: output_hidden_states"),
    ],
)
def test_what_needs_more_than_the_next_tokens_logits_is_refused(options, message):
    model = LlamaForCausalLM(LLAMA).eval()
    with pytest.raises(autotp.AutotpError, match=message):
        generate(WithCache(model, 1, ROOM), model, torch.tensor([[5, 6, 7, 5, 6]]), max_new_tokens=4, **options)


@pytest.mark.parametrize("strategy", ["data", "zero3"])
def test_sequences_that_the_devices_do_not_divide_are_named(strategy):
    with pytest.raises(autotp.BatchError, match=r"splits the batch 4 ways .* choose a batch that is a multiple of 4"):
        distributed(GPT2LMHeadModel(GPT2).eval(), strategy, (4,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "use_cache=False, but the distributed module computes with its cache"),
        ({"past_key_values": None}, "past_key_values is given by the distributed module"),
        ({"cache_implementation": "static"}, "cache_implementation is given by the distributed module"),
        ({"inputs_embeds": torch.zeros(2, 7, 64)}, "inputs_embeds is given by the distributed module"),
        ({"attention_mask": torch.ones(3, 7)}, r"attention_mask is .*: give a tensor of the prompts' shape, \[2, 7\]"),
        ({"input_ids": torch.ones(2)}, r"input_ids is .*: give a tensor of token numbers, \[batch, tokens\]"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.int64)}, "input_ids is"),
        ({"model": torch.nn.Linear(2, 2)}, "the model is a Linear: give one of transformers that generates"),
        ({"parallel": None}, "generate needs a distributed"),
    ],
)
def test_other_arguments_are_refused(options, message):
    model = LlamaForCausalLM(LLAMA).eval()
    call = {"parallel": WithCache(model, 2, ROOM), "model": model, "input_ids": torch.ones(2, 7, dtype=torch.int64)}
    with pytest.raises(autotp.AutotpError, match=message):
        generate(**call | options)


def test_another_model_is_refused():
    parallel, other = (LlamaForCausalLM(copy.deepcopy(LLAMA)) for _ in range(2))
    other.resize_token_embeddings(other.config.vocab_size + 1)
    with pytest.raises(autotp.AutotpError, match="LlamaForCausalLM is not the model that the distributed module was made"):
        generate(WithCache(parallel, 2, ROOM), other, torch.ones(2, 7, dtype=torch.int64))


@pytest.mark.parametrize("sizes", [(0, 8), (2, -1), (2.5, 8), ("2", 8), (2**40, 8)])
def test_caches_of_impossible_sizes(sizes):
    with pytest.raises(autotp.AutotpError, match=r"(batch|length) is .*; it must be"):
        WithCache(LlamaForCausalLM(LLAMA), *sizes)


@pytest.mark.slow
def test_a_config_of_other_caches_makes_no_difference():
    torch.manual_seed(0)
    model, prompt = LlamaForCausalLM(LLAMA).double().eval(), torch.randint(128, (2, 7))
    ours = distributed(model, "data", (2,))
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    model.generation_config.use_cache, model.generation_config.cache_implementation = False, "static"
    assert torch.equal(generate(ours, model, prompt, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.slow
def test_ranks_stop_where_the_first_does(one_rank):
    model, prompt = LlamaForCausalLM(LLAMA).eval(), torch.randint(128, (2, 7))
    example = (prompt, torch.tensor(0), torch.ones(2, ROOM, dtype=torch.int64))
    ours = autotp.parallelize(WithCache(model, 2, ROOM).eval(), None, example, mode="inference")
    short = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    assert generate(ours, model, prompt, **short, max_time=0.0).shape == (2, 8), "rank 0's clock"
    assert generate(ours, model, prompt, **short).shape == (2, 16)
    asked: list[list[bool]] = []
    with mock.patch.object(
        ours._programs.agreement, "decided", lambda decide: asked.append(decide()) or [len(asked) == 3] * 2
    ):
        assert generate(ours, model, prompt, **short, max_time=1e9).shape == (2, 10) and asked == [[False] * 2] * 3
        assert generate(ours, model, prompt, **short).shape == (2, 16) and len(asked) == 3, "tokens are alike"
