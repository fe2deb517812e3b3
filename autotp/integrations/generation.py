"""Text generation with causal language models of transformers through a distributed module with a key-value cache.

The cache consists of buffers of the module with a fixed length, which calls update in place. Prefill and decoding of a
single token are two programs over the same parameters and the same cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import AutotpError
from autotp.runtime.agreement import Agreement
from autotp.runtime.checkpoint.random_state import RandomState
from autotp.runtime.module import DistributedModule
from autotp.runtime.programs import blueprint
from costmodel.errors import shown
from costmodel.text.numbers import whole

__all__ = ["WithCache", "generate"]

_MOST = 2**31  # upper bound on sequences, and on tokens per sequence


class WithCache(nn.Module):
    """A causal language model with its key-value cache as buffers: the module to plan and to distribute for generation.

    Args:
        model: a causal language model of transformers, such as a ``LlamaForCausalLM``.
        batch: the number of sequences that are generated at once.
        length: the maximum length of a sequence in tokens, including the prompt.

    Raises:
        AutotpError: the model is not one of transformers, has layers that cache anything but keys and values, or a size is
            not positive.
    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        _require_language_model(model)
        self.model, self.batch, self.length = model, whole(batch, "batch", most=_MOST), whole(length, "length", most=_MOST)
        cache = _cache(model, length)
        with torch.device(model.device):
            cache.early_initialization(batch, *_heads(model.config.get_text_config()), model.dtype, model.device)
        for number, layer in enumerate(cache.layers):
            self.register_buffer(f"keys_{number}", layer.keys, persistent=False)
            self.register_buffer(f"values_{number}", layer.values, persistent=False)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, start: Tensor, attention_mask: Tensor) -> Tensor:
        """The logits of the next token.

        Args:
            input_ids: int64 ``[batch, tokens]``, the tokens that follow those in the cache.
            start: int64 ``[]``, the number of tokens in the cache.
            attention_mask: ``[batch, length]``, 0 for padding tokens.

        Returns:
            ``[batch, vocabulary]``.
        """
        cache = _cache(self.model, self.length)
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = self.get_buffer(f"keys_{number}"), self.get_buffer(f"values_{number}")
            layer.dtype, layer.device, layer.cumulative_length = layer.keys.dtype, layer.keys.device, start.clone()
            layer.batch_size, layer.num_heads = layer.keys.shape[:2]
            layer.is_initialized = True
        positions = attention_mask.long().cumsum(-1) - 1
        at = torch.arange(input_ids.shape[1], device=input_ids.device) + start
        given: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in _parameters(self.model) else {}
        if "position_ids" in _parameters(self.model):
            given["position_ids"] = positions.clamp(min=0)[:, at]
        made = self.model(input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **given)
        return made.logits[:, -1]


def generate(parallel: nn.Module, model: Any, input_ids: Tensor, **options: Any) -> Tensor:
    """``model.generate(input_ids, **options)``, computed by a distributed ``WithCache``; every rank gets all tokens.

    Args:
        parallel: what ``autotp.parallelize`` or ``autotp.simulate`` returned for a ``WithCache``; its cache is overwritten.
        model: the model in this ``WithCache``, which provides the generation settings; it may be on ``meta``.
        input_ids: int64 ``[batch, tokens]``, the same on every rank.
        options: of transformers' ``generate``: ``max_new_tokens``, ``attention_mask``, ``do_sample``... All ranks sample
            from the state of torch's generator on rank 0. Beam search, and options that need a second cache or more than
            the logits of the next token, are not supported: ``guidance_scale``, ``assistant_model``,
            ``output_hidden_states``...

    Returns:
        int64 ``[batch, tokens]``: the prompts, followed by the generated tokens.

    Raises:
        AutotpError: an argument is wrong or not supported, the number of sequences is not the cache's, or they are longer.
    """
    from transformers.cache_utils import Cache

    batch, length = _sizes(parallel)
    _require_language_model(model)
    _require_prompts(input_ids, options)
    made, given = ({name: each.shape for name, each in one.named_parameters()} for one in (parallel, model))
    if made != {f"model.{name}": shape for name, shape in given.items()}:
        raise AutotpError(f"{type(model).__name__} is not the model that the distributed module was made of: give that")
    if len(input_ids) != batch:
        raise AutotpError(
            f"{len(input_ids)} sequences, but the cache is for {batch}; make WithCache(model, {len(input_ids)}, …)"
        )

    class Filled(Cache):
        """Stands for the module's cache in transformers' ``generate``: tracks how many tokens it holds."""

        def __init__(self) -> None:
            super().__init__(layers=[])
            self.tokens = 0

        def crop(self, *_: Any) -> None:
            raise AutotpError("generate takes tokens out of the cache, which the distributed module's does not do")

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.tokens

        def get_max_cache_shape(self, layer_idx: int = 0) -> int:
            return length

    shell = blueprint(model)
    if isinstance(shell, AutotpError):
        raise shell
    filled = Filled()

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        _require_next_token(more, filled, options)
        if len(input_ids) != batch:
            raise AutotpError(
                f"{len(input_ids)} sequences, but the cache is for {batch}: beams and num_return_sequences are not "
                "supported; repeat the prompts, with do_sample=True"
            )
        tokens = filled.tokens + input_ids.shape[1]
        if tokens > length:
            raise AutotpError(f"{tokens} tokens, but the cache has room for {length}; make WithCache with a greater length")
        mask = torch.ones(batch, length, dtype=torch.int64, device=input_ids.device)
        if attention_mask is not None:
            mask[:, : attention_mask.shape[1]] = attention_mask
        start = torch.tensor(filled.tokens, device=input_ids.device)
        logits = parallel(input_ids.contiguous(), start, mask)
        filled.tokens = tokens
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=filled)

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    shell.forward = forward  # type: ignore[assignment]
    if isinstance(parallel, DistributedModule):  # all ranks sample and stop as rank 0 does
        random = RandomState()
        random.load_state_dict(random.state_dict())
        options |= _stopping(options, model.generation_config, parallel._programs.agreement)
    own = {"use_cache": True, "cache_implementation": None, "past_key_values": filled}
    with torch.no_grad():
        found: Tensor = shell.generate(input_ids, **options | own)  # type: ignore[operator]
    return found


def _stopping(options: Mapping[str, Any], defaults: Any, agreement: Agreement) -> dict[str, Any]:
    """Options with which all ranks stop when rank 0 does, since clocks, and a caller's criteria, may differ per rank."""
    from transformers.generation import stopping_criteria as known

    limits = [getattr(each, "max_time", None) for each in (options.get("generation_config"), defaults)]
    limit = options["max_time"] if "max_time" in options else next((each for each in limits if each is not None), None)
    criteria = known.StoppingCriteriaList(options.get("stopping_criteria") or ())
    if limit is not None:
        criteria.append(known.MaxTimeCriteria(limit))
    if not criteria:
        return {}

    class Together(known.StoppingCriteria):
        def __call__(self, *args: Any, **named: Any) -> Any:
            done = criteria(*args, **named)
            return done.new_tensor(agreement.decided(done.tolist))

    return {"max_time": None, "stopping_criteria": known.StoppingCriteriaList([Together()])}


def _require_language_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        raise AutotpError(
            f"the model is a {type(model).__name__}: give one of transformers that generates, such as a LlamaForCausalLM"
        )


def _require_prompts(input_ids: Any, options: Mapping[str, Any]) -> None:
    integers = isinstance(input_ids, Tensor) and not input_ids.is_floating_point()
    if not integers or input_ids.dim() != 2 or not input_ids.shape[1]:
        raise AutotpError(f"input_ids is {_kind_of(input_ids)}: give a tensor of token numbers, [batch, tokens]")
    for name in ("past_key_values", "inputs_embeds", "inputs", "cache_implementation"):
        if name in options:
            raise AutotpError(f"{name} is given by the distributed module, whose cache is used: leave it out")
    if options.get("use_cache", True) is not True:
        raise AutotpError("use_cache=False, but the distributed module computes with its cache: leave it out")
    mask = options.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        raise AutotpError(
            f"attention_mask is {_kind_of(mask)}: give a tensor of the prompts' shape, {list(input_ids.shape)}"
        )


def _require_next_token(given: Mapping[str, Any], cache: Any, options: Mapping[str, Any]) -> None:
    """Raises if a call of the model requests more than the next token's logits, or passes another cache or other inputs."""
    wrong = ""
    if given.get("past_key_values") is not cache:
        wrong = "calls the model without the module's cache, as guidance_scale does"
    elif given.get("logits_to_keep", 1) != 1:
        wrong = "asks for the logits of several tokens, as assistant_model and prompt_lookup_num_tokens do"
    elif asked := [name for name in ("output_attentions", "output_hidden_states") if given.get(name)]:
        wrong = f"asks for more than logits: {', '.join(asked)}"
    elif other := [name for name in options if isinstance(given.get(name), Tensor)]:
        wrong = f"passes {', '.join(other)} to the model"
    if wrong:
        raise AutotpError(f"generate {wrong}; the distributed module computes the next token's logits: leave it out")


def _kind_of(value: Any) -> str:
    return f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else shown(value)


def _sizes(parallel: Any) -> tuple[int, int]:
    """The cache's size: the number of sequences, and of tokens per sequence."""
    buffers = dict(parallel.named_buffers()) if isinstance(parallel, nn.Module) else {}
    if "keys_0" not in buffers:
        raise AutotpError("generate needs a distributed autotp.integrations.WithCache(model, batch, length)")
    return buffers["keys_0"].shape[0], buffers["keys_0"].shape[2]


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def _cache(model: Any, length: int) -> Any:
    from transformers.cache_utils import StaticCache, StaticLayer

    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=length)
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, StaticLayer):
            raise AutotpError(f"{type(model).__name__}: layer {number} keeps {type(layer).__name__}, not keys and values")
        # A sliding window is only a mask of the attention; all keys are kept.
        cache.layers[number] = StaticLayer(length)
    return cache


def _heads(config: Any) -> tuple[int, int]:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
