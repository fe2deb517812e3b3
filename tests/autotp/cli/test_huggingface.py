"""Models given by their config file, and shell completion."""

import json

import pytest
import torch
import transformers

import autotp
from autotp.cli import load_model
from autotp.cli.arguments import beginning, topologies

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def saved(folder, config):
    config.save_pretrained(folder)
    return f"{folder}/config.json"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_language_model_returns_its_loss_under_its_own_names(tmp_path, device):
    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, vocab_size=96, max_position_embeddings=16, architectures=["LlamaForCausalLM"]
    )
    model, args, kwargs = load_model(f"{saved(tmp_path, config)}:batch=4,dtype=bfloat16,device={device}")
    assert args == () and kwargs["input_ids"].shape == (4, 16), "no more positions than the model has"
    assert {p.device.type for p in model.parameters()} == {device} and {p.dtype for p in model.parameters()} == {
        torch.bfloat16
    }
    assert "lm_head.weight" in dict(model.named_parameters()) and model.training
    plan = autotp.plan(model, autotp.Topology.load("dgx-h100").resized(4), args, kwargs)
    assert "lm_head.weight" in plan.layouts
    if device == "cpu":
        loss = model(**kwargs)
        assert loss.dim() == 0 and loss.requires_grad


@pytest.mark.parametrize(
    ("config", "architecture", "inputs"),
    [
        (
            transformers.ViTConfig(**SMALL, image_size=32, patch_size=8),
            "ViTForImageClassification",
            {"pixel_values", "labels"},
        ),
        (transformers.BertConfig(**SMALL, vocab_size=96), "BertModel", {"input_ids"}),
        (
            transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2, vocab_size=96),
            "MixtralForCausalLM",
            {"input_ids", "labels"},
        ),
    ],
)
def test_other_models(tmp_path, config, architecture, inputs):
    config.architectures = [architecture]
    model, args, kwargs = load_model(f"{saved(tmp_path, config)}:sequence=16")
    assert set(kwargs) == inputs and all(value.shape[0] == 8 for value in kwargs.values())
    assert autotp.plan(model, autotp.Topology.load("dgx-h100").resized(2), args, kwargs, strategy="data").layouts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (":size=3", "option 'size' is unknown; there are batch"),
        (":batch=none", "batch is 'none'; it must be a whole number"),
        (":dtype=linear", "dtype=linear is not a dtype of torch"),
        (":device=cuda", "choose meta or cpu"),
        (":batch", "expected options such as"),
        (":batch=4,batch=5", "'batch' is given twice"),
        (":sequence=2000", "sequence=2000, but the model has positions for 1024"),
    ],
)
def test_wrong_options(run_cli, tmp_path, capsys, options, said):
    spec = saved(tmp_path, transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, architectures=["GPT2LMHeadModel"]))
    assert run_cli("plan", "--model", spec + options, "--topology", "dgx-h100") == 2
    assert said in capsys.readouterr().err


def test_short_names_of_dtypes(tmp_path):
    spec = saved(tmp_path, transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, architectures=["GPT2LMHeadModel"]))
    model, _, _ = load_model(f"{spec}:dtype=half")
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_wrong_files(run_cli, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    for name, said in (
        ("config.json", "it has no model_type"),
        ("missing.json", "cannot be read: No such file"),
    ):
        assert run_cli("plan", "--model", tmp_path / name, "--topology", "dgx-h100") == 2
        assert said in capsys.readouterr().err
    tiny = transformers.BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    for config, said in (
        (
            transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"]),
            "'input_features' cannot be guessed",
        ),
        (transformers.SegformerConfig(num_encoder_blocks=1, depths=[1]), "'pixel_values' cannot be guessed"),
        (transformers.GPT2Config(quantization_config={"load_in_4bit": True}), "quantization_config is not followed"),
        (transformers.EncoderDecoderConfig.from_encoder_decoder_configs(tiny, tiny), "it names no architectures"),
    ):
        assert run_cli("plan", "--model", saved(tmp_path, config), "--topology", "dgx-h100") == 2
        assert said in capsys.readouterr().err


def test_what_is_completed(tmp_path, monkeypatch):
    (tmp_path / "dgx-ours.toml").touch()
    (tmp_path / "dgx.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert {"dgx-h100", "dgx-ours.toml"} <= set(topologies("dgx")) and "dgx.txt" not in topologies("dgx")
    assert topologies("nothing") == [] and beginning(["data", "zero3"])("z") == ["zero3"]


def test_a_shell_completes(run_cli, monkeypatch, capsys):
    monkeypatch.setenv("_AUTOTP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "autotp plan --topology dgx-h")
    monkeypatch.setenv("COMP_CWORD", "3")
    run_cli()
    assert capsys.readouterr().out.split() == ["dgx-h100"]


def test_topologies_as_json(run_cli, capsys):
    assert run_cli("topology", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == len(autotp.Topology.preset_names())
    assert run_cli("topology", "dgx-h100", "--json") == 0
    assert autotp.Topology.from_dict(json.loads(capsys.readouterr().out)).name == "dgx-h100"
