"""Migration from verl and TRL: every key of their configurations has a row, and a verl configuration becomes a Braid
configuration.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from braidrl.cli.import_config import TRANSLATED, import_config, write_imported
from braidrl.cli.import_scripts import WHOLE
from braidrl.cli.importing.frameworks import FRAMEWORKS
from braidrl.config import Config, load_config, parse_config
from braidrl.config.reading import section_keys
from braidrl.errors import UserError
from braidrl.parsing import flat
from tests.tiny import ROOT, load_module

TABLES = {name: framework.table for name, framework in FRAMEWORKS.items()}
VERL, TRL = TABLES["verl"], TABLES["TRL"]
GRPO = """
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
data:
  train_files: train.parquet
  val_files: [gsm8k/test.parquet, math/test.parquet]
  train_batch_size: 512
  max_prompt_length: 1024
  max_response_length: 2048
  truncation: error
actor_rollout_ref:
  model: {path: Qwen/Qwen3-4B, use_remove_padding: true, lora_rank: 32, lora_alpha: 64}
  actor:
    optim: {lr: 3.0e-6, lr_warmup_steps: 10}
    ppo_mini_batch_size: 64
    use_kl_loss: true
    kl_loss_coef: 0.001
    clip_ratio_high: 0.28
    strategy: fsdp2
    ulysses_sequence_parallel_size: 2
    fsdp_config: {param_offload: true, dtype: bfloat16}
  rollout: {name: vllm, n: 8, temperature: 0.9, top_k: -1, tensor_model_parallel_size: 2,
            max_num_seqs: 256, mode: async}
  ref: {log_prob_max_token_len_per_gpu: 8192}
reward: {custom_reward_function: {path: my_reward.py, name: compute_score}}
trainer:
  {n_gpus_per_node: 8, nnodes: 2, save_freq: 20, test_freq: -1, total_training_steps: 300,
   logger: [console, wandb, clearml],
   experiment_name: first, val_before_train: false, no_such_key: 3}
"""


def imported(tmp_path: Path, text: str) -> tuple[Config, dict[str, str]]:
    file = tmp_path / "verl.yaml"
    file.write_text(text)
    tree, outcomes = import_config(file)
    return parse_config(tree), {key: outcome.text for key, outcome in outcomes.items() if outcome.kind != TRANSLATED}


def test_a_grpo_configuration_keeps_every_value_that_has_a_counterpart(tmp_path: Path) -> None:
    config, left = imported(tmp_path, GRPO)
    trainer, rollout = config.trainer, config.rollout
    assert (config.flow, str(config.model), config.workers, config.runtime) == ("grpo", "Qwen/Qwen3-4B", 16, "hybrid")
    assert list(config.data.eval) == ["test_0", "test_1"] and config.data.max_prompt_tokens == 1024
    assert (trainer.prompts_per_step, trainer.rows_per_update, trainer.steps, trainer.warmup_steps) == (
        512,
        512,
        300,
        10,
    )
    assert (trainer.learning_rate, trainer.checkpoint_every, config.evaluation.every) == (3e-6, 20, 0)
    assert trainer.lora is not None and (trainer.lora.rank, trainer.lora.alpha) == (32, 64)
    assert (trainer.layout.shard, trainer.layout.sequence) == ("full", 2)
    assert config.algorithm["kl_coef"] == 0.001 and config.algorithm["kl_estimator"] == "k3"
    assert (config.algorithm["clip_low"], config.algorithm["clip_high"]) == (0.2, 0.28)
    assert (rollout.engine, rollout.samples_per_prompt, rollout.top_k, rollout.slots) == ("vllm", 8, 0, 256)
    assert rollout.tensor == 2 and "tensor_parallel_size" not in rollout.vllm and rollout.temperature == 0.9
    assert config.reward.verify[0].name == "my_reward.py:compute_score"
    assert [tracker.name for tracker in config.trackers] == ["wandb"]
    assert not config.evaluation.before_first_step and config.name == "first"
    assert "trainer.no_such_key" in left and "clearml" in left["trainer.logger"]
    assert "solution_str to response" in left["reward.custom_reward_function.path"]


def test_what_is_not_set_has_the_value_that_verl_gives_it(tmp_path: Path) -> None:
    least = "actor_rollout_ref.model.path: /models/m\nalgorithm.adv_estimator: grpo\ndata.train_files: [a.parquet]\n"
    config, left = imported(tmp_path, least)
    assert config.algorithm["aggregate"] == "token-mean" and config.algorithm["kl_coef"] == 0.0
    assert config.trainer.weight_decay == 0.01 and config.trainer.activation_checkpointing
    assert config.rollout.samples_per_prompt == 1 and config.evaluation.temperature == 0.0
    assert left["trainer.steps"].startswith("verl counts epochs")
    assert config.trainer.layout.shard == "full" and config.workers == 8


def test_ppo_with_a_critic_and_dapo_with_filtered_groups_are_their_recipes(tmp_path: Path) -> None:
    base = "actor_rollout_ref.model.path: m\ndata.train_files: a.parquet\n"
    ppo, _ = imported(
        tmp_path, base + "algorithm: {adv_estimator: gae, lam: 0.95}\ncritic: {optim: {lr: 1.0e-5}, model: {path: c}}\n"
    )
    assert ppo.flow == "ppo" and ppo.algorithm["lam"] == 0.95 and ppo.algorithm["reward"] == "verify"
    assert ppo.roles["critic"].learning_rate == 1e-5 and str(ppo.roles["critic"].model) == "c"
    reward = "reward_model: {reward_manager: dapo, +reward_kwargs: {overlong_buffer_cfg: {len: 4096, enable: true}}}\n"
    dapo, _ = imported(tmp_path, base + "algorithm: {adv_estimator: grpo}\n" + reward)
    assert dapo.flow == "dapo" and dapo.algorithm["overlong_cache"] == 4096
    asynchronous, _ = imported(
        tmp_path, base + "trainer: {v1: {trainer_mode: separate_async, sampler: {max_off_policy_threshold: 2}}}"
    )
    assert asynchronous.runtime == "streaming" and asynchronous.trainer.max_staleness == 2


def test_the_command_writes_a_file_that_loads_and_overwrites_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "verl.yaml", tmp_path / "braid.yaml"
    source.write_text(GRPO)
    lines = list(write_imported(source, target))
    assert any(
        line.startswith(f"{target}: ") for line in lines
    ) and "trainer.no_such_key  without counterpart: " in str(lines)
    assert not any(line.startswith("to be mended") for line in lines)
    assert parse_config(yaml.safe_load(target.read_text())).trainer.steps == 300
    with pytest.raises(UserError, match="exists; nothing was overwritten"):
        list(write_imported(source, target))
    for text, says in (("flow: grpo\n", "names no model"), ("- 1\n", "must hold keys and values")):
        source.write_text(text)
        with pytest.raises(UserError, match=says):
            import_config(source)


@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
def test_every_row_names_a_key_that_braid_has(rows: dict[str, dict[str, Any]]) -> None:
    wrong = []
    for key, row in rows.items():
        *sections, last = (
            str(row.get("to", "seed")).replace("eval.NAME", "eval").replace("data.train.", "data.train.0.").split(".")
        )
        place = tuple(int(part) if part.isdigit() else part for part in sections)
        free = (
            sections[:1] == ["algorithm"] or sections[:2] == ["rollout", "vllm"] or row.get("to") in ("data.template",)
        )
        if not free and last not in section_keys(place):
            wrong.append((key, row["to"]))
        assert "to" in row or row.get("note") or row.get("rule") or row.get("decide"), (
            f"{key} has neither a counterpart nor a note"
        )
    assert not wrong


def peer(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


def verl_keys() -> Iterator[tuple[str, Any]]:
    keys = yaml.safe_load((peer("verl") / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text())
    yield from flat(keys, WHOLE)


def test_every_key_of_the_installed_verl_has_a_row_and_every_row_a_key() -> None:
    known = dict(verl_keys())
    lacking = [key for key in known if FRAMEWORKS["verl"].row(key) is None]
    stale = [
        row for row, about in VERL.items() if not about.get("alone") and not any(fnmatchcase(key, row) for key in known)
    ]
    assert not lacking and not stale
    given = {row: about["default"] for row, about in VERL.items() if "default" in about}
    asked = {row for row in given if known[row] != "???"}  # verl has no default: the user names it
    assert {row: given[row] for row in asked} == {row: known[row] for row in asked}


def test_every_field_of_the_installed_trl_has_a_row_and_every_row_a_field() -> None:
    folder = peer("trl") / "trainer"
    fields = set[str]()
    for file, name in (("grpo_config.py", "GRPOConfig"), ("base_config.py", "_BaseConfig")):
        (result,) = [
            node
            for node in ast.parse((folder / file).read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        fields |= {
            node.target.id
            for node in result.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    inherited = importlib.import_module("transformers").TrainingArguments.__dataclass_fields__
    own = {name for name in fields if not name.startswith("_")}
    assert not own - TRL.keys()
    assert not [row for row, about in TRL.items() if not about.get("alone") and row not in own and row not in inherited]


def test_an_imported_configuration_loads_from_its_file(tmp_path: Path) -> None:
    source = tmp_path / "verl.yaml"
    source.write_text(GRPO.replace("my_reward.py", str(tmp_path / "my_reward.py")))
    (tmp_path / "my_reward.py").write_text("def compute_score(response): return 1.0\n")
    list(write_imported(source, tmp_path / "braid.yaml"))
    assert load_config(tmp_path / "braid.yaml").flow == "grpo"


def test_the_pages_have_the_tables_that_the_lists_make() -> None:
    script = load_module(ROOT / "docs" / "write_migration.py")
    for page, keys in script.PAGES.items():
        assert page.read_text(encoding="utf-8") == script.written(page, keys), "run: python docs/write_migration.py"
