"""Builds models from Hugging Face config files, by default on ``meta``, with the example inputs of a training step."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from autotp.errors import AutotpError
from costmodel.errors import shown
from costmodel.text.files import read_text
from costmodel.text.numbers import figure, whole, whole_of

__all__ = ["OPTIONS", "configured"]

#: Options after the file name, as in ``config.json:batch=16,sequence=4096``, and their defaults.
OPTIONS = {"batch": "8", "sequence": "2048", "dtype": "float32", "device": "meta"}

_LARGEST_CONFIG = 2**20  # bytes
_SAID = 500  # characters shown of a message of transformers
_COUNTS = re.compile("layer|block|depth|stage|expert|group|flow|codebook|types")  # in keys that count modules
_MOST_MODULES, _MOST_LABELS, _LARGEST_SIZE = 1024, 2**17, 2**31
_MOST_PARTS = 2**17  # parameters and modules of a model
_MOST_ELEMENTS = 2**28  # of example inputs

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Tensor]]


def configured(file: Path, options: Mapping[str, str]) -> Callable[[], Made]:
    """A factory that builds the model of a config file, and example inputs.

    A language model or a classifier is given labels and returns only its loss, as in training; the names of its parameters
    do not change.

    Args:
        file: the config, as ``save_pretrained`` writes it.
        options: values for `OPTIONS`; the default of ``sequence`` is limited to the positions that the model has.

    Raises:
        AutotpError: transformers is not installed; the file is not such a config; an option is unknown or wrong; or the
            model takes inputs that cannot be guessed.
    """
    chosen, data = _checked(file, options), _config(file)
    try:
        import transformers
    except ImportError as error:
        raise AutotpError(f"--model {file}: a config file needs transformers: pip install transformers") from error
    if not data.get("model_type"):
        raise AutotpError(f"--model {file}: not a config of transformers: it has no model_type")
    if data.get("quantization_config"):
        raise AutotpError(f"--model {file}: quantization_config is not followed; take it out to plan the model without")
    try:
        # Not by the name of the file, with which transformers would look for missing files on the network.
        config = transformers.CONFIG_MAPPING[data["model_type"]].from_dict(data)
    except Exception as error:
        raise AutotpError(
            f"--model {file}: not a config that transformers knows ({type(error).__name__}: {str(error)[:_SAID]})"
        ) from error
    config.use_cache = False
    if any(hasattr(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        # The other implementations have data-dependent shapes, which a graph of fixed shapes cannot have.
        config._experts_implementation = "batched_mm"

    def build() -> Made:
        with torch.device(chosen["device"]), _bounded(file):
            model = _class_of(transformers, config, file)._from_config(config, dtype=getattr(torch, chosen["dtype"]))
        with torch.device(chosen["device"]):
            inputs = _inputs(model, config, int(chosen["batch"]), int(chosen["sequence"]), "sequence" in options, file)
        if "labels" in inputs:
            _return_the_loss(model)
        return model.train(), (), inputs

    return build


@contextmanager
def _bounded(file: Path) -> Iterator[None]:
    """Rejects a model with too many parameters and modules while it is built, whichever keys of the config cause them."""
    parts = itertools.count(1)

    def count(*_: Any) -> None:
        if next(parts) > _MOST_PARTS:
            raise AutotpError(f"--model {file}: the model has more than {_MOST_PARTS:,} parameters and modules")

    handles = [register_module_module_registration_hook(count), register_module_parameter_registration_hook(count)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _config(file: Path) -> dict[str, Any]:
    """Reads the keys of a config file, and checks that its numbers are not too large to build a model."""
    try:
        data = json.loads(read_text(file, _LARGEST_CONFIG))
    except OSError as error:
        raise AutotpError(f"--model {file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AutotpError(f"--model {file}: not JSON ({str(error)[:_SAID]})") from error
    if not isinstance(data, dict):
        raise AutotpError(f"--model {file}: expected the keys of a config, not {shown(data)}")
    for key, number in _numbers("", data):
        where = f"--model {file}: {key}"
        if isinstance(number, int):
            name = key.rpartition(".")[2]
            most = _MOST_MODULES if _COUNTS.search(name) else _MOST_LABELS if name == "num_labels" else _LARGEST_SIZE
            whole(number, where, least=-_LARGEST_SIZE, most=most)
        else:
            figure(abs(number), where)
    return data


def _numbers(key: str, value: Any) -> Iterator[tuple[str, int | float]]:
    """Yields every number in a config, with its key; nested keys are joined by dots."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _numbers(f"{key}.{name}" if key else name, each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(key, each)


def _checked(file: Path, options: Mapping[str, str]) -> dict[str, str]:
    for name, value in options.items():
        if name not in OPTIONS:
            raise AutotpError(f"--model {file}: option {shown(name)} is unknown; there are {', '.join(OPTIONS)}")
        if name in ("batch", "sequence"):
            whole_of(value, f"--model {file}: {name}", most=_LARGEST_SIZE)
        if name == "dtype" and not isinstance(getattr(torch, value, None), torch.dtype):
            raise AutotpError(f"--model {file}: dtype={value[:80]} is not a dtype of torch, such as bfloat16")
        if name == "device" and value not in ("meta", "cpu"):
            raise AutotpError(f"--model {file}: device={shown(value)}: choose meta or cpu")
    return OPTIONS | dict(options)


def _class_of(transformers: Any, config: Any, file: Path) -> Any:
    name = next(iter(config.architectures or ()), None)
    if name is None and type(config) in transformers.MODEL_MAPPING:
        return transformers.MODEL_MAPPING[type(config)]
    if name is None:
        raise AutotpError(f"--model {file}: it names no architectures, and {type(config).__name__} has no model of its own")
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if found is None:
        raise AutotpError(f"--model {file}: transformers {transformers.__version__} has no architecture {shown(name)}")
    return found


def _inputs(model: Any, config: Any, batch: int, sequence: int, asked: bool, file: Path) -> dict[str, Tensor]:
    main = model.main_input_name
    text = config.get_text_config()
    if main == "input_ids":
        length = min(sequence, getattr(text, "max_position_embeddings", None) or sequence)
        if asked and length < sequence:
            raise AutotpError(f"--model {file}: sequence={sequence}, but the model has positions for {length}")
        whole(batch * length, f"--model {file}: the number of tokens", most=_MOST_ELEMENTS)
        ids = torch.arange(batch * length).reshape(batch, length) % text.vocab_size
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
    elif main == "pixel_values" and hasattr(config, "image_size"):
        side = config.image_size
        high, wide = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(config, "num_channels", 3)
        whole(batch * channels * high * wide, f"--model {file}: the number of pixels", most=_MOST_ELEMENTS)
        inputs = {"pixel_values": torch.zeros(batch, channels, high, wide, dtype=model.dtype)}
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
