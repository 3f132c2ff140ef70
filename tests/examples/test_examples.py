"""The examples run: the demo's whole path at a small size, and GSM8K's configuration on its real prompts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from braidrl.cli import commands as cli
from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.observe.rollouts import read_texts, rollout_path
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.restarts import train
from braidrl.runtimes.streaming.groups import check_streaming
from tests.tiny import ARITHMETIC, ROOT, SIZES, load_module, recorded, wait_for_steps, write_model

SHARED = Path(os.environ.get("BRAID_SHARED", ROOT.parent / "shared"))
GSM8K = SHARED / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no GSM8K files in {SHARED}; set BRAID_SHARED")
SMALL = {
    "trainer.steps": 2,
    "trainer.prompts_per_step": 4,
    "trainer.rows_per_update": 16,
    "trainer.warmup_steps": 0,
    "rollout.samples_per_prompt": 4,
    "rollout.max_response_tokens": 24,
    "rollout.slots": 16,
    "reward.processes": 1,
    "evaluation.max_prompts": 4,
    "evaluation.every": 2,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
}


# After so little imitation no sum is right; the parity of the last digit, however, differs among the samples of a
# prompt.
EVEN = "{name: format, params: {pattern: '.*[02468]'}}"


def overrides(**values: Any) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def run_notebook(path: Path, **chosen: Any) -> dict[str, Any]:
    """Run the cells of a notebook with other values for the settings of its first cell; return its variables."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert all({"id", "cell_type", "metadata", "source"} <= cell.keys() for cell in notebook["cells"])
    first, *others = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    defined: dict[str, Any] = {}
    exec(first, defined)
    assert chosen.keys() <= defined.keys()
    defined |= chosen
    for cell in others:
        exec(cell, defined)
    return defined


def test_the_demos_path_warm_start_then_dapo_ends_with_scores_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path is that of the notebook beside the demo."""
    folder = tmp_path / "demo"
    small = overrides(threads=1)
    smaller = {
        "held_out": 8,
        "warm_start": [*small, *overrides(**{"trainer.steps": 16, "trainer.prompts_per_step": 64})],
        "dapo": [
            *small,
            *overrides(
                **{
                    "trainer.steps": 2,
                    "trainer.prompts_per_step": 2,
                    "evaluation.every": 2,
                    "evaluation.samples": 2,
                    "rollout.slots": 16,
                    "reward.verify": EVEN,
                }
            ),
        ],
    }
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = run_notebook(ARITHMETIC / "demo.ipynb", FOLDER=folder, SMALLER=smaller)["run"]
    shown = capsys.readouterr().out
    assert "advantage.group_normalized" in shown and "step   2  eval/held_out/avg@2" in shown and "=' → '" in shown
    warm = [line["loss/actor"] for line in read_metrics(folder / "warm-start")]
    assert warm[-1] < 0.8 * warm[0], "imitation must show an effect"
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line.get("eval/held_out/avg@2") is None for line in lines] == [False, True, False]
    assert run == folder / "dapo" and (run / "report.html").stat().st_size > 10_000
    assert recorded(run, 2)["score"].unique().tolist() == [-1.0, 1.0]
    texts = read_texts(rollout_path(run, 2), ["score", "reward"])
    assert set(texts[0]) == {"prompt_text", "response_text", "score", "reward"} and texts[0]["prompt_text"].endswith(
        "="
    )


def test_the_demo_deletes_only_its_own_files(tmp_path: Path) -> None:
    demo = load_module(ARITHMETIC / "demo.py")
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(SystemExit, match="choose another folder with --folder"):
        demo.learn(tmp_path, 0)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.soak
def test_ctrl_c_ends_the_demo_in_a_line(tmp_path: Path) -> None:
    """An interrupt at any time, and any number of them, ends the run after its own lines, without a traceback."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    demo = subprocess.Popen(
        [sys.executable, ARITHMETIC / "demo.py", "--folder", tmp_path / "demo"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for_steps(tmp_path / "demo" / "warm-start", 1, demo)
    os.killpg(demo.pid, signal.SIGINT)
    out, errors = demo.communicate(timeout=120)
    assert demo.returncode == 130, errors
    assert "Traceback" not in errors and "go on with: braid train --resume" in out + errors


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Qwen2 with a BPE tokenizer of 2,000 tokens trained on GSM8K's text, and a chat template."""
    folder = tmp_path_factory.mktemp("gsm8k") / "model"
    with (GSM8K / "train.jsonl").open() as file:
        examples = [json.loads(line) for line, _ in zip(file, range(1500), strict=False)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator((f"{e['question']}\n{e['answer']}" for e in examples), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    sizes = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "max_position_embeddings": 1024,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_streaming_example_splits_eight_devices(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = load_config(ROOT / "examples" / "gsm8k" / "streaming.yaml", overrides(model=model))
    flow = build_flow(config)
    deployment = deploy(config, flow)
    check_streaming(deployment)
    groups = {pool.name: pool.workers for pool in deployment.pools}
    assert groups == {"actor.generate": 5, "actor": 2, "reference": 1}


@needs_gsm8k
def test_two_steps_of_grpo_on_the_real_prompts_of_gsm8k(small_model: Path, tmp_path: Path) -> None:
    parts = (("train", "train"), ("eval.test", "test"))
    # All of them are read in tests/data; here some are enough.
    for name in ("train", "test"):
        with (GSM8K / f"{name}.jsonl").open() as file:
            (tmp_path / f"{name}.jsonl").write_text("".join(islice(file, 200)))
    data = {f"data.{part}": f"{{path: {tmp_path / name}.jsonl, prompt_field: question}}" for part, name in parts}
    config = load_config(
        ROOT / "examples" / "gsm8k" / "config.yaml",
        overrides(model=small_model, output=tmp_path, name="run", **SMALL, **data),
    )
    run = train(config)
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[-1]["rows/generated"] == 16 and lines[-1]["eval/test/avg@1"] is not None
    assert not any(name.startswith("reward/failures") for line in lines for name in line), "every answer is comparable"
    with (tmp_path / "train.jsonl").open() as file:
        answers = {example["question"]: example["answer"] for example in map(json.loads, file)}
    rows = recorded(run, 1)
    texts = read_texts(rollout_path(run, 1))
    for row, metadata in enumerate(rows["metadata"].values):
        assert answers[metadata["prompt"]] == metadata["answer"]
        assert metadata["prompt"] in texts[row]["prompt_text"] and texts[row]["prompt_text"].endswith("<|assistant|>")


@needs_gsm8k
def test_verls_parquet_layout_trains_from_the_command_line(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with (GSM8K / "train.jsonl").open() as file:
        examples = [json.loads(line) for line, _ in zip(file, range(20), strict=False)]
    records = [
        {
            "data_source": "openai/gsm8k",
            "ability": "math",
            "prompt": [{"role": "user", "content": e["question"]}],
            "reward_model": {"style": "rule", "ground_truth": e["answer"].rpartition("####")[2].strip()},
            "extra_info": {"index": i, "split": "train"},
        }
        for i, e in enumerate(examples)
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "train.parquet")
    values = overrides(
        model=small_model,
        output=tmp_path,
        name="run",
        **SMALL,
        **{"data.train": tmp_path / "train.parquet", "data.eval": {}},
    )
    monkeypatch.setattr(sys, "argv", ["braid", "train", str(ROOT / "examples" / "gsm8k" / "config.yaml"), *values])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0, capfd.readouterr().err
    rows = recorded(tmp_path / "run", 2)
    truths = {record["prompt"][0]["content"]: record["reward_model"]["ground_truth"] for record in records}
    for metadata in rows["metadata"].values:
        assert truths[metadata["prompt"][0]["content"]] == metadata["answer"]
        assert metadata["data_source"] == "openai/gsm8k"
