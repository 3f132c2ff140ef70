"""A user's mistake ends with exit code 2 and one line that names the mistake, its place and the remedy."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertLMHeadModel

from braidrl.cli import commands as cli
from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.saving.folders import latest_checkpoint, new_run_folder
from tests.tiny import ROOT, Workshop, sums, write_jsonl

Braid = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Braid:
    """Return a function that runs `braid ...` in this process and returns exit code, stdout and stderr."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["braid", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def refusal(command: Braid) -> Callable[..., str]:
    """Return the one line that `braid ...` ends with."""

    def run(*arguments: Any) -> str:
        code, _, errors = command(*arguments)
        assert code == 2, errors
        assert "Traceback" not in errors
        lines = [line for line in errors.splitlines() if line.startswith("braid: ")]
        assert len(lines) == 1 and errors.endswith(lines[0] + "\n"), errors
        return lines[0].removeprefix("braid: ")

    return run


Refusal = Callable[..., str]
CONFIGURATION = {
    "trainer.stepz=3": r"unknown key 'trainer.stepz'. Did you mean 'steps'?",
    "trainer.routing_gap=true": r"unknown key 'trainer.routing_gap'. Did you mean 'trainer.balance.routing_gap'?",
    "trianer.steps=3": r"unknown key 'trianer'. Did you mean 'trainer'?",
    "data.train={path: a.jsonl, verifier: exact}": r"unknown key 'data.train.0.verifier'. Did you mean 'verify'?",
    "data.train.verify=exact": r"'data.train.verify=exact': 'train' holds a value, not a section",
    "trainer.steps=many": r"trainer.steps: Input should be a valid integer.*, got 'many'",
    "trainer.steps": r"'trainer.steps' is not key=value, as in trainer.steps=10",
    "flow=grop": r"no recipe is called 'grop'. Did you mean 'grpo'?",
    "flow=gpro": r"no recipe is called 'gpro'. Did you mean 'grpo'[?]",
    "flow=ppo": (
        r"^roles.reward.model: .* has no trained score head; .* with algorithm.reward=verify the recipe ppo needs "
        r"none$"
    ),
    "data=sums.jsonl": r"^data is a section with keys such as train, eval, held_out, got 'sums.jsonl'$",
    "data.eval=sums.jsonl": r"^data.eval has values by name; write data.eval.NAME=..., got 'sums.jsonl'$",
    "name=a/b": r"^name: a name has neither slashes nor control characters, .*, got 'a/b'$",
    "trainer=": r"^trainer is empty; write its keys below it, or remove it$",
    "algorithm.clip_hihg=0.3": r"recipe grpo: no parameter is called 'clip_hihg'. Did you mean 'clip_high'?",
    "algorithm.clip_low=3": r"recipe grpo: clip_low: Input should be less than .*1, got 3",
    "trainer.rows_per_update=5": r"trainer.rows_per_update=5 .*16",
    "reward.verify=gsm8": r"no verifier is called 'gsm8'. Did you mean 'gsm8k'?",
    "reward.verify=code": (
        r"runs what a model wrote, and only in the strict sandbox; write reward.sandbox=bubblewrap and at "
        r"least"
    ),
    "reward.verify=judge.py:score": r"no file .*judge.py",
    "runtime=hybird": r"runtime: Input should be 'eager', 'hybrid', 'distributed' or 'streaming', got 'hybird'",
    "rollout.engine=vlm": r"no rollout engine is called 'vlm'. Did you mean 'vllm'[?] Your own is written module:name",
    "trainer.optimizer=adam": (
        r"no optimizer is called 'adam'. Did you mean 'adamw'[?] Your own is written module:name or "
        r"path/to/file.py:"
    ),
    "trainer.optimizer=torch.optim:Lion": r"torch.optim has no function 'Lion'",
    "trainer={optimizer: sgd, optimizer_settings: {momentun: 1}}": r"optimizer=sgd: .*unexpected .*'momentun'",
    "trainer={optimizer: sgd, weight_decay: 0.1}": (
        r"trainer.weight_decay is AdamW's, and trainer.optimizer is sgd; remove it, "
        r"or"
    ),
    "rollout.engine=engine.py:Mine": r"no file .*engine.py",
    "rollout.engine_settings={depth: 2}": (
        r"rollout.engine_settings are for your own engine, and rollout.engine is "
        r"embedded"
    ),
    "trainer.backend=torhc": (
        r"no training backend is called 'torhc'. Did you mean 'torch'[?] Your own is written "
        r"module:name"
    ),
    "roles.actor.backend=torch:nothing": r"torch has no function 'nothing'",
    "trainer={backend: torch:compile, lora: {}}": (
        r"trainer.lora is not supported by the backend torch:compile of actor; "
        r"remove"
    ),
    "rollout.weights=handles": r"handles are not supported any more; write collective between CUDA devices, or file",
    "rollout.weights=collective": r"write rollout.engines=1",
    "rollout.environment=countdown": r"no environment is called 'countdown'. Your own is written module:name",
    "trackers=tensorbord": (
        r"no tracker is called 'tensorbord'. Did you mean 'tensorboard'[?] Your own is written "
        r"module:name"
    ),
    "trackers={name: tensorboard, params: {project: x}}": r"tracker 'tensorboard' has no setting 'project'",
    "trackers=swanlab": r"trackers=swanlab is not installed; write pip install 'braidrl\[swanlab\]'",
    "device=cuda": r"device=cuda: torch sees no CUDA device here; write device=auto or device=cpu",
    "algorithm={loss: cispo, clip_low: 0.1}": (
        r"algorithm.clip_low is a setting of the recipe's own loss, and algorithm.loss names "
        r"another"
    ),
    "algorithm.loss=cisp": r"no loss is called 'cisp'. Did you mean 'cispo'",
    "placement=everywhere": r"no placement is called 'everywhere'. Known: colocate",
    "roles.critc.learning_rate=1e-5": r"roles.critc: flow grpo has no model of this role. Known: actor, reference",
    "trainer.surplus=keep": r"trainer.surplus=keep .* write trainer.max_staleness=1 or trainer.surplus=drop",
    "data.train=none.jsonl": (
        r"no data file none.jsonl, neither beside the configuration nor in /.*; give the path of "
        r"a"
    ),
    "data.train=none.csv": r"none.csv: files of the kind '.csv' are not read; give a .jsonl, .json or .parquet file",
    "data.eval.test=none.jsonl": r"no data file none.jsonl",
    "data.train.convert=gsm": r"'data.train.convert=gsm': 'train' holds a value",
    "data.held_out=40": r"has no examples \(the first 40 are skipped\)",
    "model=/nowhere/model": (
        r"model: there is no folder /nowhere/model; give the path of a Hugging Face model "
        r"directory"
    ),
    "data.max_prompt_tokens=2": r"all 40 prompts are longer than data.max_prompt_tokens=2; the shortest has 4 tokens",
    "trainer.max_tokens_per_device=11": r"may have 12 tokens.* write trainer.max_tokens_per_device=12, or lower",
    "rollout.max_response_tokens=300": r"rows may have 304 tokens.*max_position_embeddings 256; lower",
}


@pytest.mark.parametrize("override", CONFIGURATION)
def test_a_mistake_in_the_configuration_is_named(
    workshop: Workshop, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    # Even where one exists.
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = refusal("train", workshop.config_file(), override)
    assert re.search(CONFIGURATION[override], message), message
    assert not (workshop.folder / "run" / "metrics.jsonl").exists()


def test_a_run_that_was_refused_can_be_started_again_under_its_name(workshop: Workshop, command: Braid) -> None:
    config = workshop.config_file()
    broken = workshop.folder / "model"
    shutil.copytree(workshop.model, broken)
    (broken / "model.safetensors").unlink()
    code, _, errors = command("train", config, f"model={broken}")
    assert code == 2 and "config.json but no weights (*.safetensors)" in errors
    code, _, errors = command("train", config, "trainer.steps=1")
    assert code == 0, errors
    code, _, errors = command("train", config, "trainer.steps=1")
    assert code == 2 and "run exists; resume it with `--resume" in errors


@pytest.mark.parametrize("processes", [["runtime=eager"], ["runtime=distributed", "workers=2"]])
def test_a_run_with_only_failed_checks_saves_and_names_the_commonest_failure(
    workshop: Workshop, command: Braid, processes: list[str]
) -> None:
    raises = [
        workshop.config_file(),
        f"reward.verify={workshop.folder}/verifiers.py:unfinished",
        "trainer.steps=4",
        *processes,
    ]
    code, _, said = command("train", *raises)
    assert code == 1 and re.match(
        r"braid: step 1: .*16 checks .*unfinished: .*KeyError: 'no score", said.splitlines()[-1]
    )
    run = workshop.folder / "run"
    assert [line["reward/failed_fraction"] for line in read_metrics(run)] == [1.0]
    assert latest_checkpoint(run) == run / "checkpoints" / "step-1" and (run / "report.html").is_file()
    if processes == ["runtime=eager"]:
        code, _, _ = command("train", *raises, "name=regardless", "reward.max_failed_fraction=1")
        assert code == 0 and len(read_metrics(workshop.folder / "regardless")) == 4


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_model_that_cannot_be_trained_is_named_before_it_loads(
    workshop: Workshop, refusal: Refusal, dry: tuple[str, ...]
) -> None:
    config, cut, other = workshop.config_file(), workshop.folder / "cut", workshop.folder / "bert"
    shutil.copytree(workshop.model, cut, dirs_exist_ok=True)
    whole = (workshop.model / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert refusal("train", config, f"model={cut}", *dry).startswith(
        f"model: {cut / 'model.safetensors'} cannot be read: "
    )
    shutil.copytree(workshop.model, other, dirs_exist_ok=True)
    settings = BertConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=16, vocab_size=20
    )
    BertLMHeadModel(settings).save_pretrained(other)
    line = refusal("train", config, f"model={other}", *dry)
    assert line.startswith(f"model: {other}, bert, is not proven")


def test_a_run_with_only_failed_trajectories_names_the_commonest_failure(workshop: Workshop, command: Braid) -> None:
    (workshop.folder / "broken.py").write_text("def board(texts, example):\n    raise KeyError('no board')\n")
    config = workshop.config_file(rollout={"environment": "broken.py:board"}, reward={"max_failed_steps": 2})
    code, _, said = command("train", config)
    assert code == 1 and "every one of 32 trajectories" in said
    assert "no board" in said.splitlines()[-1]


def test_run_and_dry_run_report_what_this_machine_lacks(
    workshop: Workshop, refusal: Refusal, command: Braid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    bare = workshop.folder / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    config = workshop.config_file(rollout={"engine": "vllm", "python": str(bare)})
    missing = (
        f"rollout.engine=vllm: {bare} has no package vllm; name an interpreter that has it by rollout.python, or see "
        "docs/engines.md"
    )
    assert refusal("train", config) == missing
    assert "is no interpreter" in refusal("train", config, "rollout.python=/nowhere/python")
    code, shown, errors = command("train", config, "--dry-run", "device=cuda")
    assert code == 0, errors
    said = [line for line in shown.splitlines() if line.startswith("here the run would end: ")]
    assert len(said) == 2 and "device=cuda: torch sees no CUDA device" in said[0] and said[1].endswith(missing)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_an_output_that_cannot_be_written_is_named(workshop: Workshop, refusal: Refusal, dry: tuple[str, ...]) -> None:
    file = workshop.folder / "file"
    file.touch()
    message = refusal("train", workshop.config_file(), f"output={file / 'runs'}", *dry)
    assert (
        message.startswith(f"output: {file / 'runs'}")
        and "cannot be written" in message
        and message.endswith("set another `output`")
    )


def test_a_home_that_cannot_be_written_is_named(
    workshop: Workshop, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = workshop.folder / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr("braidrl.training.decoders.proof.KNOWN", {})
    message = refusal("train", workshop.config_file())
    assert message.startswith(f"{file}/braidrl, where compiled kernels"), message
    assert "(Not a directory); set XDG_CACHE_HOME" in message


def test_a_model_folder_without_a_tokenizer_is_named(workshop: Workshop, refusal: Refusal) -> None:
    bare = workshop.folder / "bare"
    shutil.copytree(workshop.model, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    message = refusal("train", workshop.config_file(), f"model={bare}")
    assert message.startswith(f"model: {bare} has no tokenizer"), message


FLOWS = {
    "a column without a writer": (
        [{"role": "actor", "type": "generate"}, {"type": "advantage.group_normalized"}],
        r"stage advantage.group_normalized reads 'reward', which no earlier stage writes",
    ),
    "what comes later": (
        [
            {"role": "actor", "type": "generate"},
            {"type": "advantage.group_normalized"},
            {"role": "reward", "type": "verify"},
        ],
        r"stage advantage.group_normalized reads 'reward', which reward.verify writes later; move reward.verify "
        r"before advantage",
    ),
    "a stage that does not exist": (
        [{"role": "actor", "type": "genrate"}],
        r"no stage type is called 'genrate'. Did you mean 'generate'?",
    ),
    "a key that does not exist": (
        [{"role": "actor", "type": "generate", "parms": {}}],
        r"unknown key 'parms'.*Did you mean 'params'?",
    ),
}


@pytest.mark.parametrize("kind", FLOWS)
def test_a_flow_that_could_not_run_is_refused(workshop: Workshop, refusal: Refusal, kind: str) -> None:
    stages, message = FLOWS[kind]
    path = workshop.folder / "flow.yaml"
    path.write_text(json.dumps({"flow": "own", "stages": stages}))
    for arguments in (("train", workshop.config_file(), f"flow={path}"), ("flow", path)):
        result = refusal(*arguments)
        assert re.search(message, result), result


DATA: dict[str, tuple[Any, str]] = {
    "no prompt": ({"promt": "1+1=", "answer": "2"}, r"line 3: no field 'prompt' for the prompt. Did you mean 'promt'?"),
    "no answer": (
        {"prompt": "1+1=", "answr": "2"},
        r"line 3: no field 'answer' for the answer, .*Did you mean 'answr'",
    ),
    "no text": ({"prompt": 5, "answer": "2"}, r"line 3: 'prompt' is a number; write text"),
    "no object": (["prompt"], r"line 3 holds a list; write a JSON object"),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("where", ["data.train", "data.eval.test"])
def test_a_data_file_with_a_fault_is_named_with_its_line(
    workshop: Workshop, refusal: Refusal, kind: str, where: str
) -> None:
    record, message = DATA[kind]
    path = write_jsonl(workshop.folder / "faulty.jsonl", [*sums(2), record, *sums(2)])
    result = refusal("train", workshop.config_file(reward={"verify": "gsm8k"}), f"{where}={path}")
    assert result.startswith(f"{path}, ") and re.search(message, result), result


def test_supervised_training_needs_a_response_in_every_line(workshop: Workshop, refusal: Refusal) -> None:
    examples = sums(4)
    del examples[1]["response"]
    path = write_jsonl(workshop.folder / "faulty.jsonl", examples)
    config, sft = workshop.config_file(), ("flow=sft", f"data.train={path}")
    message = refusal("train", config, *sft)
    assert "sft trains on the response" in message and "samples_per_prompt=1" in message
    message = refusal("train", config, *sft, "rollout.samples_per_prompt=1", "trainer.rows_per_update=3")
    assert "trainer.rows_per_update=3" in message
    message = refusal("train", config, *sft, "rollout.samples_per_prompt=1")
    assert message.startswith(f"{path}, line 2: no field 'response'"), message


def test_a_file_that_is_not_json_is_named_with_its_line(workshop: Workshop, refusal: Refusal) -> None:
    path = workshop.folder / "faulty.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    assert f"{path}, line 2 is not JSON" in refusal("train", workshop.config_file(), f"data.train={path}")
    path = workshop.folder / "faulty.json"
    path.write_text(json.dumps({"data": sums(2)}, indent=1))
    hint = "a .json file is a list of objects, or has one object per line"
    assert hint in refusal("train", workshop.config_file(), f"data.train={path}")


def test_what_is_not_there_is_named_by_every_command(workshop: Workshop, refusal: Refusal, tmp_path: Path) -> None:
    none = tmp_path / "none"
    config = workshop.config_file()
    for arguments, message in (
        (("train", f"{none}.yaml"), f"no configuration file {none}.yaml"),
        (("train", "model=/nowhere"), "'flow' is not set; give it in the file or as flow=..."),
        (("train", "--resume", none), f"{none} is no run folder: it has no config.yaml"),
        (("train", "--resume", none, config), "--resume takes its configuration from the run folder"),
        (("train", "--replay", none, config), f"{none} has no recorded rollouts; give the folder of a run"),
        (("eval", config), "data.eval names no set; give it one, as in data.eval.test=test.jsonl"),
        (("flow", none), f"no recipe is called '{none}'"),
        (("flow", f"{none}.yaml"), f"{none}.yaml"),
        (("report", none), str(none)),
        (("export", none, tmp_path / "model"), f"{none} has no checkpoint yet"),
    ):
        result = refusal(*arguments)
        assert message in result, (arguments, result)


def test_what_cannot_change_in_a_resumed_run_is_refused(workshop: Workshop, refusal: Refusal) -> None:
    run = new_run_folder(parse_config(workshop.tree()))
    before = (run / "config.yaml").read_bytes()
    for override, message in (
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef cannot change in a resumed run, only runtime, "),
        ("trainer.step=3", "trainer.step cannot change in a resumed run"),
        ("evaluation.evry=3", "unknown key 'evaluation.evry'. Did you mean 'every'?"),
        ("trainer.steps=many", "trainer.steps: "),
    ):
        assert message in refusal("train", "--resume", run, override)
    assert (run / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "arguments", [("flow", "grpo", "--svg"), ("import-config", "verl.yaml"), ("plan", "run.yaml", "--trace")]
)
def test_a_file_that_cannot_be_written_is_named(
    workshop: Workshop, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(workshop.folder)
    workshop.config_file()
    Path("verl.yaml").write_text("actor_rollout_ref.model.path: m\n")
    message = refusal(*arguments, "none/file.json")
    assert message.startswith("none/") and message.endswith("; give another path"), message


def test_export_overwrites_nothing(workshop: Workshop, command: Braid, refusal: Refusal) -> None:
    run = workshop.run(trainer={"steps": 1})
    folder = workshop.folder / "exported"
    folder.mkdir()
    (folder / "precious").write_text("work of years")
    assert refusal("export", run, folder) == f"{folder} exists; nothing was overwritten"
    assert (folder / "precious").read_text() == "work of years"
    assert "holds no role 'critic', only actor" in refusal("export", run, workshop.folder / "new", "--role", "critic")


def test_debug_shows_where_a_mistake_was_noticed(workshop: Workshop, command: Braid) -> None:
    with pytest.raises(UserError, match=r"unknown key 'trainer.stepz'"):
        command("--debug", "train", workshop.config_file(), "trainer.stepz=3")


@pytest.mark.parametrize(
    ("verifier", "reason", "score"), [("always_wrong", "all wrong", -1), ("always_right", "all correct", 1)]
)
def test_a_reward_that_is_always_the_same_ends_dynamic_sampling_with_that_explanation(
    workshop: Workshop, refusal: Refusal, verifier: str, reason: str, score: int
) -> None:
    data = write_jsonl(workshop.folder / "few.jsonl", sums(10))
    reward = {"verify": f"{workshop.folder}/verifiers.py:{verifier}"}
    message = refusal("train", workshop.config_file(flow="dapo", reward=reward), f"data.train={data}")
    assert f"({reason}: 10; every score was {score})" in message, message
    assert "teaches nothing" in message and "check reward.verify" in message


def test_a_raising_verifier_is_counted_and_reported_once(workshop: Workshop, command: Braid) -> None:
    reward = {"verify": f"{workshop.folder}/verifiers.py:unfinished", "max_failed_fraction": 1}
    code, _, errors = command("train", workshop.config_file(reward=reward))
    assert code == 0
    (told,) = (line for line in errors.splitlines() if line.startswith("verifier "))
    assert told.startswith("verifier unfinished: exception: ") and "no score for this" in told
    lines = read_metrics(workshop.folder / "run")
    assert [line["reward/failures/unfinished/exception"] for line in lines] == [16, 16]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make writes of more than this to any file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_during_a_checkpoint_leaves_the_previous_one_resumable(
    workshop: Workshop, refusal: Refusal, command: Braid
) -> None:
    run = workshop.run(trainer={"steps": 1, "checkpoint_every": 1})
    files = sorted(path for path in (run / "checkpoints").rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files}
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace("  steps: 1\n", "  steps: 3\n", 1))
    # Room for metrics and rollouts, but too little for the optimizer's state.
    with files_of_at_most(max(len(content) for content in before.values()) - 1):
        message = refusal("train", "--resume", run)
    assert message.startswith("the checkpoint of step 2 "), message
    assert f"`braid train --resume {run}`" in message
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None and checkpoint.name == "step-1"
    assert {path: path.read_bytes() for path in files} == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-1"]
    code, _, errors = command("train", "--resume", run)
    assert code == 0, errors
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None and checkpoint.name == "step-3"


def test_a_full_disk_while_rollouts_are_recorded_is_one_line_too(workshop: Workshop, refusal: Refusal) -> None:
    config = workshop.config_file()
    run, limit = workshop.folder / "run", r"\(ulimit -f\)"
    with files_of_at_most(config.stat().st_size + 5000):
        message = refusal("train", config)
    assert re.match(rf"{run}: File too large; .*{limit}.*`braid train --resume {run}`", message)
    with files_of_at_most(1000):
        message = refusal("train", config)
    place = f"{tempfile.gettempdir()}: .*{workshop.data} "
    assert re.match(rf"{place}.*: File too large; .*{limit}.* set TMPDIR", message)


def test_an_export_to_a_full_disk_is_one_line(workshop: Workshop, refusal: Refusal) -> None:
    run = workshop.run(trainer={"steps": 1})
    with files_of_at_most(1000):
        message = refusal("export", run, workshop.folder / "exported")
    assert message.startswith("File too large: ") and len(message) < 600 and not (workshop.folder / "exported").exists()


def test_the_module_is_the_command(workshop: Workshop) -> None:
    run = subprocess.run([sys.executable, "-m", "braidrl.cli", "trian"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2 and "'trian'. Did you mean 'train'?" in run.stderr


PLUGINS = """
class Nothing:
    def __init__(self, *given, **settings): ...

class Takes:
    def __init__(self): ...
    def exchange(self): ...
    def close(self): ...

def nothing(*given, **settings):
    return 3
"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("reward.verify={}:Nothing", "is a class; name a function"),
        ("rollout.environment={}:Nothing", "lacks reset and step"),
        ("trainer.backend={}:Nothing", "backend: it lacks forward"),
        ("trainer.backend={}:nothing", "backend: it lacks forward"),
        ("rollout.engine={}:Nothing", "engine: it lacks abort"),
        ("rollout.engine={}:nothing", "engine: it lacks abort"),
        ("trackers=[{}:Nothing]", "lacks write and close"),
        ("rollout.weights={}:Nothing", "transport: it lacks exchange and close"),
        ("rollout.weights={}:Takes", "Takes() cannot be called with (ranks,"),
    ],
)
def test_a_plug_in_of_another_form_is_refused(workshop: Workshop, refusal: Refusal, setting: str, message: str) -> None:
    path = workshop.folder / "plugins.py"
    path.write_text(PLUGINS)
    shutil.rmtree(workshop.folder / "formless", ignore_errors=True)
    engines = ["rollout.engines=1"] if "weights" in setting else []
    assert message in refusal("train", workshop.config_file("formless"), setting.format(path), *engines)
