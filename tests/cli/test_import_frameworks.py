"""Configurations of AReaL, prime-rl, newer OpenRLHF and TRL: files of several kinds, each key translated or listed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from braidrl.cli.import_config import DECIDE, TRANSLATED, WITHOUT, KeyOutcome, import_config, write_imported
from braidrl.cli.import_scripts import Shell, arrays_in, assign_array
from braidrl.cli.importing import rules
from braidrl.cli.importing.frameworks import FRAMEWORKS
from braidrl.config import Config, parse_config
from braidrl.errors import UserError
from braidrl.flow.recipes.load import NAMES, RECIPES, parameter_model

AREAL = """
experiment_name: sums
seed: 3
total_train_steps: 30
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: runs}
allocation_mode: vllm:d2t2+fsdp:d4
rollout: {max_head_offpolicyness: 2, consumer_batch_size: "${train_dataset.batch_size}"}
gconfig: {n_samples: 4, max_new_tokens: 256, temperature: 0.9, greedy: false}
actor:
  path: /models/tiny
  optimizer: {type: adam, lr: 2e-6, beta2: 0.99, warmup_steps_proportion: 0.1, lr_scheduler_type: constant}
  eps_clip: 0.2
  eps_clip_higher: 0.28
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  reward_norm: {mean_level: group, std_level: null}
  adv_norm: {mean_level: batch}
  my_own: 3
train_dataset: {path: openai/gsm8k, batch_size: 64, max_length: 512, type: rl}
evaluator: {freq_steps: 20, freq_epochs: null}
stats_logger: {wandb: {mode: online}}
"""
PRIME = """
max_steps = 20
seq_len = 2048
[model]
name = "m/tiny"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.env]]
taskset = { id = "org/sums", deep = { level = 2 } }
harness = { id = "null" }
[[orchestrator.train.env]]
taskset = { id = "org/words" }
[trainer.model.ac]
[trainer.optim]
lr = 3e-6
betas1 = 0.8
"""
ORCHESTRATOR = """
batch_size = 64
rollouts_per_example = 8
max_async_level = 2
[sampling]
max_tokens = 99
[[env]]
id = "sums"
args = { n = 3 }
"""


def imported(folder: Path, name: str, text: str) -> tuple[Config, dict[str, KeyOutcome]]:
    (folder / name).write_text(text)
    tree, outcomes = import_config(folder / name)
    return parse_config(tree), outcomes


def kinds(outcomes: Mapping[str, KeyOutcome], kind: str) -> set[str]:
    return {key for key, outcome in outcomes.items() if outcome.kind == kind}


def test_areals_yaml_keeps_layout_staleness_losses_and_batches(tmp_path: Path) -> None:
    config, outcomes = imported(tmp_path, "areal.yaml", AREAL)
    trainer, algorithm = config.trainer, config.algorithm
    assert (config.flow, str(config.model), config.workers, config.runtime) == ("grpo", "/models/tiny", 4, "streaming")
    assert (config.rollout.engine, config.rollout.tensor, trainer.layout.shard) == ("vllm", 2, "full")
    assert (trainer.steps, trainer.prompts_per_step, trainer.rows_per_update, trainer.warmup_steps) == (30, 64, 128, 3)
    assert (trainer.max_staleness, trainer.learning_rate, trainer.betas[1]) == (2, 2e-6, 0.99)
    assert (algorithm["clip_low"], algorithm["clip_high"], algorithm["normalise"]) == (0.2, 0.28, False)
    assert algorithm["correction"] == {"name": "masked", "low": 0.0, "high": 5.0} and algorithm["old"] == "recompute"
    assert config.reward.verify[0].name == "math" and [one.name for one in config.trackers] == ["wandb"]
    assert kinds(outcomes, DECIDE) == {"actor.adv_norm.mean_level", "actor.my_own", "reward.verify"}
    assert outcomes["actor.eps_clip_higher"].kind == TRANSLATED


def test_a_command_of_areal_reads_its_file_and_its_overrides_go_before_it(tmp_path: Path) -> None:
    (tmp_path / "areal.yaml").write_text(AREAL)
    command = "python3 examples/math/gsm8k_rl.py --config areal.yaml gconfig.n_samples=8 allocation_mode=d1+d1 +a.b=1"
    config, outcomes = imported(tmp_path, "run.sh", command)
    assert (config.rollout.samples_per_prompt, config.workers, config.rollout.engine) == (8, 1, "embedded")
    assert outcomes["a.b"].kind == DECIDE
    with pytest.raises(UserError, match=r"no configuration file .*none\.yaml"):
        imported(tmp_path, "run.sh", "python3 -m areal.launcher.ray train.py --config none.yaml")


def test_prime_rls_toml_keeps_batches_environment_and_rates(tmp_path: Path) -> None:
    config, outcomes = imported(tmp_path, "rl.toml", PRIME)
    environment = config.rollout.environment
    assert environment is not None and environment.name == "verifiers:sums"
    assert environment.params == {"deep": {"level": 2}}
    assert (config.trainer.steps, config.trainer.prompts_per_step, config.rollout.samples_per_prompt) == (20, 8, 16)
    assert config.trainer.activation_checkpointing and config.trainer.betas[0] == 0.8
    assert config.algorithm == {"kl_coef": 0.0, "normalise": False}
    decided = kinds(outcomes, DECIDE)
    assert {"runtime", "data.train", "orchestrator.train.env.1.taskset.id"} <= decided
    assert "orchestrator.train.env.0.harness.id" in decided


def test_prime_rls_command_joins_its_files_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(PRIME)
    (tmp_path / "orch.toml").write_text(ORCHESTRATOR)
    config, outcomes = imported(
        tmp_path, "run.sh", "uv run rl @ rl.toml --trainer.optim.lr 1e-5 --max-steps 7 --odd 3\n"
    )
    assert (config.trainer.learning_rate, config.trainer.steps, outcomes["odd"].kind) == (1e-5, 7, DECIDE)
    text = "uv run rl --orchestrator @ orch.toml --model.name m/b --inference.parallel.tp 2"
    config, _ = imported(tmp_path, "run.sh", text)
    assert (config.trainer.prompts_per_step, config.rollout.tensor, config.trainer.max_staleness) == (8, 2, 2)


def test_prime_rls_supervised_files_are_the_recipe_sft(tmp_path: Path) -> None:
    text = 'max_steps = 9\n[model]\nname = "m"\n[data]\nbatch_size = 32\n[[data.source]]\ndataset = "a/b"\n'
    text += "[optim]\nlr = 2e-5\n"
    config, _ = imported(tmp_path, "sft.toml", text)
    assert (config.flow, config.trainer.prompts_per_step, config.trainer.learning_rate) == ("sft", 32, 2e-5)
    assert config.rollout.samples_per_prompt == 1
    with pytest.raises(UserError, match="no TOML"):
        imported(tmp_path, "sft.toml", "a = = 1")
    with pytest.raises(UserError, match="names no model and no data by keys"):
        imported(tmp_path, "other.toml", "[tool]\nname = 1\n")


PAIRS = """
total_train_epochs: 1
beta: 0.2
loss_type: LOSS
actor: {path: m, backend: "fsdp:d2p1t1", optimizer: {lr: 5e-6}}
train_dataset: {path: org/pairs, type: TYPE, batch_size: 4}
"""


@pytest.mark.parametrize(("kind", "flow"), [("dpo", "dpo"), ("rw", "reward_model"), ("sft", "sft")])
def test_areals_type_of_data_decides_the_recipe(kind: str, flow: str, tmp_path: Path) -> None:
    text = PAIRS.replace("TYPE", kind).replace("LOSS", "ipo")
    config, outcomes = imported(tmp_path, "areal.yaml", text)
    assert config.flow == flow and config.rollout.samples_per_prompt == (1 if flow == "sft" else 2)
    assert outcomes["beta"].kind == (TRANSLATED if flow == "dpo" else WITHOUT)
    assert outcomes["loss_type"].kind == (DECIDE if flow == "dpo" else WITHOUT)


@pytest.mark.parametrize(
    ("given", "is_decided"),
    [("", True), ("reward_norm: null", True), ("reward_norm: {mean_level: group, std_level: group}", False)],
)
def test_rewards_that_areal_does_not_compare_in_groups_are_to_decide(
    given: str, is_decided: bool, tmp_path: Path
) -> None:
    text = f"gconfig: {{n_samples: 4}}\nactor: {{path: m, eps_clip: 0.2{', ' if given else ''}{given}}}\n"
    _, outcomes = imported(tmp_path, "areal.yaml", text)
    assert ("actor.reward_norm" in kinds(outcomes, DECIDE)) == is_decided


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        ("behave_imp_weight_cap: 4.0", {"name": "masked", "low": 0.0, "high": 4.0}),
        ("rejection_sampling: {metric: ratio, upper: 5.0}", {"name": "masked", "low": 0.0, "high": 5.0}),
        ("rejection_sampling: {metric: kl, upper: 5.0}", None),
        ("eps_clip_higher: null", None),
    ],
)
def test_areals_decoupled_weights_have_their_cap_or_are_to_decide(cap: str, expected: Any, tmp_path: Path) -> None:
    text = f"gconfig: {{n_samples: 4}}\nactor: {{path: m, eps_clip: 0.2, use_decoupled_loss: true, {cap}}}\n"
    config, outcomes = imported(tmp_path, "areal.yaml", text)
    assert config.algorithm.get("correction") == expected
    decided = {key for key in kinds(outcomes, DECIDE) if "imp_weight" in key or "sampling" in key or "decoupled" in key}
    assert bool(decided) == (expected is None)


@pytest.mark.parametrize("delimiter", ["-d ''", "-r -d ''", '-r -d ""'])
def test_arguments_that_read_takes_from_a_here_document_are_those_of_the_command(
    delimiter: str, tmp_path: Path
) -> None:
    text = (
        f"set -x\nread {delimiter} training_commands <<EOF\nopenrlhf.cli.train_rm \\\n   --pretrain m \\\n"
        '   --dataset "org/pairs" \\\n   --learning_rate 9e-6 --train_batch_size 16\nEOF\n     # --use_wandb x\n'
        "if [[ ${1} != slurm ]]; then\n    deepspeed --module $training_commands\nfi\n"
    )
    config, outcomes = imported(tmp_path, "rm.sh", text)
    assert (config.flow, config.trainer.learning_rate, config.trainer.prompts_per_step) == ("reward_model", 9e-6, 16)
    assert str(config.data.train[0].path) == "org/pairs" and "use_wandb" not in outcomes
    assert config.data.train[0].prompt_field == "prompt", "OpenRLHF's pairs have no field of prompts by default"


@pytest.mark.parametrize("script", ["slime", "verl"])
def test_a_model_whose_folder_the_script_alone_knows_is_to_be_written(script: str, tmp_path: Path) -> None:
    commands = {
        "slime": "python3 train.py --hf-checkpoint ${BASE}/m --loss-type sft_loss --prompt-data a.jsonl --lr 1e-5",
        "verl": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$BASE/m data.train_files=a.parquet",
    }
    (tmp_path / "run.sh").write_text(commands[script])
    tree, outcomes = import_config(tmp_path / "run.sh")
    key = {"slime": "hf_checkpoint", "verl": "actor_rollout_ref.model.path"}[script]
    assert "model" not in tree and outcomes[key].kind == DECIDE and "write the value" in outcomes[key].text
    assert "'model' is not set" in list(write_imported(tmp_path / "run.sh", tmp_path / "braid.yaml"))[-1]
    if script == "slime":
        assert tree["flow"] == "sft" and "chat_template" not in tree["data"]


def test_a_script_of_trls_asynchronous_trainer_keeps_its_settings(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer\n"
        "AsyncGRPOTrainer(model='m', args=AsyncGRPOConfig(max_steps=9, num_generations=4, max_staleness=3))\n"
    )
    tree, outcomes = import_config(tmp_path / "run.py")
    assert (tree["flow"], tree["trainer"]["steps"], tree["rollout"]["samples_per_prompt"]) == ("grpo", 9, 4)
    assert {"runtime", "max_staleness"} <= kinds(outcomes, DECIDE)


def test_openrlhfs_dotted_arguments_mean_what_the_flat_ones_do(tmp_path: Path) -> None:
    flat = (
        "--pretrain m --advantage_estimator reinforce_baseline --rollout_batch_size 64 --n_samples_per_prompt 4 "
        "--train_batch_size 128 --eps_clip_low_high 0.2 0.27 --actor_learning_rate 5e-7 --zero_stage 3 "
        "--actor_num_gpus_per_node 4 --init_kl_coef 1e-4 --use_kl_loss --kl_estimator k2 --prompt_data a.jsonl "
        "--input_key prompt --label_key label --generate_max_len 99 --enable_vllm_is_correction "
        "--vllm_is_truncated_threshold 0.5 5.0 --use_icepop --save_steps 5"
    )
    table = {key: row["also"][0] for key, row in FRAMEWORKS["OpenRLHF"].table.items() if row.get("also")}
    dotted = re.sub(r"--(\w+)", lambda match: f"--{table.get(match[1], match[1])}", flat)
    assert dotted.count(".") > flat.count(".") + 15
    command = "python3 -m openrlhf.cli.train_ppo_ray "
    configs = [imported(tmp_path, "run.sh", command + arguments) for arguments in (flat, dotted)]
    assert configs[0][0] == configs[1][0] and "actor.adam.lr" in configs[1][1]
    config = configs[1][0]
    assert config.flow == "reinforce_plus_plus" and config.algorithm["baseline"] is True
    assert (config.algorithm["clip_high"], config.algorithm["kl_coef"]) == (0.27, 1e-4)
    assert config.algorithm["correction"] == {"name": "masked", "low": 0.5, "high": 5.0}


def test_trls_mixtures_and_names_of_rewards_keep_what_is_known(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: m\nmax_completion_length: 9\nlearning_rate: 1e-5\nmax_steps: 3\n"
        "dataset_mixture: {datasets: [{id: a/b, config: main, split: x, weight: 0.5}, {id: c.jsonl, columns: [d]}]}\n"
        "reward_funcs: [accuracy, tag_count]\nsystem_prompt: Be brief.\n"
    )
    config, outcomes = imported(tmp_path, "grpo.yaml", text)
    assert [(str(s.path), s.subset, s.weight) for s in config.data.train] == [
        ("a/b", "main", 0.5),
        ("c.jsonl", None, 1),
    ]
    assert [one.name for one in config.reward.verify] == ["math"] and config.data.system_prompt == "Be brief."
    assert "columns" in outcomes["dataset_mixture"].text and "tag_count" in outcomes["reward_funcs"].text


TRL_FILES = {
    "beta: 0.01\nloss_type: sigmoid\n": ("dpo", 1e-6, 2),
    "loss_type: sigmoid\n": ("dpo", 1e-6, 2),
    "packing: true\n": ("sft", 2e-5, 1),
    "center_rewards_coefficient: 0.01\n": ("reward_model", 1e-4, 2),
    "reward_funcs: accuracy_reward\n": ("grpo", 1e-6, 8),
}


@pytest.mark.parametrize("keys", TRL_FILES)
def test_the_trainer_of_a_yaml_file_of_trl_follows_from_what_it_states(keys: str, tmp_path: Path) -> None:
    text = f"model_name_or_path: m\ndataset_name: a/b\nmax_steps: 3\nper_device_train_batch_size: 4\n{keys}"
    config, outcomes = imported(tmp_path, "trl.yaml", text)
    assert (config.flow, config.trainer.learning_rate, config.rollout.samples_per_prompt) == TRL_FILES[keys]
    assert config.algorithm.get("beta", 0.1) == (0.01 if "0.01\nl" in keys else 0.1)
    assert ("guess" in outcomes["flow"].text) if config.flow != "grpo" else "flow" not in outcomes


BROKEN = {
    "areal.yaml": "gconfig: {n_samples: four}\nactor: {path: m, eps_clip: [], ppo_n_minibatches: 0}\n",
    "trl.yaml": "model_name_or_path: m\ndatasets: 3\ndataset_mixture: {datasets: [3]}\nreward_funcs: {a: 1}\n",
    "rl.toml": '[model]\nname = "m"\n[orchestrator]\nbatch_size = "x"\n[[orchestrator.train.env]]\nid = ["a"]\n',
}


@pytest.mark.parametrize("name", BROKEN)
def test_values_of_a_wrong_type_are_to_decide(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(BROKEN[name])
    _, outcomes = import_config(tmp_path / name)
    assert any("no value that is known" in outcome.text for outcome in outcomes.values())


def test_trls_negated_arguments_and_betas_default_are_read(tmp_path: Path) -> None:
    text = "trl dpo --model_name_or_path m --dataset_name a/b --max_steps 3 --no_remove_unused_columns --no_bf16"
    config, outcomes = imported(tmp_path, "run.sh", text)
    assert config.algorithm["beta"] == 0.1 and {"remove_unused_columns", "bf16"} <= outcomes.keys()


def test_verls_supervised_script_keeps_fields_adapters_and_processes(tmp_path: Path) -> None:
    text = (
        "torchrun --standalone --nnodes=1 --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer \\\n"
        " data.train_files=a.parquet data.prompt_key=extra_info data.prompt_dict_keys=['question'] \\\n"
        " +data.response_dict_keys=['answer'] \\\n"
        " data.response_key=extra_info model.partial_pretrain=m model.lora_rank=8 optim.lr=1e-4 \\\n"
        " trainer.total_training_steps=20 optim.warmup_steps_ratio=0.1 ulysses_sequence_parallel_size=2\n"
        "python3 -m verl.trainer.main_generation model.path=b data.path=c\n"
    )
    config, outcomes = imported(tmp_path, "run.sh", text)
    (source,) = config.data.train
    assert (source.prompt_field, source.response_field) == ("extra_info.question", "extra_info.answer")
    assert (config.flow, config.workers, config.trainer.layout.sequence, config.trainer.warmup_steps) == (
        "sft",
        2,
        2,
        2,
    )
    assert config.trainer.lora is not None and config.trainer.learning_rate == 1e-4 and not kinds(outcomes, DECIDE)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python3 -m openrlhf.cli.train_kto --pretrain m", "train_kto has no counterpart"),
        ("python examples/scripts/online_dpo.py --model_name_or_path m", "starts no training that is known"),
        ("trl kto --model_name_or_path m", "starts no training that is known"),
    ],
)
def test_trainers_without_a_recipe_are_refused_in_a_line(command: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        imported(tmp_path, "run.sh", command)


ARRAYS = {
    "sums and defaults": ('A=(--n $((2*(3+4))) --m "$(( 1 + 1 ))")', ["--n", "14", "--m", "2"]),
    "declared": (
        "declare -a A=(\n --n 1   # a comment's apostrophe (and a bracket\n --m 2\n)",
        ["--n", "1", "--m", "2"],
    ),
    "added behind a condition": ("A=(--n 1)\n[[ -n $X ]] && A+=(--m 2)", ["--n", "1", "--m", "2"]),
    "in one line": ("if true; then A=(--n 1); fi; A+=(--m 2)", ["--n", "1", "--m", "2"]),
    "quoted over lines": ('A=(--n \'{\n "a": (1)\n}\' --m "x)y")', ["--n", '{\n "a": (1)\n}', "--m", "x)y"]),
    "out of another": ('B=(--n 1)\nA=("${B[@]}" --m 2)', ["--n", "1", "--m", "2"]),
}


@pytest.mark.parametrize("form", ARRAYS)
def test_arrays_of_scripts_keep_every_word(form: str) -> None:
    script, expected = ARRAYS[form]
    shell = Shell()
    for array in arrays_in(script):
        assign_array(shell, array)
    assert shell.arrays["A"] == expected


def test_scripts_that_a_script_sources_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("MODEL_ARGS=(--num-layers 2)\nsource models/tiny.sh\n")
    text = (
        'HERE="$(cd "$(dirname "$0")" && pwd)"\nsource "${HERE}/models/tiny.sh"\nsource ./run.sh\n. "${HERE}/none.sh"\n'
        'python3 train.py "${MODEL_ARGS[@]}" --hf-checkpoint m --num-rollout 3 --prompt-data a.jsonl'
    )
    _, outcomes = imported(tmp_path, "run.sh", text)
    assert "num_layers" in outcomes and "MODEL_ARGS" not in outcomes


FLOWS: Mapping[str, set[str]] = {
    "verl-SFT": {"sft"},
    "verl": {*rules.VERL_FLOWS.values(), "dapo"},
    "OpenRLHF": {*rules.OPENRLHF_FLOWS.values(), "sft", "dpo", "reward_model"},
    "slime": set(rules.SLIME_FLOWS.values()),
    "TRL": {"grpo", "rloo", "dpo", "sft", "reward_model"},
    "AReaL": {"grpo", "ppo", "dapo", "gspo", "rloo", "sft"},
    "prime-rl": {"grpo", "sft"},
}


@pytest.mark.parametrize("framework", FLOWS)
def test_a_key_is_kept_for_every_recipe_that_has_its_counterpart(framework: str) -> None:
    fields = {name: getattr(parameter_model(name, RECIPES.find(name)), "model_fields", {}) for name in NAMES}
    wrong = []
    for key, row in FRAMEWORKS[framework].table.items():
        name = str(row.get("to", "")).removeprefix("algorithm.")
        # Losses, aggregation and the KL term have rules of their own that say where they are left out.
        if f"algorithm.{name}" != row.get("to") or name in ("loss", "aggregate", "kl_coef", "kl_estimator", "beta"):
            continue
        have = {flow for flow in FLOWS[framework] if name in fields[flow]}
        given = set(str(row["of"]).split()) if "of" in row else have
        if have - given:
            wrong.append((key, sorted(have - given)))
    assert not wrong, wrong


def test_no_name_belongs_to_two_keys_of_a_table() -> None:
    for framework in FRAMEWORKS.values():
        listed: list[Any] = [name for row in framework.table.values() for name in row.get("also", ())]
        assert len(listed) == len(set(listed)) and not set(listed) & framework.table.keys(), framework.name


def test_every_row_of_a_table_names_a_rule() -> None:
    unknown = {
        (framework.name, key): row["rule"]
        for framework in FRAMEWORKS.values()
        for key, row in framework.table.items()
        if row.get("rule", "") not in rules.RULES
    }
    assert not unknown
