"""Models for benchmarks: the matrix products of transformers, as the papers count them, and complete models."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """The matrix products of a transformer layer, without norms and biases."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """Layers of matrix products after another product, so that the first layer's input has a layout like any other's."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Decoder(nn.Module):
    """A GPT that returns its loss. Every product is a separate ``Linear``, as manual sharding recipes expect."""

    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.layers = nn.ModuleList(_Normed(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class _Normed(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Chain(nn.Module):
    """Alternating linear layers k -> n and n -> k, with non-linearities between them."""

    def __init__(self, pairs: int, k: int, n: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(k, k, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(k, n, bias=False), nn.Tanh(), nn.Linear(n, k, bias=False), nn.Tanh())
            for _ in range(pairs)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Loss(nn.Module):
    """A language model that returns only its loss, because all outputs of a model are gathered on every device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Classifier(nn.Module):
    """An image classifier that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images).logits, labels)


def gpt(
    layers: int, hidden: int, heads: int, vocabulary: int, batch: int, sequence: int
) -> tuple[nn.Module, tuple[Tensor]]:
    """A GPT-2 on ``meta`` in bfloat16, which returns its loss, and an example input, for planning."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocabulary, n_positions=sequence, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = Loss(transformers.GPT2LMHeadModel(config).to(torch.bfloat16))
        return model, (torch.zeros(batch, sequence, dtype=torch.long),)


def products(layers: int, hidden: int, heads: int, batch: int, sequence: int) -> tuple[nn.Module, tuple[Tensor]]:
    """A :class:`Transformer` on ``meta`` in bfloat16, and an example input."""
    with torch.device("meta"):
        model = Transformer(layers, hidden, heads).to(torch.bfloat16)
        return model, (torch.zeros(batch, sequence, hidden, dtype=torch.bfloat16),)


def chain(pairs: int, k: int, n: int, batch: int, sequence: int) -> tuple[nn.Module, tuple[Tensor]]:
    """A :class:`Chain` on ``meta`` in bfloat16, and an example input."""
    with torch.device("meta"):
        model = Chain(pairs, k, n).to(torch.bfloat16)
        return model, (torch.zeros(batch, sequence, k, dtype=torch.bfloat16),)


class Denoiser(nn.Module):
    """A U-Net that returns its loss: residual blocks of group norm, SiLU and convolution at two resolutions."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.down = _Block(width, width, groups)
        self.shrink = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.middle = _Block(2 * width, 2 * width, groups)
        self.grow = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up = _Block(2 * width, width, groups)
        self.head = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        fine = self.down(self.stem(image))
        coarse = self.middle(self.shrink(fine))
        back = self.grow(F.interpolate(coarse, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.head(self.up(torch.cat((back, fine), dim=1))), target)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, inputs), nn.GroupNorm(groups, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return self.skip(x) + y


#: Name -> (layers, width, tokens per sequence).
_GPTS = {"gpt": (4, 256, 128), "deep": (8, 256, 256), "wide": (8, 1024, 32)}


def trained(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model that returns its loss and takes about half a second per step on a CPU core, and its global batch.

    ``gpt``: a GPT-2 of 4 layers of width 256 over 8 sequences of 128; ``deep``: 8 layers of width
    256 over 8 sequences of 256; ``wide``: 8 layers of width 1024 over 8 sequences of 32. ``llama``: like ``gpt``, but a
    Llama with grouped queries. ``decoder``: a `Decoder` with the sizes of ``deep``. ``unet``: a `Denoiser` of width 64
    over 8 images. ``vit``: a vision transformer of 4 layers of width 128 over 16 images, with dropout.
    Two models have more saved activations: ``xl``, a `Decoder` of two layers with the width of GPT-2 XL over 8 sequences
    of 256, which takes some ten seconds; and ``unet-wide``, ``unet`` over images with four times the pixels.

    Raises:
        ValueError: There is no model of this name.
    """
    torch.manual_seed(0)
    if name in _GPTS:
        layers, width, tokens = _GPTS[name]
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=8, vocab_size=512, n_positions=tokens, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        return Loss(model), (torch.randint(0, 512, (8, tokens)),)
    if name == "decoder":
        layers, width, tokens = _GPTS["deep"]
        return Decoder(layers, width, 8, 512, tokens), (torch.randint(0, 512, (8, tokens)),)
    if name == "xl":
        return Decoder(2, 1600, 25, 512, 256), (torch.randint(0, 512, (8, 256)),)
    if name in ("unet", "unet-wide"):
        side = 32 if name == "unet" else 64
        return Denoiser(64, 8), (torch.randn(8, 4, side, side), torch.randn(8, 4, side, side))
    if name == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=4, hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=512, max_position_embeddings=128, use_cache=False,
        )  # fmt: skip
        return Loss(transformers.LlamaForCausalLM(config)), (torch.randint(0, 512, (8, 128)),)
    if name == "vit":
        config = transformers.ViTConfig(
            num_hidden_layers=4, hidden_size=128, num_attention_heads=8, intermediate_size=512, image_size=64, patch_size=8,
            hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        )  # fmt: skip
        return Classifier(transformers.ViTForImageClassification(config)), (
            torch.randn(16, 3, 64, 64),
            torch.arange(16) % 2,
        )
    raise ValueError(f"no model is called {name!r}; choose {', '.join(_GPTS)}, decoder, xl, llama, unet, unet-wide or vit")
