"""Tiny models shared by the whole suite: each factory returns ``(model, args, kwargs)``.

Every model is deterministic (its own seed, no dropout), in training mode, and small enough for a step of a few
milliseconds. Sizes are divisible by eight wherever a mesh axis may shard them, except the four heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["MODELS", "Factory", "UNet", "bert", "gpt2", "llama", "llama_logits", "resnet", "unet", "vit"]

Factory = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]

BATCH = 8
SEQUENCE = 8


def gpt2() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """GPT-2 with its real, odd vocabulary (50257), tied embeddings and a loss."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50257, n_embd=16, n_head=4, n_layer=2, n_positions=16, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))
    return model, (), {"input_ids": ids, "labels": ids}


def _llama() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False, attention_dropout=0.0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    return model, torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))


def llama() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Llama with grouped-query attention (4 heads, 2 for keys and values) and a loss."""
    model, ids = _llama()
    return model, (), {"input_ids": ids, "labels": ids}


def llama_logits() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same Llama without labels: it returns the whole logits."""
    model, ids = _llama()
    return model, (), {"input_ids": ids}


def bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """BERT for masked words: padding in the attention mask, ignored labels."""
    torch.manual_seed(2)
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).train()
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[1, 6:] = 0
    mask[5, 3:] = 0
    labels = ids.masked_fill(torch.rand(BATCH, SEQUENCE) < 0.5, -100)
    labels[0, 0] = ids[0, 0]
    return model, (), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def vit() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Vision Transformer: four patches and a class token, five tokens in all."""
    torch.manual_seed(3)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=8,
        patch_size=4, num_channels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=8,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).train()
    images = torch.randn(BATCH, 3, 8, 8)
    return model, (), {"pixel_values": images, "labels": torch.randint(0, 8, (BATCH,))}


def resnet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """ResNet with basic blocks; batch norm is in training mode, so running statistics change."""
    torch.manual_seed(4)
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic",
        num_labels=8,
    )  # fmt: skip
    model = transformers.ResNetForImageClassification(config).train()
    images = torch.randn(BATCH, 3, 16, 16)
    return model, (), {"pixel_values": images, "labels": torch.randint(0, 8, (BATCH,))}


class _Block(nn.Module):
    """Two normalised convolutions with a 1x1 shortcut where the channels change."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.act = nn.SiLU()
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(self.act(self.norm1(x)))
        h = self.conv2(self.act(self.norm2(h)))
        return h + self.skip(x)


class UNet(nn.Module):
    """A plain U-Net of two resolutions: strided down, nearest up, skips joined by concatenation.

    Args:
        channels: image channels in and out.
        width: channels of the finer resolution; the coarser has twice as many.
    """

    def __init__(self, channels: int = 8, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.fine = _Block(width, width)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.coarse = _Block(width, 2 * width)
        self.middle = _Block(2 * width, 2 * width)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.join = _Block(2 * width, width)
        self.norm = nn.GroupNorm(4, width)
        self.head = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, image: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """The predicted image, or its mean squared error if a target is given."""
        fine = self.fine(self.stem(image))
        h = self.middle(self.coarse(self.down(fine)))
        h = self.up(nn.functional.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = self.join(torch.cat([h, fine], dim=1))
        out = self.head(nn.functional.silu(self.norm(h)))
        return out if target is None else nn.functional.mse_loss(out, target)


def unet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The U-Net with a mean-squared-error loss, both images positional."""
    torch.manual_seed(5)
    model = UNet().train()
    return model, (torch.randn(BATCH, 8, 8, 8), torch.randn(BATCH, 8, 8, 8)), {}


MODELS: Mapping[str, Factory] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama_logits": llama_logits,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
}
"""Every factory by its name."""
