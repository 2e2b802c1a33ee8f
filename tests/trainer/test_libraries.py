"""Scripts of Transformers, TRL, Accelerate, Lightning and timm, unchanged, as runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, read_json

from trainyard.run_file.code.code_archive import pack
from trainyard_trainer.config.trainer_config import CODE_VARIABLE, CommandConfig
from trainyard_trainer.errors import RunError
from trainyard_trainer.user_code.library_hook.complete import newest_transformers_checkpoint
from trainyard_trainer.user_code.library_hook.output import FINISHED
from trainyard_trainer.user_code.library_results import open_to_group, require_finished
from trainyard_trainer.user_code.library_variables import VARIABLES, library_variables, table

ROOT = Path(__file__).parents[2]

KILL = """
import os, sys, time, torch
KILLED = os.path.join(os.environ["TRAINYARD_STORAGE"], "killed")
def kill(step, rank):
    time.sleep(0.02)
    if len(sys.argv) > 1 and step == 13 and rank == 1 and not os.path.exists(KILLED):
        open(KILLED, "w").close()
        os.kill(os.getpid(), 9)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(index)
        words = torch.randint(0, 50, (16,), generator=numbers)
        return {"input_ids": words, "labels": words}
"""

TRANSFORMERS = (
    KILL
    + """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
class Kill(TrainerCallback):
    def on_step_end(self, arguments, state, control, **others):
        print(f"step {state.global_step} of {arguments.world_size} workers", flush=True)
        kill(state.global_step, arguments.process_index)
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
)
arguments = TrainingArguments(
    "out", max_steps=20, per_device_train_batch_size=4, save_steps=5, report_to=[], disable_tqdm=True
)
trainer = Trainer(model, arguments, train_dataset=Data(), callbacks=[Kill()])
trainer.train()
trainer.save_model("final")
assert os.path.exists("out/checkpoint-20")
"""
)

TRL = (
    KILL
    + """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer
words = {word: number for number, word in enumerate(["<pad>", "<end>", *(f"w{n}" for n in range(48))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
)
class Kill(TrainerCallback):
    def on_step_end(self, arguments, state, control, **others):
        print(f"step {state.global_step} of {arguments.world_size} workers", flush=True)
        kill(state.global_step, arguments.process_index)
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64)
)
arguments = SFTConfig(
    "out", max_steps=20, per_device_train_batch_size=4, save_steps=5, report_to=[], disable_tqdm=True,
    bf16=False, gradient_checkpointing=False, max_length=16, logging_steps=20,
)
texts = [{"text": " ".join(f"w{(n * k) % 48}" for k in range(12))} for n in range(64)]
trainer = SFTTrainer(
    model, arguments, train_dataset=Dataset.from_list(texts), processing_class=tokenizer, callbacks=[Kill()]
)
trainer.train()
trainer.save_model("final")
"""
)

LIGHTNING = (
    KILL
    + """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)
    def training_step(self, batch, index):
        step = self.trainer.global_step + 1
        print(f"step {step} of {self.trainer.world_size} workers", flush=True)
        kill(step, self.global_rank)
        return self.layer(batch["input_ids"].float()).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)
torch.manual_seed(0)
trainer = lightning.Trainer(
    max_steps=24, logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint("out", every_n_train_steps=8, save_top_k=-1)],
)  # An epoch has 8 steps: after a checkpoint in the middle of one, Lightning begins its data anew.
trainer.fit(Model(), torch.utils.data.DataLoader(Data(), batch_size=4))
"""
)

ACCELERATE = (
    KILL
    + """
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(16, 1)
model, data = accelerator.prepare(model, torch.utils.data.DataLoader(Data(), batch_size=4))
for batch in data:
    accelerator.backward(model(batch["input_ids"].float()).mean())
print(f"step 20 of {accelerator.num_processes} workers", flush=True)
"""
)

TIMM = """
import os, timm, torch
torch.distributed.init_process_group("gloo")
model = timm.create_model("resnet10t", pretrained=False, num_classes=2)
model = torch.nn.parallel.DistributedDataParallel(model)
model(torch.ones(2, 3, 32, 32)).sum().backward()
print(f"step 20 of {torch.distributed.get_world_size()} workers", flush=True)
try:
    timm.create_model("resnet10t", pretrained=True)
except Exception as error:
    print("offline", type(error).__name__, flush=True)
torch.distributed.destroy_process_group()
"""


def config_of(
    attempts: Attempts, tmp_path: Path, script: str, *command: str, **changes: Any
) -> Any:
    """The config of a run of a script on two workers of torchrun, and its environment."""
    folder = tmp_path / "code"
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    code = pack(folder)
    document = {
        "name": "own",
        "command": list(command) or ["script.py"],
        "run_with": "torchrun",
        "scaling": {"num_workers": 2, "use_gpu": False, "cpus_per_worker": 1},
        "storage": {"path": str(attempts.storage)},
        "code_sha256": code.sha256,
    }
    return CommandConfig.model_validate(document | changes), {CODE_VARIABLE: code.text}


def weights_in(run: Path) -> dict[str, Any]:
    """The weights with which a run has ended, from the files of Transformers or of Lightning."""
    import torch
    from safetensors.torch import load_file

    if (run / "final").is_dir():
        return load_file(run / "final/model.safetensors")
    (checkpoint,) = (run / "out").glob("*step=24.ckpt")
    return torch.load(checkpoint, weights_only=True)["state_dict"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "folder"),
    [
        pytest.param(TRANSFORMERS, "out/checkpoint-20", id="transformers"),
        pytest.param(TRL, "out/checkpoint-20", id="trl"),
        pytest.param(LIGHTNING, "out", id="lightning"),
    ],
)
def test_a_script_without_a_resume_line_goes_on_after_a_kill_to_the_same_weights(
    attempts: Attempts, tmp_path: Path, script: str, folder: str
) -> None:
    config, environment = config_of(attempts, tmp_path, script, "script.py", "kill")
    output = attempts.finish(config, 0, environment)
    assert "resuming from" in output
    assert "step 20 of 2 workers" in output
    assert "step 1 of 1 workers" not in output
    assert len(re.findall("step 3 of 2", output)) == 2  # once by each worker
    run = attempts.storage / "own"
    assert (run / folder).is_dir()
    for path in run.rglob("*.safetensors"):
        assert path.stat().st_mode & 0o040, path
    config, environment = config_of(attempts, tmp_path, script, name="undisturbed")
    assert "resuming from" not in attempts.finish(config, 0, environment)
    found, expected = weights_in(run), weights_in(attempts.storage / "undisturbed")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not found[name].equal(expected[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param(ACCELERATE, id="accelerate"), pytest.param(TIMM, id="timm")]
)
def test_workers_of_a_library_train_one_model(
    attempts: Attempts, tmp_path: Path, script: str
) -> None:
    config, environment = config_of(attempts, tmp_path, script)
    output = attempts.finish(config, 0, environment)
    assert output.count("step 20 of 2 workers") == 2
    assert "timm" not in script or "offline" in output


@pytest.mark.slow
def test_a_killed_script_begins_again_if_the_hook_is_switched_off(
    attempts: Attempts, tmp_path: Path
) -> None:
    script = TRANSFORMERS.replace("assert os", "0 and os")
    config, environment = config_of(
        attempts, tmp_path, script, "script.py", "kill", library_hook=False
    )
    output = attempts.finish(config, 0, environment)
    assert "resuming from" not in output
    assert len(re.findall("step 3 of 2", output)) == 4
    assert not (attempts.storage / "own/out").exists()


@pytest.mark.slow
def test_a_script_that_saves_and_ends_at_sigterm_has_not_succeeded(
    attempts: Attempts, tmp_path: Path
) -> None:
    script = TRANSFORMERS.replace("report_to=[]", "report_to=[], enable_jit_checkpoint=True")
    script = script.replace("time.sleep(0.02)", "time.sleep(0.5)")
    script = script.replace("kill(state.global_step, arguments.process_index)", "stop(state)")
    script = script.replace(
        "class Kill(",
        "def stop(state):\n"
        "    time.sleep(0.4)\n"
        "    if state.global_step == 3 and not os.path.exists(KILLED):\n"
        "        open(KILLED, 'w').close()\n"
        "        os.kill(os.getpid(), 15)\n"
        "class Kill(",
    )
    script = script.replace("assert os", "0 and os")
    config, environment = config_of(
        attempts, tmp_path, script, "python", "script.py", run_with=None
    )
    output = attempts.finish(config, 1, environment)
    assert re.search(r"ended with exit code 0 at step \d+ of 20", output)
    assert read_json(config, "summary.json")["outcome"] == "failed"
    output = attempts.finish(config, 0, environment)
    assert "resuming from" in output
    assert read_json(config, "summary.json")["outcome"] == "succeeded"


KILLED_OFTEN = """
import os, signal, time, torch.distributed as distributed
distributed.init_process_group("gloo")
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
value = __import__("torch").ones(1)
for step in range(5):
    distributed.all_reduce(value)
    if restart < KILLS and step == 2 and distributed.get_rank() == restart % 2:
        os.kill(os.getpid(), signal.SIGKILL)
os.write(1, f"ended after {restart} restarts{os.linesep}".encode())
distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.ci), pytest.param(20, marks=pytest.mark.slow)]
)
def test_torchrun_restarts_its_workers_after_each_kill(
    attempts: Attempts, tmp_path: Path, kills: int
) -> None:
    script = KILLED_OFTEN.replace("KILLS", f"{kills}")
    faults = {"worker_failures": kills}
    config, environment = config_of(attempts, tmp_path, script, faults=faults)
    output = attempts.finish(config, 0, environment)
    assert output.count(f"ended after {kills} restarts") == 2


# Whole checkpoints.


def save_checkpoint(folder: Path, *, workers: int = 1, step: int = 10) -> Path:
    """Write a checkpoint of Transformers' Trainer as it lies on disk."""
    import torch
    from safetensors.torch import save_file

    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    ranks = ["rng_state.pth"] if workers == 1 else [f"rng_state_{n}.pth" for n in range(workers)]
    for name in ("optimizer.pt", "scheduler.pt", *ranks):
        torch.save({"state": torch.ones(100)}, checkpoint / name)
    save_file({"weight": torch.ones(100)}, checkpoint / "model.safetensors")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return checkpoint


FILES = (
    *("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"),
    *("model.safetensors", "trainer_state.json"),
)


@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_that_was_cut_off_is_passed_over(
    tmp_path: Path, file: str, damage: str
) -> None:
    before = save_checkpoint(tmp_path, workers=2, step=9)
    path = save_checkpoint(tmp_path, workers=2) / file
    assert newest_transformers_checkpoint(str(tmp_path), 2) == (str(path.parent), True)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    assert newest_transformers_checkpoint(str(tmp_path), 2) == (str(before), True)


def test_a_checkpoint_being_written_at_sigterm_is_passed_over(tmp_path: Path) -> None:
    (save_checkpoint(tmp_path) / "checkpoint-is-incomplete.txt").touch()
    assert newest_transformers_checkpoint(str(tmp_path), 1) == (None, True)
    assert newest_transformers_checkpoint(str(tmp_path / "none"), 1) == (None, False)


def test_checkpoints_of_sharded_optimizers_are_whole_when_their_metadata_is_there(
    tmp_path: Path,
) -> None:
    checkpoint = save_checkpoint(tmp_path)
    for plain, sharded in (
        ("optimizer.pt", "optimizer_0"),
        ("model.safetensors", "pytorch_model_fsdp_0"),
    ):
        (checkpoint / plain).unlink()
        (checkpoint / sharded).mkdir()
        (checkpoint / sharded / "__0_0.distcp").touch()
        assert newest_transformers_checkpoint(str(tmp_path), 1) == (None, True)
        (checkpoint / sharded / ".metadata").touch()
    assert newest_transformers_checkpoint(str(tmp_path), 1) == (str(checkpoint), True)


def test_checkpoints_of_deepspeed_are_whole_when_each_worker_has_its_file(tmp_path: Path) -> None:
    import torch

    checkpoint = save_checkpoint(tmp_path, workers=2)
    (checkpoint / "optimizer.pt").unlink()
    states = checkpoint / "global_step10"
    states.mkdir()
    torch.save({}, states / "mp_rank_00_model_states.pt")
    torch.save({}, states / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (checkpoint / "latest").write_text("global_step10")
    assert newest_transformers_checkpoint(str(tmp_path), 2) == (None, True)
    torch.save({}, states / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert newest_transformers_checkpoint(str(tmp_path), 2) == (str(checkpoint), True)


# Results.


def state(folder: Path, step: int, **others: Any) -> Path:
    path = folder / f"out/checkpoint-{step}/trainer_state.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"global_step": step, "max_steps": 100} | others))
    return path


EARLY_STOPPING = {
    "EarlyStoppingCallback": {
        "args": {"early_stopping_patience": 2},
        "attributes": {"early_stopping_patience_counter": 2},
    }
}


def test_a_trainer_that_has_stopped_before_its_last_step_has_not_succeeded(tmp_path: Path) -> None:
    require_finished(tmp_path, 0)
    path = state(tmp_path, 46)
    with pytest.raises(RunError, match="exit code 0 at step 46 of 100"):
        require_finished(tmp_path, 0)
    require_finished(tmp_path, path.stat().st_mtime + 1)  # of an earlier attempt
    os.utime(path, (1, 1))
    state(tmp_path, 100)
    require_finished(tmp_path, 0)


def test_early_stopping_is_a_success(tmp_path: Path) -> None:
    state(tmp_path, 46, stateful_callbacks=EARLY_STOPPING)
    require_finished(tmp_path, 0)


def test_a_trainer_that_has_returned_without_saving_its_last_step_is_a_success(
    tmp_path: Path,
) -> None:
    state(tmp_path, 46)
    (tmp_path / "out" / FINISHED).write_text('{"global_step": 100}')
    require_finished(tmp_path, 0)


def test_files_that_only_their_owner_can_read_are_opened_to_the_group(tmp_path: Path) -> None:
    file = tmp_path / "out/model.safetensors"
    file.parent.mkdir()
    file.touch(0o600)
    file.parent.chmod(0o700)
    open_to_group(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.parent.stat().st_mode & 0o777 == 0o750


# Variables.


def test_a_variable_of_the_environment_is_not_replaced() -> None:
    names = {variable.name for variable in VARIABLES if variable.when == "always"}
    assert {"HF_HUB_OFFLINE", "RAY_TRAIN_ENABLE_PRINT_PATCH"} <= names
    found = library_variables(["always"], {"HF_HUB_OFFLINE": "0"}, {})
    assert found.keys() == names - {"HF_HUB_OFFLINE"}


def test_the_guide_lists_all_variables() -> None:
    assert table() in (ROOT / "docs/guides/libraries.md").read_text(), "run `make golden`"
