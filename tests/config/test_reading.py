"""Files and words in the forms that users write: YAML, encodings, code beside the configuration, values on the command
line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from braidrl.agents.environments import check_environment
from braidrl.cluster.device_kinds import read_cluster
from braidrl.config import load_config
from braidrl.errors import UserError
from braidrl.flow.yaml_form import from_yaml
from braidrl.importing import import_function, relative_to
from braidrl.parsing import read_text
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.restarts import train
from tests.tiny import ROOT, Workshop

TWICE = {
    "flow: grpo\ntrainer: {steps: 5}\nmodel: m\ntrainer: {steps: 6}\n": r"'trainer' .*twice,.* lines 2 and 4",
    "flow: grpo\nmodel: m\ndata:\n  train: a\n  eval: {}\n  train: b\n": r"'train' .*twice,.* lines 4 and 6",
    "flow: grpo\nmodel: m\nreward: {verify: [{name: exact, name: gsm8k}]}\n": r"'name' is .*twice, in line 3",
}


@pytest.mark.parametrize("text", TWICE)
def test_a_duplicate_key_is_refused_with_both_places(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"config.yaml: .*{TWICE[text]}; keep one"):
        load_config(file)


def test_a_fault_of_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("flow: grpo\n\tmodel: m\n")
    with pytest.raises(UserError, match=r"config.yaml, line 2, .*YAML: .*tab character"):
        load_config(file)
    with pytest.raises(UserError, match=r"^'trainer={steps: 3' .*YAML: .*',' or '}'$"):
        load_config(None, ["trainer={steps: 3"])


def test_a_key_twice_is_refused_in_flows_devices_and_overrides(tmp_path: Path) -> None:
    flow, devices = tmp_path / "flow.yaml", tmp_path / "devices.yaml"
    flow.write_text("flow: mine\nstages:\n- {role: actor, type: generate, type: values}\n")
    devices.write_text("groups: []\ngroups: []\n")
    for read, path in ((from_yaml, flow), (lambda path: read_cluster(str(path)), devices)):
        with pytest.raises(UserError, match="is there twice"):
            read(path)
    with pytest.raises(UserError, match=r"'steps' .*twice, in line 1"):
        load_config(None, ["flow=grpo", "model=m", "trainer={steps: 1, steps: 2}"])


def test_anchors_and_merged_keys_still_work(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "flow: grpo\nmodel: m\ntrainer: &t {steps: 5, epochs: 2}\nroles: {}\nrollout: {vllm: {<<: *t, steps: 6}}\n"
    )
    assert load_config(file).rollout.vllm == {"steps": 6, "epochs": 2}


COMMAND_LINE: dict[str, str] = {
    "rollout.vllm={tensor_parallel_size:2}": "write tensor_parallel_size: 2",
    "trainer.layout={data:2}": "write data: 2",
    "algorithm={clip_low:0.1,clip_high:0.3}": "write clip_low: 0.1",
    "rollout.stop=['']": r"rollout.stop.0: .*at least 1 character",
    "rollout.reflection_phrases=[wait,'']": r"rollout.reflection_phrases.1: .*at least 1 character",
    "seed=1e20": r"seed: .*integer between -2\^63 and 2\^63",
    "seed=9223372036854775808": r"seed: .*of 64 bits",
    "dtype=float16": r"^dtype: .*'bfloat16', 'float64' or 'auto', .*'float16'$",
    "rollout.dtype=fp8": r"^rollout.dtype: .*'float32', 'bfloat16' or 'float64', .*'fp8'$",
}


@pytest.mark.parametrize("override", COMMAND_LINE)
def test_a_value_on_the_command_line_is_refused_in_the_users_words(override: str) -> None:
    with pytest.raises(UserError, match=COMMAND_LINE[override]):
        load_config(None, ["flow=grpo", "model=m", override])


def test_a_key_of_an_earlier_version_is_read_at_its_default_and_refused_with_what_there_is_instead() -> None:
    given = ["flow=grpo", "model=m", "runtime=streaming"]
    kept = load_config(None, [*given, "rollout.check_weights=false"])
    assert kept == load_config(None, given), "a run's recorded configuration has every key"
    with pytest.raises(UserError, match=r"rollout.check_weights is gone: rollout.max_log_prob_gap"):
        load_config(None, [*given, "rollout.check_weights=true"])


def test_invalid_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(b"flow: grpo\nmodel: m\nname: caf" + b"\xe9\n")
    with pytest.raises(UserError, match=r"config.yaml, line 3 .*save.* as UTF-8"):
        load_config(file)
    file.write_bytes(b"\xef\xbb\xbfflow: grpo\nmodel: m\n")
    assert read_text(file).startswith("flow") and load_config(file).flow == "grpo"


SCRIPT = """
import locale, sys
from pathlib import Path
assert locale.getpreferredencoding(False).upper() not in ("UTF-8", "UTF8"), "the test needs another locale"
from braidrl.config import load_config
from braidrl.runtimes.saving.folders import run_config, write_config
config = load_config("config.yaml")
write_config(Path(), config)
assert run_config(Path()).data.system_prompt == "Antworte kurz: ∑ 😀"
from braidrl.cli import main
sys.argv = ["braid", "list", "losses"]
print("caf\\u00e9 \\u2211")
"""


def test_utf8_is_read_and_shown_under_any_locale(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(
        "flow: grpo\nmodel: m\ndata: {system_prompt: 'Antworte kurz: ∑ 😀'}\n".encode()
    )
    shown = """
import sys
from braidrl.cli import commands
sys.argv = ["braid", "--version"]
try:
    commands.main()
except SystemExit:
    pass
"""
    script = tmp_path / "script.py"
    script.write_text(shown + SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment |= {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert rb"caf\xe9 \u2211" in done.stdout


ENVIRONMENT = (
    "class Game:\n    def reset(self, example): ...\n    def step(self, text): ...\n\n\ndef play(base_url, example): "
    "...\n"
)
NAMED: dict[str, dict[str, Any]] = {
    "verify": {"reward": {"verify": "code.py:score"}},
    "verify of a source": {"data": {"train": [{"path": "a.jsonl", "verify": "code.py:score"}]}},
    "convert": {"data": {"train": [{"path": "a.jsonl", "convert": "code.py:score"}]}},
    "environment": {"rollout": {"environment": "code.py:Game"}},
    "agent": {"rollout": {"environment": {"name": "agent:code.py:play"}}},
    "verifiers": {"rollout": {"environment": "verifiers:code.py"}},
    "mcp": {"rollout": {"environment": "mcp:python code.py --fast"}},
    "loss": {"algorithm": {"loss": "code.py:score"}},
    "methods": {"roles": {"actor": {"methods": "code.py:Game"}}},
    "tracker": {"trackers": "code.py:Game"},
}


def words_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for part in value.values() for word in words_of(part)]
    if isinstance(value, list):
        return [word for part in value for word in words_of(part)]
    return [value] if isinstance(value, str) else []


def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Make a folder for a configuration, and another one in which the command runs."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    return beside, here


@pytest.mark.parametrize("case", NAMED)
def test_code_is_looked_for_beside_the_configuration_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    beside, here = two_folders(tmp_path, monkeypatch)
    file = beside / "config.yaml"
    file.write_text(str({"flow": "grpo", "model": "m", **NAMED[case]}))
    if case != "mcp":
        with pytest.raises(UserError) as error:
            load_config(file)
        assert f"beside the configuration in {beside} nor in {here}" in str(error.value)
    for folder in (here, beside):
        (folder / "code.py").write_text(ENVIRONMENT + "\n\ndef score(response): ...\n")
        loaded = [word for word in words_of(load_config(file).model_dump(mode="json")) if "code.py" in word]
        expected = "code.py" if folder == here else str(beside / "code.py")
        assert len(loaded) == 1 and expected in loaded[0] and (folder == beside) == (str(beside) in loaded[0]), loaded


def test_an_override_names_code_here_first_then_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = two_folders(tmp_path, monkeypatch)
    file = beside / "config.yaml"
    file.write_text("flow: grpo\nmodel: m\n")
    for folder in (beside, here):
        (folder / "code.py").write_text("def score(response): ...\n")
        assert load_config(file, ["reward.verify=code.py:score"]).reward.verify[0].name == f"{folder / 'code.py'}:score"


def test_a_flow_finds_its_agent_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(ENVIRONMENT)
    flow = tmp_path / "flow.yaml"
    flow.write_text(
        "flow: mine\nstages:\n- {role: actor, type: generate, params: {environment: 'agent:agents.py:play'}}\n"
    )
    (stage,) = from_yaml(flow).stages
    assert stage.params["environment"] == f"agent:{tmp_path / 'agents.py'}:play"
    check_environment(stage.params["environment"], {})
    assert relative_to(tmp_path, "mcp:https://host/agents.py") == "mcp:https://host/agents.py"


def test_a_reward_file_imports_its_neighbour_and_not_that_of_another(workshop: Workshop) -> None:
    for name, points in (("one", 0.25), ("two", 0.75)):
        folder = workshop.folder / name
        folder.mkdir()
        (folder / "points.py").write_text(f"POINTS = {points}\n")
        lazily = "def lazily(response):\n    from points import POINTS as again\n    return again\n"
        (folder / "mine.py").write_text(
            f"from points import POINTS\n\n\ndef score(response):\n    return POINTS\n\n\n{lazily}"
        )
    names = [f"{workshop.folder / name / 'mine.py'}:score" for name in ("one", "two")]
    assert [import_function(name)("x") for name in names] == [0.25, 0.75]
    assert import_function(names[0])("x") == 0.25
    config = workshop.config(reward={"verify": names[0], "sandbox": "process"}, trainer={"steps": 1})
    assert build_flow(config).name == "grpo"
    folder = train(config)
    assert '"checks/score/score_mean": 0.25' in (folder / "metrics.jsonl").read_text()


def test_a_pipe_as_data_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(UserError, match=f"data.train.0.path: pipes.*{path}"):
            load_config(None, ["flow=grpo", f"model={tmp_path}", f"data.train={path}", "reward.verify=gsm8k"])
