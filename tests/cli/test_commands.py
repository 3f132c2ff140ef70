"""Each command of `braid` works as a user types it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from braidrl import __version__
from braidrl.cli import commands as cli
from braidrl.cli.catalogue import KINDS, catalogue
from braidrl.config.reading import section_keys
from braidrl.errors import UserError
from braidrl.flow.yaml_form import from_yaml
from braidrl.observe.metrics import read_metrics
from braidrl.observe.rollouts import read_texts
from braidrl.runtimes.prepare.first_checks import check_first
from braidrl.runtimes.saving.folders import MAY_CHANGE, run_config
from tests.data.conftest import byte_tokenizer
from tests.tiny import Workshop, weights_of, write_jsonl
from tests.tiny import braid as start_braid


@pytest.fixture
def braid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `braid ...` in this process, asserts success, and returns stdout and stderr."""

    def run(*arguments: Any) -> tuple[str, str]:
        monkeypatch.setattr("sys.argv", ["braid", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        output = capsys.readouterr()
        assert not end.value.code, output.err
        return output.out, output.err

    return run


def test_the_old_name_of_checkpoint_check_answers_with_the_new_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["braid", "verify", "runs/mine"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == cli.EXIT_USER_ERROR and "`braid checkpoint check runs/mine`" in capsys.readouterr().err


def test_train_prints_the_run_folder_first_and_writes_everything_there(workshop: Workshop, braid: Any) -> None:
    held_out = f"data.eval.test={workshop.data}"
    small = ["evaluation.every=2", "evaluation.max_prompts=2", "evaluation.samples=2"]
    _, output = braid(
        "train", workshop.config_file(), "trainer.steps=3", "trainer.checkpoint_every=1", held_out, *small
    )
    run = workshop.folder / "run"
    # On a busy machine reading takes long enough for a bar.
    printed = [line for line in output.splitlines() if not line.startswith("Tokenising")]
    assert printed[0] == str(run) and printed[-1] == f"report: {run / 'report.html'}"
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "rollouts",
        "checkpoints",
        "tensorboard",
        "trace",
        "report.html",
    }
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-2", "step-3"]
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == sorted(
        [f"step-{n}.parquet" for n in (1, 2, 3)] + [f"eval-test-step-{n}.parquet" for n in (0, 2, 3)]
    )
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line.get("eval/test/avg@2") is not None for line in lines] == [True, False, True, True]


def test_a_configuration_may_be_overrides_alone(workshop: Workshop, braid: Any) -> None:
    braid(
        "train",
        "flow=dapo",
        f"model={workshop.model}",
        f"data.train={workshop.data}",
        f"output={workshop.folder}",
        "reward.verify={name: format, params: {pattern: '.*[02468]'}}",
        "rollout.max_response_tokens=6",
        "trainer.steps=1",
        "trainer.prompts_per_step=2",
        "threads=1",
        "device=cpu",
    )
    (run,) = (path for path in workshop.folder.iterdir() if path.name.startswith("dapo-"))
    assert (run / "report.html").is_file()


def test_paths_are_found_beside_the_configuration_from_any_folder(
    workshop: Workshop, braid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workshop.folder / "mine.py").write_text("def small(response: str) -> bool:\n    return len(response) < 9\n")
    near = {path: os.path.relpath(path, workshop.folder) for path in (workshop.model, workshop.data)}
    config = workshop.config_file(
        "beside",
        model=near[workshop.model],
        data={"train": [{"path": near[workshop.data]}]},
        reward={"verify": [{"name": "mine.py:small", "weight": 0.5}]},
        trainer={"steps": 1},
    )
    monkeypatch.chdir(tmp_path)
    braid("train", config)
    used = run_config(workshop.folder / "beside")
    assert used.reward.verify[0].name == f"{workshop.folder / 'mine.py'}:small"
    assert (used.model, used.data.train[0].path) == (workshop.model, workshop.data)


TYPED = """
import os, sys
reading, writing = os.pipe()
os.write(writing, b"p 40 + 2\\nc\\n" * 100)
os.dup2(reading, 0)
sys.stdin = open(0)
"""


def test_a_breakpoint_in_a_verifier_works_without_reward_processes(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workshop.folder / "mine.py").write_text("def stops(response: str) -> bool:\n    breakpoint()\n    return True\n")
    config = workshop.config_file("debugged", reward={"verify": "mine.py:stops", "processes": 0}, trainer={"steps": 1})
    # If another test has started Ray here, Ray has put its own debugger into the environment.
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    with start_braid("train", config, prefix=TYPED) as process:
        out, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "stops()" in out and "(Pdb) 42" in out and read_metrics(workshop.folder / "debugged")[-1]["step"] == 1


def test_eval_measures_a_model_and_a_checkpoint(workshop: Workshop, braid: Any) -> None:
    run = workshop.run(trainer={"steps": 1})
    config = workshop.config_file("eval", evaluation={"samples": 4, "max_prompts": 4})
    for model in (workshop.model, run / "checkpoints" / "step-1" / "actor"):
        out, told = braid("eval", config, f"data.eval.test={workshop.data}", f"model={model}")
        kept = Path(told.splitlines()[-1].removeprefix("responses are kept in "))
        assert kept.parent.parent == workshop.folder and kept.parent.name.startswith("eval-")
        assert len(read_texts(kept / "eval-test-step-0.parquet")) == 16
        assert run_config(kept.parent).model == model
        values = dict(line.split("\t") for line in out.splitlines())
        assert set(values) == {
            f"eval/test/{n}" for n in ("avg@4", "pass@1", "pass@2", "pass@4", "length_mean", "score_mean")
        }
        assert 0 <= float(values["eval/test/avg@4"]) <= float(values["eval/test/pass@4"]) <= 1


def test_eval_needs_no_more_than_a_model_a_set_and_a_verifier(workshop: Workshop, braid: Any) -> None:
    arguments = (f"model={workshop.model}", f"data.eval.sums={workshop.data}", "reward.verify=gsm8k")
    out, _ = braid(
        "eval",
        *arguments,
        "evaluation.max_prompts=2",
        "rollout.max_response_tokens=4",
        "threads=1",
        f"output={workshop.folder}",
    )
    assert "eval/sums/avg@8\t" in out


def test_flow_shows_text_yaml_and_a_drawing(workshop: Workshop, braid: Any) -> None:
    out, _ = braid("flow", "dapo", "overlong_cache=16")
    assert "actor.generate" in out and "reward.verify" in out and "informative_groups" in out
    out, _ = braid("flow", "grpo", "--yaml")
    assert [stage.type for stage in from_yaml(out).stages][:2] == ["generate", "verify"]
    out, _ = braid("flow", "grpo", "--mermaid")
    assert out.startswith("flowchart TD")
    drawing = workshop.folder / "flow.svg"
    out, _ = braid("flow", workshop.config_file(), "--svg", drawing)
    assert drawing.read_text().startswith("<svg") and str(drawing) in out


def test_list_shows_all_names_with_settings_and_sources(braid: Any) -> None:
    kinds = dict(line.split(": ", 1) for line in braid("list")[0].splitlines())
    assert (
        kinds.keys() == set(KINDS) and "gspo" in kinds["losses"].split(", ") and "vllm" in kinds["engines"].split(", ")
    )
    out, _ = braid("list", "losses")
    clip = out[out.index("\nclip\n") :].split("\nclip_cov\n")[0]
    assert "arXiv 1707.06347" in clip and "low=0.2" in clip and "advantages" in clip
    assert "max_tokens=required" in braid("list", "aggregations")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_listed_name_has_a_description(kind: str) -> None:
    assert all(len(listed.about.split()) >= 3 and listed.about.endswith(".") for listed in catalogue(kind))


def test_report_command_rewrites_the_report(workshop: Workshop, braid: Any) -> None:
    run = workshop.run()
    (run / "report.html").unlink()
    out, _ = braid("report", run)
    assert out.strip() == str(run / "report.html") and "Reward" in (run / "report.html").read_text()


def test_export_gives_a_directory_that_transformers_loads(workshop: Workshop, braid: Any) -> None:
    run, folder = workshop.run(), workshop.folder / "exported"
    out, _ = braid("export", run, folder)
    assert out.startswith(f"{folder}: Qwen3ForCausalLM, ")
    assert not list(folder.glob("optimizer*"))
    exported, trained = AutoModelForCausalLM.from_pretrained(folder), weights_of(run)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in exported.state_dict().items() if name in trained)
    untrained = load_file(workshop.model / "model.safetensors")
    assert any(not torch.equal(tensor, untrained[name]) for name, tensor in trained.items())
    assert AutoTokenizer.from_pretrained(folder)("4+7=")["input_ids"]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


def test_doctor_reports_the_machine(braid: Any) -> None:
    out, _ = braid("doctor")
    assert "python 3." in out and f"torch {torch.__version__}" in out and "a training step of a tiny model" in out


def test_help_names_every_command(braid: Any) -> None:
    out, _ = braid("--help")
    assert all(command in out for command in ("train", "eval", "flow", "report", "export", "doctor"))
    out, _ = braid("--version")
    assert out.startswith(f"braid {__version__}, torch {torch.__version__}, transformers ")


def test_a_resumed_run_applies_and_keeps_overrides(workshop: Workshop, braid: Any) -> None:
    run = workshop.run("further", trainer={"steps": 1})
    braid("train", "--resume", run, "trainer.steps=2", "threads=1")
    assert [line["step"] for line in read_metrics(run)] == [1, 2]
    kept = run_config(run)
    assert (kept.trainer.steps, kept.threads) == (2, 1)
    braid("train", "--resume", run, "trainer.steps=3")
    assert run_config(run).threads == 1 and read_metrics(run)[-1]["step"] == 3
    _, output = braid("train", "--resume", run)
    assert "write trainer.steps=13" in output


def test_overrides_of_a_resumed_run_must_be_configuration_keys() -> None:
    for key in MAY_CHANGE:
        *place, last = key.split(".")
        assert last in section_keys(tuple(place))


def test_steps_of_zero_save_the_model_as_it_is(workshop: Workshop, braid: Any, tmp_path: Path) -> None:
    braid("train", workshop.config_file(), "trainer.steps=0")
    untrained, saved = load_file(workshop.model / "model.safetensors"), weights_of(workshop.folder / "run")
    assert all(torch.equal(tensor, untrained[name]) for name, tensor in saved.items())


def test_data_shows_counts_lengths_and_examples_as_the_model_sees_them(workshop: Workshop, braid: Any) -> None:
    (workshop.folder / "own.py").write_text(
        "def example(record):\n    return 'it is large' if int(record['answer']) > 9 else record\n"
    )
    source = f"data.train={{path: {workshop.data}, convert: {workshop.folder}/own.py:example}}"
    records = [json.loads(line) for line in workshop.data.read_text().splitlines()]
    small = [record for record in records if int(record["answer"]) <= 9]
    assert 3 < len(small) < len(records)
    output, _ = braid("data", workshop.config_file(), source, "data.held_out=3")
    train, held_out = output.split("data.eval.held_out")
    assert f"{len(small) - 3} examples, 0 dropped" in train and "3 examples, 0 dropped" in held_out
    assert f"{len(records) - len(small)} records left out because it is large" in train
    assert "least" in train and "█" in train and train.count("── example") == 5
    assert f"── example 0, record {records.index(small[0]) + 1}\n{small[0]['prompt']}" in held_out
    assert f"── answer: {small[0]['answer']}" in held_out


ESCAPES: dict[str, dict[str, Any]] = {
    "in a prompt": {"prompt": "1+1=\x1b[2J", "answer": "2"},
    "in an answer": {"prompt": "1+1=", "answer": "\x1b]0;title\x07 2"},
    "in a message, as one character": {"prompt": [{"role": "user", "content": "1+1=\x9b31m"}], "answer": "2"},
    "in a column's name": {"prompt": "1+1=", "answer": "2", "le\x1b[1mvel": 3},
}


@pytest.mark.parametrize("where", ESCAPES)
def test_data_shows_escape_sequences_as_text(where: str, workshop: Workshop, braid: Any) -> None:
    path = write_jsonl(workshop.folder / "escapes.jsonl", [ESCAPES[where]] * 3)
    model = shutil.copytree(workshop.model, workshop.folder / "bytes")
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer.save_pretrained(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "vocab_size": len(tokenizer)}))
    shown = "".join(braid("data", workshop.config_file(model=str(model)), f"data.train={path}"))
    assert "\\x1b" in shown or "\\x9b" in shown
    assert all(character.isprintable() or character in "\n\t" for character in shown)


MISTAKES = {
    "train trainer.stepz=3": "stepz",
    "train trainer.steps=many": "trainer.steps",
    "train flow=grppo": "grppo",
    "train algorithm.klcoef=1": "klcoef",
    "train flow=flow.yaml": "verifyy",
    "train reward.verify=exactly": "exactly",
    "train reward.verify=own.py:none": "none",
    "train rollout.engine=vlm": "vlm",
    "train rollout.environment=own.py:none": "none",
    "train trainer.optimizer=adam": "adam",
    "train trainer.backend=torsh": "torsh",
    "train trainer.rows_per_update=5": "rows_per_update",
    "train trainer.epochs=2 flow=reused.yaml": "old=self",
    "train trackers=wandbb": "wandbb",
    "train data.train=unnamed.jsonl": "prompt",
    "train reward.verify=exact data.train=unanswered.jsonl": "answer",
    "train flow=dpo rollout.samples_per_prompt=2": "chosen",
    "train model=wrong": "num_attention_heads",
    "train model=bare": "no tokenizer",
    "train --dry-run --devices 8xH1000": "H1000",
    "train --dry-run trackers=wandbb reward.verify=exact data.train=unanswered.jsonl": "verdict: 2",
    "train data.held_out=1 evaluation.best=eval/held_out/avg@7": "avg@7",
    "eval": "data.eval",
    "data data.train=unnamed.jsonl": "prompt",
    "plan --devices 8xH1000": "H1000",
}
"""Arguments of commands with a mistake, and a part of the message."""


def test_mistakes_that_need_no_model_are_named_before_torch_is_loaded(workshop: Workshop) -> None:
    folder = workshop.folder
    files = {
        "own.py": "def right(response: str) -> bool:\n    return True\n",
        "flow.yaml": "{flow: mine, stages: [{type: generate, role: actor}, {type: verifyy}]}",
        "reused.yaml": (
            "flow: mine\nstages:\n- {type: generate, role: actor}\n- {type: verify, role: reward}\n"
            "- {type: advantage.group_normalized}\n"
            "- {type: update, role: actor, params: {loss: {name: clip}, old: self}}\n"
        ),
        "unnamed.jsonl": '{"question": "1+1=", "answer": "2"}\n',
        "unanswered.jsonl": '{"prompt": "1+1=", "solution": "2"}\n',
        "wrong/config.json": (workshop.model / "config.json").read_text().replace('heads": ', 'heads": -'),
        "bare/config.json": (workshop.model / "config.json").read_text(),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    file = workshop.config_file()
    asked = f"""
import sys
from typer.testing import CliRunner
from braidrl.cli.commands import app
for mistake, said in {MISTAKES!r}.items():
    command, *given = mistake.split()
    error = CliRunner().invoke(app, [command, {str(file)!r}, *given]).exception
    if said not in str(error) or 'torch' in sys.modules or 'transformers' in sys.modules:
        print(mistake, repr(error), 'torch' in sys.modules)
        break
"""
    run = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=folder, timeout=60)
    assert (run.stdout, run.stderr) == ("", "")


def test_a_replay_needs_neither_training_data_nor_held_out_sets(workshop: Workshop) -> None:
    config = workshop.config(data={"train": str(workshop.folder / "none.jsonl")})
    assert not config.data.evaluation_sources
    check_first(config, trained=False)
    with pytest.raises(UserError, match=r"none\.jsonl"):
        check_first(config)


def test_a_plan_needs_no_tokenizer(workshop: Workshop) -> None:
    model = workshop.folder / "bare"
    model.mkdir()
    (model / "config.json").write_bytes((workshop.model / "config.json").read_bytes())
    config = workshop.config(model=str(model))
    check_first(config, trained=False, evaluated=False)
    with pytest.raises(UserError, match="no tokenizer"):
        check_first(config)


@pytest.mark.parametrize("flow", ["dpo", "reward_model"])
def test_held_out_pairs_pass_the_first_checks(workshop: Workshop, flow: str) -> None:
    pairs = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(8)]
    data = {"train": str(write_jsonl(workshop.folder / "pairs.jsonl", pairs)), "held_out": 2}
    check_first(workshop.config(flow=flow, data=data, rollout={"samples_per_prompt": 2}))


def test_a_model_of_an_unknown_type_is_named_before_models_are_imported(workshop: Workshop) -> None:
    model = workshop.folder / "unknown"
    model.mkdir()
    settings = json.loads((workshop.model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "model_type": "unheard"}))
    program = (
        "import sys; from braidrl.cli.commands import main\n"
        "try: main()\nfinally: print('transformers.modeling_utils' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program, "check", str(model)], capture_output=True, text=True)
    assert run.returncode == 2 and "unheard" in run.stderr and run.stdout.strip() == "False"


@pytest.mark.parametrize("command", ["train", "eval", "data", "plan", "check"])
def test_a_missing_folder_is_named_before_torch_is_loaded(command: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"flow: grpo\nmodel: {tmp_path}/none\ndata: {{train: {tmp_path}/none.jsonl}}\n")
    given = [f"{tmp_path}/none"] if command == "check" else ["c.yaml"]
    program = "import sys; from braidrl.cli.commands import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program, command, *given], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2 and str(tmp_path / "none") in run.stderr and run.stdout.strip() == "False"


DECODERS = "braidrl.training.decoders"


@pytest.mark.parametrize(
    ("imports", "refused"),
    [
        ("import braidrl.cli.show_data", "transformers.modeling_utils"),
        ("from braidrl.cli.catalogue import KINDS, names; [*map(names, KINDS)]", "torch."),
    ],
)
def test_commands_without_models_import_no_model_code(imports: str, refused: str) -> None:
    program = (
        f"{imports}; import sys; print([name for name in sys.modules if name.startswith({(refused, DECODERS)!r})])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr
