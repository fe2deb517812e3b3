"""Weights of Hugging Face directories, loaded into a model that was on meta and saved again, on two ranks."""

import tempfile
from pathlib import Path

import safetensors
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import Replicate, Shard

import autotp

SMALL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}


def gpt2(dtype, cls=transformers.GPT2LMHeadModel):
    """A GPT-2 with tied embeddings and a fused query-key-value weight."""
    return cls(transformers.GPT2Config(vocab_size=96, n_embd=16, n_head=4, n_layer=2, n_positions=16, **SMALL)).to(dtype)


def llama(dtype, cls=transformers.LlamaForCausalLM):
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return cls(config).to(dtype)


def tokens():
    return torch.arange(64).reshape(4, 16) % 96


def on_meta(make, dtype, strategy="megatron-1d", **kwargs):
    """A distributed module of a model on meta, with other values than any that are saved."""
    with torch.device("meta"):
        model = make(dtype, **kwargs)
    torch.manual_seed(99)
    return autotp.parallelize(model, None, kwargs={"input_ids": tokens()}, strategy=strategy, mesh=(2,))


def shared_folder():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def saved(model, **kwargs):
    """Saves a model by transformers; returns the folder."""
    folder = shared_folder()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, **kwargs)
    dist.barrier()
    return folder


def require_equal(found, state):
    assert found.keys() == state.keys()
    for name, value in found.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert whole.dtype == state[name].dtype and torch.equal(whole, state[name]), name


class Counting:
    """Wraps ``safetensors.safe_open``, and counts the bytes that are read."""

    def __init__(self, open_):
        self.open, self.read, self.largest = open_, 0, 0

    def __call__(self, *args):
        self.file = self.open(*args)
        return self

    def __enter__(self):
        self.entered = self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.entered.keys()

    def get_slice(self, key):
        counting, found = self, self.entered.get_slice(key)

        class Slice:
            get_shape, get_dtype = found.get_shape, found.get_dtype

            def __getitem__(self, index):
                value = found[index]
                counting.read += value.nbytes
                counting.largest = max(counting.largest, value.nbytes)
                return value

        return Slice()


def refused(words, call, *args, **kwargs):
    """Checks that every rank raises an error; ``words[rank]`` must be part of it."""
    try:
        call(*args, **kwargs)
    except autotp.AutotpError as error:
        assert words[dist.get_rank()] in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def round_trip():
    """What transformers saves is loaded bit for bit, and transformers loads bit for bit what is saved here."""
    for make, dtype in ((gpt2, torch.float32), (llama, torch.float64)):
        torch.manual_seed(3)
        model = make(dtype)
        folder = saved(model, max_shard_size="8KB")
        assert len(list(folder.glob("model-*.safetensors"))) >= 2
        for strategy in ("megatron-1d", "zero3"):
            parallel = on_meta(make, dtype, strategy)
            blocks = [p for v in parallel.parameters() for p in v.placements if type(p) not in (Shard, Replicate)]
            assert bool(blocks) == (make is gpt2 and strategy == "megatron-1d"), "blocks are split"
            before = parallel(input_ids=tokens()).logits
            counting = safetensors.safe_open = Counting(safetensors.safe_open)
            assert autotp.load_pretrained(parallel, folder) == ((), ())
            safetensors.safe_open = counting.open
            local = [value.to_local().nbytes for value in parallel.parameters()]
            assert counting.read == sum(local) and counting.largest <= max(local), (counting.read, local)
            assert counting.read < 0.75 * sum(p.nbytes for p in model.parameters())
            require_equal(parallel.state_dict(), model.state_dict())
            after = parallel(input_ids=tokens()).logits
            assert not torch.allclose(before, after)
            torch.testing.assert_close(after, model(input_ids=tokens()).logits, rtol=1e-4, atol=1e-6)

            with torch.no_grad():
                for value in parallel.parameters():
                    value.mul_(1.5)
            written = shared_folder()
            autotp.save_pretrained(parallel, written, config=model.config, max_shard_size="16 kB")
            sizes = [path.stat().st_size for path in written.glob("model-*.safetensors")]
            assert len(sizes) >= 2 and max(sizes) < 20000, sizes
            now = {name: value.full_tensor() for name, value in parallel.state_dict().items()}
            if dist.get_rank() == 0:
                read, info = type(model).from_pretrained(written, output_loading_info=True)
                assert not any(info.values()), info
                require_equal(now, read.state_dict())
            # The directory had several files, and now has one.
            autotp.save_pretrained(parallel, str(written), config=model.config)
            assert sorted(path.name for path in written.iterdir()) == ["config.json", "model.safetensors"]
            again = on_meta(make, dtype, strategy)
            autotp.load_pretrained(again, written)
            require_equal(again.state_dict(), now)


def heads():
    """Files of the model without its head, and files with the head for a module without one."""
    for make, whole, base in (
        (gpt2, transformers.GPT2LMHeadModel, transformers.GPT2Model),
        (llama, transformers.LlamaForCausalLM, transformers.LlamaModel),
    ):
        torch.manual_seed(4)
        model = make(torch.float32, cls=whole)
        inner = model.base_model
        parallel = on_meta(make, torch.float32, cls=whole)
        if make is gpt2:  # the head's weight is tied to the embedding's
            assert autotp.load_pretrained(parallel, saved(inner)) == ((), ())
            require_equal(parallel.state_dict(), model.state_dict())
        else:
            folder, head = saved(inner), parallel.get_parameter("lm_head.weight").full_tensor()
            refused(["the files lack lm_head.weight. Give"] * 2, autotp.load_pretrained, parallel, folder)
            assert autotp.load_pretrained(parallel, folder, strict=False) == (("lm_head.weight",), ())
            require_equal(parallel.state_dict(), model.state_dict() | {"lm_head.weight": head})
        parallel, folder = on_meta(make, torch.float32, cls=base), saved(model)
        if make is gpt2:
            assert autotp.load_pretrained(parallel, folder) == ((), ())
        else:
            refused(["the model has no lm_head.weight. Give"] * 2, autotp.load_pretrained, parallel, folder)
            assert autotp.load_pretrained(parallel, folder, strict=False) == ((), ("lm_head.weight",))
        require_equal(parallel.state_dict(), inner.state_dict())


class Broken:
    """A configuration that cannot be written."""

    def save_pretrained(self, folder):
        raise OSError(28, "No space left on device")


def errors():
    """An error of one rank is raised on all ranks, and nothing is changed."""
    model, rank = gpt2(torch.float32), dist.get_rank()
    folder, nowhere = saved(model), shared_folder()
    parallel = on_meta(gpt2, torch.float32)
    before = {name: value.full_tensor().clone() for name, value in parallel.state_dict().items()}
    ours = f"{nowhere} has neither model.safetensors nor model.safetensors.index.json"
    refused((f"rank 1: {ours}", ours), autotp.load_pretrained, parallel, nowhere if rank else folder)
    require_equal(parallel.state_dict(), before)
    none = "None is no path: give the name of a directory"
    refused((f"rank 1: {none}", none), autotp.load_pretrained, parallel, None if rank else folder)

    def initialise(module):
        if rank == 1:
            raise FileNotFoundError("no weights here")
        module.reset_parameters()

    with torch.device("meta"):
        linear, example = torch.nn.Linear(4, 4), (torch.zeros(4, 4),)
    said = "cannot initialise the model: no weights here"
    refused((f"rank 1: {said}", said), autotp.parallelize, linear, None, example, initialise=initialise)
    said = "strategy 'typo' is unknown"
    options = {"strategy": "zero3" if rank else "typo"}
    refused((said, f"rank 0: {said}"), autotp.parallelize, torch.nn.Linear(4, 4), None, example, **options)

    written = (folder / "model.safetensors").read_bytes()
    config = Broken() if rank == 0 else None
    full = f"cannot save to {folder}: [Errno 28] No space left on device"
    refused((full, f"rank 0: {full}"), autotp.save_pretrained, parallel, folder, config=config)
    if rank == 0:  # rank 0 alone writes, and may be in the next call already when another looks
        assert not list(folder.glob(".autotp-*")) and (folder / "model.safetensors").read_bytes() == written
    wrong = "config is a int, which has no save_pretrained"
    refused((f"rank 1: {wrong}", wrong), autotp.save_pretrained, parallel, folder, config=5 if rank else None)
    file = folder / "model.safetensors"
    taken = f"cannot save to {file}: [Errno 17] File exists: '{file}'; give a directory"
    refused((taken, f"rank 0: {taken}"), autotp.save_pretrained, parallel, file)
    assert rank or not list(folder.glob(".autotp-*"))
