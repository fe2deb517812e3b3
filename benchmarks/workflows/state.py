"""More rows: saving and loading state, adapters, generation, and tools."""

from __future__ import annotations

import copy
import enum
import functools
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import autotp
from benchmarks.workflows.rows import SGD, row
from benchmarks.workflows.side import Net, Side, batch, check, whole

__all__ = ["ADAMW", "adapted"]

STATE = "State"
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


@row(STATE, "`state_dict()` has the model's names")
def _names(side: Side) -> float:
    model, plain = side.model()
    check([*side.distribute(model).state_dict()] == [*plain.state_dict()])
    return 0.0


@row(STATE, "a full state dict is the plain model's, and loads into it")
def _full(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    other = side.model()[0]
    other.load_state_dict(state)
    return side.apart(other, plain)


def _resumed(side: Side, other: dict[str, Any]) -> float:
    """Saves after two steps, loads into another module, resumes, and compares the losses with the plain model's."""
    model, plain = side.model()
    module = side.distribute(copy.deepcopy(model))
    optimizers = [ADAMW(each.parameters()) for each in (module, plain)]
    for seed in range(2):
        side.step(module, plain, optimizers, batch(seed=seed))
    folder = side.folder()

    def state(each: Any, optimizer: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(each, optimizer)
        return {"model": weights, "optimizer": moments}

    dcp.save(state(module, optimizers[0]), checkpoint_id=folder)
    again = side.distribute(model, **(other if side.ours else {}))
    optimizer = ADAMW(again.parameters())
    loaded = state(again, optimizer)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return max(side.step(again, plain, [optimizer, optimizers[1]], batch(seed=seed)) for seed in range(2, 4))


row(STATE, "`torch.distributed.checkpoint`, with the optimizer", tolerance=1e-7)(lambda side: _resumed(side, {}))
row(STATE, "... into another plan", tolerance=1e-7)(lambda side: _resumed(side, {"strategy": "megatron-1d"}))


@row(STATE, "from a model on `meta`: weights loaded afterwards")
def _meta(side: Side) -> float:
    _, plain = side.model()
    with torch.device("meta"):
        model = type(plain)().double()
    model.head.weight = model.embed.weight
    module = side.distribute(model)
    if not side.ours:
        module.to_empty(device="cpu")
    set_model_state_dict(module, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    return side.apart(module, plain)


@row(STATE, "an averaged model (`swa_utils.AveragedModel`)")
def _averaged(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    averages = [torch.optim.swa_utils.AveragedModel(each) for each in (module, plain)]
    optimizers = [SGD(each.parameters()) for each in (module, plain)]
    for seed in range(2):
        side.step(module, plain, optimizers, batch(seed=seed))
        for average, each in zip(averages, (module, plain), strict=True):
            average.update_parameters(each)
    return side.apart(averages[0].module, averages[1].module)


ADAPTERS = "Adapters and generation"


def adapted(model: nn.Module) -> Any:
    """The model with peft's LoRA on one layer of each block."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["blocks.0.1", "blocks.1.1"], r=2, init_lora_weights=False))


@row(ADAPTERS, "peft's LoRA before distributing: only adapters train; merged afterwards")
def _lora(side: Side) -> float:
    model, _ = side.model()
    model = adapted(model).double()
    plain = copy.deepcopy(model)
    module = side.distribute(model)
    optimizers = [SGD([p for p in each.parameters() if p.requires_grad]) for each in (module, plain)]
    found = max(side.step(module, plain, optimizers, batch(seed=seed)) for seed in range(3))
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    other = adapted(side.model()[0]).double()
    other.load_state_dict(state)
    merged = [each.merge_and_unload()(batch()[0]) for each in (other, plain)]
    return max(found, float((merged[0] - merged[1]).abs().max()))


@row(ADAPTERS, "transformers' `generate` with a static cache: the same tokens")
def _generated(side: Side) -> float | str:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    prompt = torch.randint(3, 64, (4, 5))
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **asked)
    if side.ours:
        from autotp.integrations import WithCache, generate

        example = (prompt, torch.tensor(0), torch.ones(4, 12, dtype=torch.int64))
        module = side.distribute(WithCache(model, 4, 12).eval(), example, mode="inference")
        tokens = generate(module, model, prompt, **asked)
    else:
        module = side.distribute(copy.deepcopy(model))
        tokens = module.generate(prompt, **asked, cache_implementation="static", disable_compile=True)
    check(torch.equal(tokens, expected))
    return 0.0


TOOLS = "Tools"


@row(STATE, "weights in transformers' format: each rank reads its parts")
def _directories(side: Side) -> float | str:
    if not side.ours:
        return "not offered"
    model, plain = side.model()
    module = side.distribute(model)
    folder = side.folder()
    side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    autotp.save_pretrained(module, folder)
    again = side.distribute(side.model()[0], strategy="megatron-1d")
    autotp.load_pretrained(again, folder)
    return side.apart(again, plain)


@row(TOOLS, "a loss outside the model, on logits that stay sharded")
def _outside(side: Side) -> float:
    model, plain = side.model()
    ids, labels = batch()
    module = side.distribute(model, (ids,), outputs="dtensor") if side.ours else side.distribute(model)
    logits = module(*side.part(ids))
    if side.ours:
        check(logits.placements == (Shard(0),))
        logits = logits.to_local()
    rows = labels.tensor_split(side.ranks)[side.rank].flatten()
    (nn.functional.cross_entropy(logits.flatten(0, 1), rows) / (side.ranks if side.ours else 1)).backward()
    plain(ids, labels).backward()
    return side.apart(module, plain, gradients=True)


@row(TOOLS, "a gradient of a gradient")
def _second(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    for each, given in ((module, side.part(*batch())), (plain, batch())):
        parameters = [p for p in each.parameters() if p.dim() > 1]
        first = torch.autograd.grad(each(*given), parameters, create_graph=True)
        sum(whole(g).square().sum() for g in first).backward()
    return side.apart(module, plain, gradients=True)


@row(TOOLS, "`print`, `len`, indices, iteration, `bias is None`")
def _shown(side: Side) -> float:
    module = side.distribute(side.model()[0])
    check("LayerNorm((16,)" in str(module) and len(module.blocks) == 2 and len([*module.blocks[0]]) == 5)
    check(module.head.bias is None and isinstance(module.blocks[1][1], nn.Linear))
    return 0.0


class Scaled(Net):
    """A model with its own data, method, property and argument type; ``train`` keeps its last norm in ``eval()``."""

    class Scale(enum.Enum):
        ONE, TWO = 1.0, 2.0

    factor = 3.0

    @property
    def words(self) -> int:
        return self.embed.num_embeddings

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def train(self, mode: bool = True) -> Scaled:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, ids: Tensor, labels: Tensor | None = None, by: Scale = Scale.ONE) -> Tensor:
        return super().forward(ids, labels, by.value * self.factor)


@row(TOOLS, "data, methods, a property and an own `train()` of the model's class; an `Enum` as argument")
def _own(side: Side) -> float:
    model, plain = side.model(kind=Scaled)
    module = side.distribute(model)
    found = side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    check((module.factor, module.words, module.count()) == (plain.factor, plain.words, plain.count()))
    for each in (module, plain):
        each.train()
    check(module.blocks[0].training and not module.norm.training)
    losses = [side.mean(module(*side.part(*batch()), by=Scaled.Scale.TWO)), plain(*batch(), by=Scaled.Scale.TWO)]
    return max(found, float((losses[0] - losses[1]).abs()))


class Noted(Net):
    """A model whose ``forward`` sets tensors as attributes of itself and of a submodule; the loss uses some of them."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        self.logits = super().forward(ids)
        self.norm.notes = {"penalty": self.logits.square().mean(), "entropy": [-self.logits.softmax(-1).log().mean()]}
        return nn.functional.cross_entropy(self.logits.flatten(0, 1), labels.flatten())


@row(TOOLS, "tensors that `forward` leaves on modules, in the loss and to be read")
def _noted(side: Side) -> float:
    model, plain = side.model(kind=Noted)
    module = side.distribute(model)
    for each, given in ((module, side.part(*batch())), (plain, batch())):
        loss = each(*given)
        (loss + each.norm.notes["penalty"] + each.norm.notes["entropy"][0]).backward()
    logits = side.logits(module.logits)
    return max(float((logits - plain.logits).abs().max()), side.apart(module, plain, gradients=True))


@row(TOOLS, "weight decay by the class of submodules (`isinstance`)")
def _by_class(side: Side) -> float:
    model, plain = side.model()
    module, optimizers = side.distribute(model), []
    for each in (module, plain):
        norms = [p for m in each.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
        rest = [p for p in each.parameters() if all(p is not norm for norm in norms)]
        check(len(norms) == 6)
        optimizers.append(SGD([{"params": rest, "weight_decay": 0.5}, {"params": norms}]))
    return max(max(side.step(module, plain, optimizers, batch(seed=s)) for s in range(3)), side.apart(module, plain))


@row(TOOLS, "a `Sequential` that is indexed")
def _indexed(side: Side) -> float:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double(), torch.randn(8, 8).double()
    plain = copy.deepcopy(model)
    module = side.distribute(model, (x,))
    for each, given in ((module, side.part(x)), (plain, (x,))):
        each(*given).square().mean().backward()
    check(len(module) == 3 and isinstance(module[0], nn.Linear) and isinstance(module[-1], nn.Linear))
    return max(side.apart(a, b, gradients=True) for a, b in ((module[0], plain[0]), (module[-1], plain[-1])))


@row(TOOLS, "hooks of the module, and on gradients of parameters")
def _hooks(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    seen: list[str] = []
    for each in (module, plain):
        each.register_forward_hook(lambda *_: seen.append("forward"))
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    check(seen.count("forward") == 2 and seen.count("gradient") == 2 * len([*plain.parameters()]))
    return side.apart(module, plain)


@row(TOOLS, "forward hooks on submodules, which only look (autotp: `observe=`)")
def _observed(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model, observe=["blocks.*"]) if side.ours else side.distribute(model)
    seen: dict[Any, list[Any]] = {module: [], plain: []}
    for each, found in seen.items():
        for block in each.blocks:
            block.register_forward_pre_hook(lambda _, given, found=found: found.append(given[0].detach().clone()))
            block.register_forward_hook(lambda _, given, made, found=found: found.append(made.detach().clone()))
    step = side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    mine = [side.logits(each) for each in seen[module]]
    check(len(mine) == len(seen[plain]) == 4)
    return max(step, *(float((a - b).abs().max()) for a, b in zip(mine, seen[plain], strict=True)))


@row(TOOLS, "`torch.utils.checkpoint` around the module")
def _checkpointed(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    checkpoint(module, *side.part(*batch()), use_reentrant=False).backward()
    plain(*batch()).backward()
    return side.apart(module, plain, gradients=True)


@row(TOOLS, "`torch.profiler`")
def _profiled(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    with torch.profiler.profile() as profile:
        found = side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    check(any("mm" in event.key or "linear" in event.key for event in profile.key_averages()))
    return found


@row(TOOLS, "`torch.compile(module)` changes no result")
def _compiled(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    compiled = torch.compile(module, backend="eager")
    compiled(*side.part(*batch())).backward()
    plain(*batch()).backward()
    return side.apart(module, plain, gradients=True)


@row(TOOLS, "`copy.deepcopy` of the module")
def _copied(side: Side) -> float:
    model, plain = side.model()
    module = copy.deepcopy(side.distribute(model))
    return side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
