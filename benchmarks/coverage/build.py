"""Builds tiny models of libraries: sizes with common names in configs are made small, and dropout is 0."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BATCH", "Example", "diffusion", "example", "huggingface", "pytorch_image", "torchvision"]

BATCH = 4
_TOKENS, _WORDS = 16, 96

#: Common names of sizes and ids in configs of transformers -> the values used here.
_TINY: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size", "dff", "n_inner", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_block_records"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("vocab_size", "pad_vocab_size_multiple"), _WORDS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "max_sequence_length"), 64),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "head_dim": 8,
    "d_kv": 8,
    "image_size": 32,
    "patch_size": 8,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model in training mode without dropout, and its positional and keyword arguments."""


def example(model: nn.Module, inputs: Mapping[str, Any] | tuple[Any, ...]) -> Example:
    """Disables dropout in a model, and makes its inputs from their shapes; their names determine the values.

    Inputs such as "ids" and "labels" are integers; one-dimensional labels are below 8. A mask is all ones.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    named = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
    made = {name: _made(str(name), shape) for name, shape in named.items()}
    model.train()
    return (model, (), made) if isinstance(inputs, Mapping) else (model, tuple(made.values()), {})


def _made(name: str, shape: Any) -> Any:
    if isinstance(shape, (Tensor, bool)):
        return shape
    whole = name.endswith(("ids", "labels", "timestep", "timesteps"))
    high = 8 if name == "labels" and len(shape) == 1 else _WORDS
    if "mask" in name:
        return torch.ones(shape, dtype=torch.long)
    return torch.randint(3, high, shape) if whole else torch.randn(shape)


def huggingface(name: str, overrides: Mapping[str, Any], inputs: str | Mapping[str, Any]) -> Example:
    """A model of transformers.

    Args:
        name: The name of its class.
        overrides: Config values other than the common tiny sizes; a dict for a nested config.
        inputs: A kind of inputs, such as "text" or "image", or the shape of each input.
    """
    model_class = getattr(importlib.import_module("transformers"), name)
    config = _config(model_class.config_class, overrides)
    for part in (config, *(getattr(config, key) for key in config.sub_configs if getattr(config, key, None) is not None)):
        part._experts_implementation = "batched_mm"
    model = model_class(config)
    side = getattr(config, "image_size", 32)
    side = side if isinstance(side, int) else 32
    text, words = {"input_ids": (BATCH, _TOKENS)}, {"labels": torch.randint(3, _WORDS, (BATCH, _TOKENS))}
    kinds: Mapping[str, Mapping[str, Any]] = {
        "words": text | words,
        "text": text,
        "sentence": text | {"labels": torch.randint(0, 2, (BATCH,))},
        "image": {"pixel_values": (BATCH, 3, side, side)},
        "both": text | {"pixel_values": (BATCH, 3, side, side)},
        "sound": {"input_values": (BATCH, 512)},
    }
    return example(model, kinds[inputs] if isinstance(inputs, str) else inputs)


def _config(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    usual = vars(config_class())
    tiny = {name: value for name, value in _TINY.items() if name in usual or name in config_class.attribute_map}
    tiny = {name: value for name, value in tiny.items() if config_class.attribute_map.get(name) not in tiny}
    still = {name: 0.0 for name, value in usual.items() if "drop" in name and isinstance(value, float)}
    rates = {name: value for name, value in usual.items() if name.endswith(("pdrop", "layerdrop", "jitter_noise"))}
    still |= {name: 0 if isinstance(value, int) else 0.0 for name, value in rates.items()}  # some configs check the type
    parts = {}
    for key, part in config_class.sub_configs.items():
        if isinstance(overrides.get(key, {}), Mapping) and isinstance(part, type) and part.__name__ != "AutoConfig":
            parts[key] = _config(part, overrides.get(key, {}))
    return config_class(**{**tiny, **still, **overrides, **parts})


def pytorch_image(name: str, overrides: Mapping[str, Any], inputs: str | Mapping[str, Any]) -> Example:
    """A model of timm; ``inputs`` is the side length of its square images."""
    model = importlib.import_module("timm").create_model(name, num_classes=8, **overrides)
    return example(model, ((BATCH, 3, int(inputs), int(inputs)),))


def torchvision(name: str, overrides: Mapping[str, Any], inputs: str | Mapping[str, Any]) -> Example:
    """A model of torchvision; ``inputs`` are the sizes of an image after its channels, such as "32x32"."""
    model = importlib.import_module("torchvision").models.get_model(name, weights=None, **overrides)
    return example(model, ((BATCH, 3, *map(int, str(inputs).split("x"))),))


def diffusion(name: str, overrides: Mapping[str, Any], inputs: str | Mapping[str, Any]) -> Example:
    """A model of diffusers; ``inputs`` has the shape of each input."""
    assert not isinstance(inputs, str)
    model = getattr(importlib.import_module("diffusers"), name)(**overrides)
    return example(model, {**inputs, "return_dict": False})
