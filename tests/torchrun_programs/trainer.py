"""transformers' Trainer and accelerate with a distributed module, compared with the plain model in one process."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import autotp
from autotp.integrations.accelerator import Accelerator
from autotp.integrations.trainer import Trainer

WHOLE = StateDictOptions(full_state_dict=True)
#: Variables that torchrun sets; without them, a process runs alone.
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def adapted():
    """A model with LoRA adapters: of one adapter both matrices are trained, of the other only one."""
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(llama(), lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj.lora_B" in name or "down_proj.lora" in name)
    return model


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.head = torch.nn.Embedding(64, 8), torch.nn.BatchNorm1d(12), torch.nn.Linear(8, 64)

    def forward(self, input_ids, labels):
        scores = self.head(self.norm(self.table(input_ids)))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


def vera():
    return peft.get_peft_model(Normed(), peft.VeraConfig(r=4, target_modules=["head"])).double()


def normed():
    return peft.get_peft_model(Normed(), peft.LoraConfig(r=2, target_modules=["head"], modules_to_save=["norm"])).double()


def gpt2(dropout):
    """A GPT-2 with tied embeddings and a fused query-key-value weight."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_head=4, n_layer=1, n_positions=16, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def data(rows):
    """Rows with different numbers of labels."""
    made = []
    for row in range(rows):
        ids = torch.randint(64, (12,), generator=torch.Generator().manual_seed(row))
        made.append({"input_ids": ids, "labels": torch.where(torch.arange(12) < row % 5, -100, ids)})
    return made


def arguments(folder, **more):
    settings = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no", "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "weight_decay": 0.1,
        "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **settings | more)


def trained(kind, model, args, resume=None, rows=18):
    trainer = kind(model, args, train_dataset=data(rows), eval_dataset=data(rows // 2))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer):
    """The logged values of each step and evaluation, except those that depend on time."""
    names = (
        "loss",
        "grad_norm",
        "learning_rate",
        "eval_loss",
        "epoch",
        "total_flos",
        "train_loss",
        "num_input_tokens_seen",
    )
    return [{name: each[name] for name in names if name in each} for each in trainer.state.log_history]


def distributed(model, strategy="megatron-1d", counted=True, **options):
    ids = torch.zeros(4, 12, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids} | ({"num_items_in_batch": torch.tensor(1.0)} if counted else {})
    return autotp.parallelize(model, kwargs=batch, strategy=strategy, **options)


def shared_folder():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def plain(make, folder, rows=18):
    """Runs Trainer on the plain model in one process, which saves it in the folder; returns what Trainer logs."""
    if dist.get_rank() == 0:
        alone = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        subprocess.run([sys.executable, __file__, make.__name__, str(folder), str(rows)], env=alone, check=True)
    dist.barrier()
    return json.loads((folder / "log.json").read_text())


def require_close(found, wanted, norms=1e-9):
    """Compares logs; losses are logged in float32, norms in full precision."""
    assert len(found) == len(wanted), (found, wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys(), (one, other)
        for name, value in one.items():
            tolerance = norms if name == "grad_norm" else 1e-6
            assert abs(value - other[name]) <= tolerance * abs(other[name]), (name, value, other)


def losses():
    """Accumulation, clipping, evaluation, smaller last batches, and varying numbers of labels."""
    folder = shared_folder()
    wanted = plain(llama, folder)
    parallel = distributed(llama())
    trainer = trained(Trainer, parallel, arguments(folder / "here"))
    require_close(logged(trainer), wanted)
    assert len(parallel.programs) == 4, [*map(str, parallel.programs)]  # training: 4 and 2 rows; evaluation: 4 and 1
    trainer.save_model(str(folder / "ours"))
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(folder / name) for name in ("ours", "plain"))
    assert type(one) is type(other) is transformers.LlamaForCausalLM
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)
    scores, labels = trainer.predict(data(9))[:2]
    assert scores.shape == (9, 12, 64) and labels.shape == (9, 12)
    with torch.no_grad():
        wanted = other(torch.stack([row["input_ids"] for row in data(9)])).logits
    torch.testing.assert_close(torch.from_numpy(scores), wanted, rtol=1e-6, atol=1e-6)


def resumed(strategy, dropout):
    """The logs of a run, and of one resumed from its checkpoint with another plan, of a model with other weights."""
    folder, other = shared_folder(), shared_folder()
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    saving |= {"load_best_model_at_end": True, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    whole = trained(Trainer, distributed(gpt2(0.1), dropout=dropout), arguments(folder, **saving), rows=16)
    assert whole.state.best_global_step == 4
    best = transformers.GPT2LMHeadModel.from_pretrained(whole.state.best_model_checkpoint)
    for name, value in whole.model.named_parameters():
        torch.testing.assert_close(value.full_tensor(), best.get_parameter(name), rtol=0, atol=0)
    model = gpt2(0.1)
    torch.nn.init.normal_(model.lm_head.weight)
    again = distributed(model, strategy, dropout=dropout)
    torch.manual_seed(5)
    rest = trained(Trainer, again, arguments(other, **saving), str(folder / "checkpoint-2"), rows=16)
    # The last entry is about the losses since the run began or was resumed.
    return logged(whole)[:-1], logged(rest)[:-1]


def resume():
    """A resumed run draws the dropout masks that an uninterrupted run draws."""
    whole, rest = resumed("megatron-1d", "sharded")
    assert whole == rest, (whole, rest)


def resume_with_another_plan():
    whole, rest = resumed("zero3", "as-single")
    require_close(rest, whole, norms=1e-4)


def adapters():
    """Only the adapter is trained and saved; merged afterwards, it equals that of the plain model."""
    folder = shared_folder()
    wanted = plain(adapted, folder, rows=16)
    parallel = distributed(adapted())
    more = {"average_tokens_across_devices": False}
    args = arguments(folder / "here", save_strategy="steps", save_steps=3, **more)
    trainer = trained(Trainer, parallel, args, rows=16)
    require_close(logged(trainer), wanted)
    trainer.save_model(str(folder / "ours"))
    one, other = (peft.PeftModel.from_pretrained(llama(), folder / name) for name in ("ours", "plain"))
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)

    # All weights, gathered and loaded into a plain model with an adapter.
    whole = adapted()
    whole.load_state_dict(get_model_state_dict(parallel, options=WHOLE))
    for name, value in llama().named_parameters():
        path = f"base_model.model.{name}"
        path = path if path in whole.state_dict() else path.replace(".weight", ".base_layer.weight")
        torch.testing.assert_close(whole.get_parameter(path), value, rtol=0, atol=0)
    ids = data(1)[0]["input_ids"][None]
    merged, expected = (each.merge_and_unload().eval()(ids).logits for each in (whole, other))
    torch.testing.assert_close(merged, expected, rtol=1e-9, atol=1e-12)

    again, checkpoint = distributed(adapted()), folder / "here" / "checkpoint-3"
    rest = trained(Trainer, again, arguments(folder / "here", **more), str(checkpoint), rows=16)
    assert logged(rest)[:-1] == logged(trainer)[:-1]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(checkpoint / "optimizer")
    dist.barrier()
    with pytest.raises(autotp.AutotpError, match="has scheduler.pt, but no folder 'optimizer'"):
        trained(Trainer, again, arguments(folder / "here"), str(checkpoint), rows=16)

    for make in (vera, normed):  # adapters with buffers
        wanted = plain(make, folder / make.__name__, rows=16)
        trainer = trained(Trainer, distributed(make(), counted=False), arguments(folder / "here"), rows=16)
        require_close(logged(trainer), wanted)
        trainer.save_model(str(folder / make.__name__ / "ours"))
        one, other = (peft.PeftModel.from_pretrained(Normed(), folder / make.__name__ / name) for name in ("ours", "plain"))
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-7)


def parts(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.utils.data.DataLoader(data(18), batch_size=4)
    return model, optimizer, batches, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def by_hand(model, optimizer, batches, scheduler):
    for number, batch in enumerate(batches, start=1):
        loss = model(**batch).loss
        (loss / 2).backward()
        if number % 2 == 0 or number == len(batches):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield loss.item()


def by_accelerate(accelerator, model, optimizer, batches, scheduler):
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield loss.item()


def accelerated():
    """accelerate's training loop: accumulation, clipping, a scheduler, and a state that is saved and loaded."""
    folder, whole = shared_folder(), parts(llama())
    first, second = [*by_hand(*whole)], [*by_hand(*whole)]
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    prepared = accelerator.prepare(*parts(distributed(llama(), counted=False)))
    found = torch.tensor([*by_accelerate(accelerator, *prepared)], dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor(first, dtype=torch.float64), rtol=1e-9, atol=0)
    state = accelerator.get_state_dict(prepared[0])
    assert state.keys() == (whole[0].state_dict().keys() if dist.get_rank() == 0 else set())
    accelerator.save_state(str(folder))

    accelerator.free_memory()
    model = llama()
    torch.nn.init.normal_(model.lm_head.weight)
    prepared = accelerator.prepare(*parts(distributed(model, "zero3", counted=False)))
    accelerator.load_state(str(folder))
    found = torch.tensor([*by_accelerate(accelerator, *prepared)], dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor(second, dtype=torch.float64), rtol=1e-9, atol=0)


if __name__ == "__main__":  # runs the plain model in one process
    made, into = globals()[sys.argv[1]](), Path(sys.argv[2])
    alone = trained(transformers.Trainer, made, arguments(into), rows=int(sys.argv[3]))
    alone.save_model(str(into / "plain"))
    (into / "log.json").write_text(json.dumps(logged(alone)))
