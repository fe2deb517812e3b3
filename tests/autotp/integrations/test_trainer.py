"""What Trainer and Accelerator refuse; ``tests/whole/test_torchrun.py`` tests that they train as one process does."""

import subprocess
import sys

import peft
import pytest
import tokenizers
import torch
import transformers
from thinned import thinned

import autotp
from autotp.integrations.accelerator import Accelerator
from autotp.integrations.adapters import is_adapted
from autotp.integrations.trainer import Trainer, _check
from autotp.integrations.training_state import load_optimizer, load_random, save_optimizer


def test_a_plain_module_is_refused():
    with pytest.raises(autotp.AutotpError, match="Linear is not a distributed module: pass what autotp.parallelize"):
        Trainer(torch.nn.Linear(2, 2))
    with pytest.raises(autotp.AutotpError, match="Linear is not a distributed module"):
        Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"bf16": True}, "pass precision= to autotp.parallelize"),
        ({"gradient_checkpointing": True}, "pass recompute= to autotp.parallelize"),
        ({"neftune_noise_alpha": 0.1}, "before it is distributed"),
        ({"auto_find_batch_size": True}, "give the batch size"),
    ],
)
def test_arguments_that_change_the_model_are_refused(tmp_path, options, instead):
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
    with pytest.raises(autotp.AutotpError, match=f"TrainingArguments.{next(iter(options))}=.*{instead}"):
        _check(args)


def test_arguments_as_they_are_by_default_are_accepted(tmp_path):
    _check(transformers.TrainingArguments(str(tmp_path), use_cpu=True))


def test_transformers_adafactor_is_refused(tmp_path):
    with pytest.raises(autotp.AutotpError, match="Adafactor takes no DTensor"):
        _check(transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", optim="adafactor"))


@pytest.mark.slow
def test_a_tokenizers_special_tokens_are_saved(one_rank, tmp_path):
    config = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, use_cache=False))
    ids = torch.randint(8, (2, 4))
    example = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(1.0)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<pad>": 7}, unk_token="a"))
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(
        autotp.parallelize(model, kwargs=example),
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>"),
    )
    trainer.train()
    trainer.save_model()
    assert transformers.AutoConfig.from_pretrained(tmp_path).pad_token_id == 7


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_smoothed_labels_are_shifted_as_for_the_model(one_rank, tmp_path, adapted):
    def build():
        torch.manual_seed(0)
        config = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, num_attention_heads=4, use_cache=False))
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])) if adapted else model

    ids = torch.randint(64, (4, 12))
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=4, label_smoothing_factor=0.1, report_to="none", use_cpu=True
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    parallel = autotp.parallelize(build(), kwargs={"input_ids": ids})
    losses = [
        kind(model, args, eval_dataset=rows).evaluate()["eval_loss"]
        for kind, model in ((transformers.Trainer, build()), (Trainer, parallel))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_checkpoint_from_before_there_was_a_scheduler(one_rank, tmp_path):
    x = torch.ones(2, 2)
    parallel = autotp.parallelize(torch.nn.Linear(2, 2), None, (x,))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    for _ in range(2):
        parallel(x).sum().backward()
        optimizer.step()
        if not (tmp_path / "optimizer").exists():
            save_optimizer(parallel, optimizer, tmp_path / "optimizer")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    load_optimizer(parallel, optimizer, tmp_path / "optimizer")
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    damaged = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.5)
    with pytest.raises(autotp.AutotpError, match="has no whole state of the optimizer"):
        load_optimizer(parallel, damaged, tmp_path / "optimizer")


def test_a_save_before_the_first_step_is_no_step(one_rank, tmp_path):
    x = torch.ones(2, 2)
    parallel = autotp.parallelize(torch.nn.Linear(2, 2), None, (x,))
    saving, loading = (torch.optim.AdamW(parallel.parameters(), lr=0.1) for _ in range(2))
    save_optimizer(parallel, saving, tmp_path / "optimizer")
    load_optimizer(parallel, loading, tmp_path / "optimizer")
    for optimizer in (saving, loading):
        assert not optimizer.state
        parallel(x).sum().backward()
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_an_optimizer_that_has_stepped_without_a_parameter(one_rank, tmp_path):
    x = torch.ones(2, 2)
    model = autotp.parallelize(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), None, (x,))
    one, other = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    for optimizer, frozen in ((one, False), (other, True)):
        model[1].requires_grad_(not frozen)
        model(x).sum().backward()
        optimizer.step()
        model.zero_grad()
    save_optimizer(model, one, tmp_path / "optimizer")
    model.requires_grad_()
    with pytest.raises(autotp.AutotpError, match="the optimizer has stepped without 1.weight, of which .* load a new one"):
        load_optimizer(model, other, tmp_path / "optimizer")
    load_optimizer(model, new := torch.optim.AdamW(model.parameters(), lr=0.1), tmp_path / "optimizer")
    assert len(new.state) == 4


def test_what_an_optimizer_of_accelerates_steps(one_rank, tmp_path):
    accelerator, x = Accelerator(cpu=True), torch.ones(2, 2)
    one, other = (autotp.parallelize(torch.nn.Linear(2, 2), None, (x,)) for _ in range(2))
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    accelerator.prepare(one, other, optimizer)
    with pytest.raises(autotp.AutotpError, match="steps parameters of more than one module"):
        accelerator.save_state(str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()


def test_a_number_of_the_last_batch_is_gathered_as_it_is(one_rank):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(5.0), batch_size=2))
    found = [accelerator.gather_for_metrics((x, x.sum())) for x in loader]
    assert [(len(x), float(total)) for x, total in found] == [(2, 1.0), (2, 5.0), (1, 4.0)]


def test_one_adapter_is_trained_at_a_time():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert not is_adapted(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    assert is_adapted(adapted)
    adapted.add_adapter("second", peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(autotp.AutotpError, match="the adapters default, second: keep the one"):
        is_adapted(adapted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "absent"),
    thinned([("trainer", "transformers"), ("accelerator", "accelerate"), ("lightning", "lightning")], 3),
)
def test_without_a_framework_autotp_is_there_and_says_what_to_install(module, absent):
    program = f"""
import sys
sys.modules[{absent!r}] = None
import autotp, autotp.integrations
try:
    import autotp.integrations.{module}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "needs" in done.stdout and f"pip install '{absent}" in done.stdout


@pytest.mark.parametrize("damaged", [b"", b"q", b"M", b"r", b"]q\x00h\x05.", b"\x80\x02t.", b"cos\nsystem\n"])
def test_damaged_states_of_generators_are_named(tmp_path, damaged):
    """torch's unpickler raises errors of many classes."""
    (tmp_path / "state.pt").write_bytes(damaged)
    with pytest.raises(autotp.AutotpError, match=r"state.pt has no whole states of torch's generators \("):
        load_random(tmp_path / "state.pt")
