"""CLAP of transformers: contrastive text and audio; its batch norm takes a permuted input with a dim of size 1.

The models with batch norm that earlier tests cover take images of several channels, laid out as convolutions return them.
Here, a spectrogram of one channel is permuted and normalised: the strides of a dim of size 1 are arbitrary, and a reshard
chooses others than the plain model has. Correct gradients under every family are not enough if devices pass a kernel a
memory layout that the plain model never passes.
"""

import pytest
import torch
import transformers
from comparing import close, tensors
from devices import slow_machine
from float64 import double, float64_mode

import autotp


def clap():
    torch.manual_seed(3)
    audio = {
        "num_mel_bins": 16, "spec_size": 64, "patch_size": 4, "patch_stride": [4, 4], "window_size": 4, "num_classes": 8,
        "patch_embeds_hidden_size": 16, "hidden_size": 32, "depths": [1, 1], "num_attention_heads": [2, 4],
        "num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0, "projection_dim": 16,
    }  # fmt: skip
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
        "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "projection_dim": 16,
    }  # fmt: skip
    model = transformers.ClapModel(transformers.ClapConfig(audio_config=audio, text_config=text, projection_dim=16))
    norm = model.audio_model.audio_encoder.batch_norm
    with torch.no_grad():
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
        norm.weight.uniform_(0.5, 1.5), norm.bias.normal_()
    ids, sounds = torch.randint(2, 64, (4, 12)), torch.randn(4, 1, 64, 16)
    return model, (), {"input_ids": ids, "input_features": sounds, "return_loss": True}


@pytest.mark.exact
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("strategy", "mesh", "schedule"),
    [
        ("megatron-1d", (2,), "overlap"),
        ("megatron-1d", (2,), "none"),
        ("megatron-1d", (4,), "none"),
        ("tensor3d", (2, 2), "none"),
        ("auto", (2,), "none"),
        ("auto", (4,), "overlap"),
        ("tensor3d", (2, 2), "overlap"),
    ],
)
def test_clap_is_exact(strategy, mesh, schedule, training):
    topology = slow_machine(mesh)
    with float64_mode():
        (plain, args, kwargs), (model, _, _) = double(clap), double(clap)
        plain.train(training), model.train(training)
        plan = autotp.plan(model, topology, args, kwargs, strategy=strategy, mesh=mesh, memory=float("inf"))
        if schedule == "none":
            found = autotp.verify(model, plan, args, kwargs)
            assert found.right, found.departure
        expected = plain(*args, **kwargs)
        output = autotp.simulate(model, plan, args, kwargs, schedule=schedule)(*args, **kwargs)
        for got, want in zip(tensors(output), tensors(expected), strict=True):
            close(got, want, want.abs().max().item(), "an output")
        for result in (expected, output):
            # Weights each element of all outputs differently: the loss alone does not show errors in all outputs.
            sum((t * torch.linspace(0.5, 1, t.numel()).view(t.shape)).sum() for t in tensors(result)).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    largest = max(g.abs().max().item() for g in wanted.values() if g is not None)
    assert wanted["audio_model.audio_encoder.batch_norm.weight"].abs().max() > 1e-3 * largest
    for name, p in model.named_parameters():
        assert (p.grad is None) == (wanted[name] is None), name
        if p.grad is not None:
            close(p.grad, wanted[name], max(wanted[name].abs().max().item(), 1e-3 * largest), f"gradient of {name}")
    for (name, want), got in zip(plain.named_buffers(), model.buffers(), strict=True):
        close(got, want, want.double().abs().max().item(), f"buffer {name}")
