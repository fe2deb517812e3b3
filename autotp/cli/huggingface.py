"""Models of a Hugging Face config file: built on ``meta``, with example inputs, as a training step calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import AutotpError

__all__ = ["OPTIONS", "configured"]

#: What may follow the file, as in ``config.json:batch=16,sequence=4096``, with what holds otherwise.
OPTIONS = {"batch": "8", "sequence": "2048", "dtype": "float32", "device": "meta"}


Made = tuple[nn.Module, tuple[Any, ...], dict[str, Tensor]]


def configured(file: Path, options: Mapping[str, str]) -> Callable[[], Made]:
    """A factory of the model that a config describes.

    A language model or a classifier is given labels and returns its loss alone, as one that is trained does; the names of
    its parameters stay.

    Args:
        file: the config, as ``save_pretrained`` writes it.
        options: of `OPTIONS`; ``sequence`` is at most what the model has positions for.

    Raises:
        AutotpError: transformers is not installed; the file is not such a config; an option is unknown or wrong; or the
            model takes inputs that cannot be guessed.
    """
    try:
        import transformers
    except ImportError as error:
        raise AutotpError(f"--model {file}: a config file needs transformers: pip install transformers") from error
    chosen = _checked(file, options)
    try:
        config = transformers.AutoConfig.from_pretrained(file)
    except Exception as error:
        raise AutotpError(f"--model {file}: not a config that transformers knows ({error})") from error
    config.use_cache = False
    if any(hasattr(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        # The others route by what the data says, which no graph of fixed shapes can.
        config._experts_implementation = "batched_mm"

    def build() -> Made:
        with torch.device(chosen["device"]):
            model = _class_of(transformers, config, file)._from_config(config, dtype=getattr(torch, chosen["dtype"]))
        inputs = _inputs(model, config, int(chosen["batch"]), int(chosen["sequence"]), file)
        if "labels" in inputs:
            _return_the_loss(model)
        return model.train(), (), inputs

    return build


def _checked(file: Path, options: Mapping[str, str]) -> dict[str, str]:
    for name, value in options.items():
        if name not in OPTIONS:
            raise AutotpError(f"--model {file}: option {name!r} is unknown; there are {', '.join(OPTIONS)}")
        if name in ("batch", "sequence") and not (value.isdigit() and int(value) > 0):
            raise AutotpError(f"--model {file}: {name}={value} is not a positive number")
        if name == "dtype" and not isinstance(getattr(torch, value, None), torch.dtype):
            raise AutotpError(f"--model {file}: dtype={value} is not a dtype of torch, such as bfloat16")
        if name == "device" and value not in ("meta", "cpu"):
            raise AutotpError(f"--model {file}: device={value}: choose meta or cpu")
    return OPTIONS | dict(options)


def _class_of(transformers: Any, config: Any, file: Path) -> Any:
    name = next(iter(config.architectures or ()), None)
    if name is None:
        return transformers.MODEL_MAPPING[type(config)]
    found = getattr(transformers, name, None)
    if found is None:
        raise AutotpError(f"--model {file}: transformers {transformers.__version__} has no architecture {name!r}")
    return found


def _inputs(model: Any, config: Any, batch: int, sequence: int, file: Path) -> dict[str, Tensor]:
    main = model.main_input_name
    text = config.get_text_config()
    if main == "input_ids":
        length = min(sequence, getattr(text, "max_position_embeddings", None) or sequence)
        ids = torch.arange(batch * length).reshape(batch, length) % text.vocab_size
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
    elif main == "pixel_values":
        side = config.image_size
        high, wide = side if isinstance(side, list | tuple) else (side, side)
        inputs = {"pixel_values": torch.zeros(batch, getattr(config, "num_channels", 3), high, wide, dtype=model.dtype)}
    else:
        raise AutotpError(f"--model {file}: its input {main!r} cannot be guessed; write a factory: FILE.py:FACTORY")
    kind = type(model).__name__
    if kind.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")) and main == "input_ids":
        inputs["labels"] = inputs["input_ids"]
    elif kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        inputs["labels"] = torch.zeros(batch, dtype=torch.long)
    return inputs


def _return_the_loss(model: nn.Module) -> None:
    whole: Any = type(model)

    class LossOnly(whole):  # type: ignore[misc]
        def forward(self, **inputs: Tensor) -> Tensor:
            return super().forward(**inputs).loss

    LossOnly.__name__ = LossOnly.__qualname__ = whole.__name__
    model.__class__ = LossOnly
