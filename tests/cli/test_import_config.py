"""Configurations in the form of other frameworks' examples: each key is translated or listed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from braidrl.cli.import_config import DECIDE, TRANSLATED, WITHOUT, KeyOutcome, import_config, write_imported
from braidrl.cli.import_scripts import COMMAND_LINE, read_commands
from braidrl.config import Config, load_config, parse_config
from braidrl.errors import UserError
from braidrl.flow.recipes.load import load_flow
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from tests.tiny import TOKENIZER, write_jsonl, write_model

VERL_GSM8K = r"""
set -x
# a comment with an apostrophe: it's ignored
DATA=${DATA:-data/gsm8k}
GPUS=4
batch=$((GPUS * 32))

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files=["$DATA/test.parquet"] \
    data.train_batch_size=${batch} \
    data.max_prompt_length=512 data.max_response_length=1024 \
    data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.policy_loss.loss_mode=cispo \
    actor_rollout_ref.actor.clip_ratio_low=0.5 actor_rollout_ref.actor.clip_ratio_high=3.0 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=8 \
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=$GPUS trainer.nnodes=1 \
    trainer.total_training_steps=200 trainer.my_own_key=1 \
    trainer.default_local_dir=$CKPT/run "$@"
"""
VERL_DAPO = r"""
project='DAPO'
max_response=$((1024 * 4))
overlong=$((max_response / 4)); buffer=${overlong}
export RAY=1
ray job submit --address="${RAY_ADDRESS}" --working-dir "." -- python3 -m recipe.dapo.main_dapo \
    data.train_files="${HOME}/data/dapo-math-17k.parquet" \
    data.train_batch_size=512 data.max_response_length=${max_response} \
    algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-32B actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.n=16 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 1)) reward_model.reward_manager=dapo \
    trainer.project_name="${project}" trainer.nnodes=16 trainer.total_epochs=10
"""
OPENRLHF_PPO = r"""
python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --actor_num_nodes 1 --actor_num_gpus_per_node 8 --vllm_num_engines 4 \
   --vllm_tensor_parallel_size 2 --colocate_all_models --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
   --remote_rm_url examples/reward_func.py --save_path ./ckpt --micro_train_batch_size 8 \
   --train_batch_size 128 --rollout_batch_size 256 --n_samples_per_prompt 8 --max_epochs 1 --prompt_max_len 1024 \
   --num_episodes 2 --generate_max_len 2048 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 \
   --advantage_estimator group_norm --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \
   --eps_clip_low_high 0.2 0.28 --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages \
   --apply_chat_template --normalize_reward --gradient_checkpointing --packing_samples --adam_offload \
   --use_wandb wandb_token --no_such_argument 3
"""
SLIME = r"""
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   #--hf-checkpoint /root/Qwen3-4B-FP8
   --ref-load /root/Qwen3-4B_torch_dist
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k.jsonl
   --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
   --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 8192 --rollout-temperature 0.8
   --global-batch-size 256 --balance-data
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime /root/aime-2024.jsonl --n-samples-per-eval-prompt 16)
GRPO_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.98)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --use-dynamic-batch-size)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} "${EVAL_ARGS[@]}" \
   ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} ${PERF_ARGS[@]} --sglang-mem-fraction-static 0.7
"""
TRL_GRPO = """
chat_template_kwargs: {enable_thinking: false}
gradient_checkpointing_kwargs: {use_reentrant: false}
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, think_format_reward]
reward_weights: [1.0, 0.2]
output_dir: runs/grpo
learning_rate: 1.0e-5
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 1024
max_steps: 250
warmup_ratio: 0.1
loss_type: dapo
scale_rewards: none
use_vllm: true
vllm_mode: colocate
use_peft: true
lora_r: 32
lora_target_parameters: [mlp.experts.gate_up_proj]
bf16: true
report_to: [trackio]
log_completions: true
nonsense: 1
"""
TRL_DPO = r"""
accelerate launch --num_processes 2 --config_file=configs/zero3.yaml trl/scripts/dpo.py \
    --dataset_name trl-lib/ultrafeedback_binarized --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
    --learning_rate 5.0e-7 --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --max_steps 1000 --eval_strategy steps --eval_steps 50 --beta 0.2 --no_remove_unused_columns
"""
CASES = {
    "gsm8k.sh": VERL_GSM8K,
    "dapo.sh": VERL_DAPO,
    "ppo.sh": OPENRLHF_PPO,
    "slime.sh": SLIME,
    "grpo.yaml": TRL_GRPO,
    "dpo.sh": TRL_DPO,
}


def imported(folder: Path, name: str, text: str | None = None) -> tuple[Config, dict[str, KeyOutcome]]:
    path = folder / name
    path.write_text(CASES[name] if text is None else text)
    tree, outcomes = import_config(path)
    return parse_config(tree), outcomes


def kinds(outcomes: dict[str, KeyOutcome], kind: str) -> set[str]:
    return {key for key, outcome in outcomes.items() if outcome.kind == kind}


@pytest.mark.parametrize("name", CASES)
def test_every_key_of_an_example_has_an_outcome_and_the_lines_count_them(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(CASES[name])
    lines = list(write_imported(path, tmp_path / "braid.yaml"))
    _, outcomes = import_config(path)
    words = {word.lstrip("+-").partition("=")[0] for c in read_commands(path) for word in c} if "sh" in name else set()
    keys = {word.replace("-", "_") if "." not in word else word for word in words if "." in word or "_" in word}
    given = set(yaml.safe_load(CASES[name])) if name.endswith("yaml") else {key for key in outcomes if key in keys}
    assert given <= outcomes.keys() and COMMAND_LINE not in outcomes
    for key in given:
        assert any(line.startswith(f"{key}  ") for line in lines), key
    counts = Counter(outcome.kind for outcome in outcomes.values())
    numbers = ", ".join(f"{counts[kind]} {kind}" for kind in (TRANSLATED, DECIDE, WITHOUT))
    summary = f"{len(outcomes)} keys: {numbers}"
    assert summary in lines and not any(line.startswith("to be mended") for line in lines), lines
    assert counts[TRANSLATED] > len(outcomes) / 3 and all(outcome.text for outcome in outcomes.values())


def test_a_verl_script_keeps_its_loss_layout_warm_up_and_offload(tmp_path: Path) -> None:
    config, outcomes = imported(tmp_path, "gsm8k.sh")
    trainer, algorithm = config.trainer, config.algorithm
    assert algorithm["loss"] == {"name": "cispo", "low": 0.5, "high": 3.0} and "clip_low" not in algorithm
    assert algorithm["aggregate"] == {"name": "token-sum-norm", "max_tokens": 1024}
    assert (trainer.layout.shard, config.workers, config.runtime) == ("full", 4, "hybrid")
    assert (trainer.prompts_per_step, trainer.rows_per_update, trainer.steps, trainer.warmup_steps) == (
        128,
        320,
        200,
        20,
    )
    assert config.reward.verify[0].name == "gsm8k" and config.rollout.vllm["swap_space"] == 8
    assert "guess" in outcomes["reward.verify"].text
    assert {
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "trainer.default_local_dir",
    } <= kinds(outcomes, DECIDE)
    assert "trainer.resident_gib" in outcomes["actor_rollout_ref.actor.fsdp_config.param_offload"].text
    assert {"data.truncation", "data.filter_overlong_prompts", "trainer.my_own_key"} <= kinds(outcomes, WITHOUT)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("vanilla", None),
        ("gspo", {"name": "gspo", "low": 0.2, "high": 0.2}),
        ("geo_mean", {"name": "gmpo", "low": 0.2, "high": 0.2}),
        ("gpg", {"name": "reinforce"}),
        ("kl_cov", {"name": "kl_cov", "coef": 0.1}),
        ("of_my_own", "braid list losses"),
    ],
)
def test_a_loss_of_verl_keeps_its_meaning_or_is_to_decide(mode: str, expected: Any, tmp_path: Path) -> None:
    text = f"actor_rollout_ref: {{model: {{path: m}}, actor: {{policy_loss: {{loss_mode: {mode}}}}}}}\n"
    config, outcomes = imported(
        tmp_path, "verl.yaml", f"algorithm.adv_estimator: grpo\ndata.train_files: a.parquet\n{text}"
    )
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    if isinstance(expected, str):
        assert outcomes[key].kind == DECIDE and expected in outcomes[key].text
    else:
        assert config.algorithm.get("loss") == expected and outcomes[key].kind == TRANSLATED
    assert config.algorithm["aggregate"] == ("seq-mean-token-mean" if mode in ("gspo", "geo_mean") else "token-mean")


COVARIANCES = {
    "clip_cov clip_cov_ratio=0.001 clip_cov_ub=4": ({"name": "clip_cov", "low": 0.2, "high": 0.2}, (0.001, 1.0, 4.0)),
    "kl_cov kl_cov_ratio=0.002 ppo_kl_coef=1.0": ({"name": "kl_cov", "coef": 1.0}, (0.002, None, None)),
    "vanilla kl_cov_ratio=0.002": (None, None),
}


@pytest.mark.parametrize("given", COVARIANCES)
def test_losses_over_covariances_keep_their_settings_and_run_as_a_recipe(given: str, tmp_path: Path) -> None:
    mode, *settings = given.split()
    loss = "actor_rollout_ref.actor.policy_loss"
    words = " ".join(f"+{loss}.{setting}" for setting in settings)
    script = VERL_GSM8K.replace(f"{loss}.loss_mode=cispo", f"{loss}.loss_mode={mode} {words}")
    bounds = "actor_rollout_ref.actor.clip_ratio_low=0.5 actor_rollout_ref.actor.clip_ratio_high=3.0"
    config, outcomes = imported(tmp_path, "run.sh", script.replace(bounds, ""))
    named, chosen = COVARIANCES[given]
    assert config.algorithm.get("loss") == named
    covariance = config.algorithm.get("covariance")
    if chosen is None:
        assert covariance is None and outcomes[f"{loss}.kl_cov_ratio"].kind == WITHOUT
        return
    assert tuple(covariance.get(name) for name in ("fraction", "low", "high")) == chosen
    stages = [stage.type for stage in load_flow("grpo", config.algorithm).stages]
    assert stages.index("shape.highest_covariance") == stages.index("shape.covariance") + 1
    # Braid takes the highest covariances, where verl draws at random.
    assert outcomes[f"{loss}.loss_mode"].kind == (DECIDE if mode == "clip_cov" else TRANSLATED)


def test_settings_of_openrlhf_that_the_loss_takes_over_are_said_to_be_there(tmp_path: Path) -> None:
    words = "--policy_loss_type gspo --eps_clip_low_high 0.0003 0.0004 --enable_vllm_is_correction"
    more = "--vllm_is_truncated_threshold 0.5 5.0 --advantage_estimator group_norm"
    tree, outcomes = import_text(tmp_path, f"python3 -m openrlhf.cli.train_ppo_ray --pretrain m {words} {more}")
    assert tree["algorithm"]["loss"] == {"name": "gspo", "low": 0.0003, "high": 0.0004}
    assert outcomes["eps_clip_low_high"].text == "algorithm.loss"
    assert tree["algorithm"]["correction"] == {"name": "truncated", "cap": 5.0}
    assert outcomes["vllm_is_truncated_threshold"].kind == DECIDE  # its lower bound
    icepop = f"{words} --vllm_is_correction_type icepop {more}"
    tree, _ = import_text(tmp_path, f"python3 -m openrlhf.cli.train_ppo_ray --pretrain m {icepop}")
    assert tree["algorithm"]["correction"] == {"name": "masked", "low": 0.5, "high": 5.0}


VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet"
FORMS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "commands of one line": (f"A=3; B=$((A ** 2 % 5)); cd /x && {VERL} trainer.nnodes=$B", {"workers": 32}, set()),
    "pipe and redirection": (f"{VERL} trainer.nnodes=2 2>&1 > log.txt | tee out &\nwait", {"workers": 16}, set()),
    "here-document": (f"cat > a.yaml <<'END'\nit's [open\nEND\n{VERL} trainer.nnodes=2", {"workers": 16}, set()),
    "eval": (f'CMD="{VERL}"\nCMD+=" trainer.nnodes=2"\necho $CMD\neval $CMD', {"workers": 16}, set()),
    "bash -c": (f'srun -N 2 bash -c "{VERL} trainer.nnodes=2"', {"workers": 16}, set()),
    "comments between lines": (f"{VERL} \\\n  # one \\\n  `# two` \\\n trainer.nnodes=2", {"workers": 16}, set()),
    "nested default": (
        f'{VERL} actor_rollout_ref.model.path="${{P:-"${{Q:-x/y}}"}}"',
        {"model": "x/y"},
        set(),
    ),
    "end cut off": (f"F=a/qwen.sh\n{VERL} actor_rollout_ref.model.path=${{F%.*}}", {"model": "a/qwen"}, set()),
    "begin cut off": (f"F=a/b/qwen\n{VERL} actor_rollout_ref.model.path=${{F##*/}}", {"model": "qwen"}, set()),
    "condition": (
        f"N=1\nif [ $1 = big ]; then\n N=4\nfi\n{VERL} trainer.nnodes=$N",
        {"workers": 32},
        {"trainer.nnodes"},
    ),
    "several trainings": (f"{VERL}\n{VERL} trainer.nnodes=2", {"workers": 16}, {"command"}),
    "argument of a function": (
        f"f() {{\n local l=$1\n {VERL} trainer.nnodes=$l\n}}\nf 2",
        {},
        {"trainer.nnodes"},
    ),
    "unknown sum": (f"{VERL} trainer.nnodes=$(( N > 2 ? 1 : 2 ))", {}, {"trainer.nnodes"}),
    "array of another script": (f'{VERL} "${{MORE[@]}}" "$@"', {}, {"$MORE[@]"}),
    "reference to a default": (
        f"{VERL} actor_rollout_ref.actor.ppo_mini_batch_size=\\${{data.train_batch_size}}",
        {"rows_per_update": 1024},
        set(),
    ),
    "mapping": (
        f"{VERL} +data.apply_chat_template_kwargs={{enable_thinking:false}}",
        {"template": {"enable_thinking": False}},
        set(),
    ),
    "entry of a mapping": (
        f"{VERL} +data.apply_chat_template_kwargs.enable_thinking=false",
        {"template": {"enable_thinking": False}},
        set(),
    ),
    "options of Hydra": (f"{VERL} -cn of_my_own --multirun hydra.run.dir=x", {}, {"--config-name"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_scripts_are_read_and_what_only_the_shell_knows_is_to_decide(form: str, tmp_path: Path) -> None:
    script, values, decided = FORMS[form]
    tree, outcomes = import_text(tmp_path, script.replace("\\n", "\n"))
    settings = tree | tree["trainer"] | tree["data"]
    assert {name: settings.get(name) for name in values} == values
    always = {"reward.verify", "trainer.steps"}  # the data are not here, and verl counts epochs
    assert {key for key in outcomes if outcomes[key].kind == DECIDE} - always == decided
    assert "|" not in outcomes and not any("&" in key or key.isdigit() for key in outcomes)


def import_text(folder: Path, script: str) -> tuple[dict[str, Any], dict[str, KeyOutcome]]:
    (folder / "run.sh").write_text(script)
    return import_config(folder / "run.sh")


def test_a_removed_key_is_listed_by_its_name(tmp_path: Path) -> None:
    _, outcomes = import_text(tmp_path, f"{VERL} ~critic ~trainer.logger=wandb")
    assert {"~critic", "~trainer.logger=wandb"} <= kinds(outcomes, WITHOUT)


def test_a_dapo_script_becomes_the_recipe_with_its_overlong_buffer(tmp_path: Path) -> None:
    config, outcomes = imported(tmp_path, "dapo.sh")
    assert config.flow == "dapo" and config.workers == 128 and config.rollout.max_response_tokens == 4096
    assert config.algorithm["overlong_cache"] == 1024 and config.algorithm["clip_high"] == 0.28
    assert config.data.train[0].path == Path("~/data/dapo-math-17k.parquet")
    assert "trainer.steps" in outcomes["trainer.total_epochs"].text


@pytest.mark.parametrize(("on", "tokens"), [("True", 256), ("False", None)])
def test_the_overlong_buffer_keeps_its_meaning_under_its_old_names_too(on: str, tokens: Any, tmp_path: Path) -> None:
    old = VERL_DAPO.replace("+reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 1))", "").replace(
        "reward_model.reward_manager=dapo",
        f'reward_model.overlong_buffer.len=256 reward_model.overlong_buffer.enable={on} "$@"',
    )
    (tmp_path / "run.sh").write_text(old)
    tree, outcomes = import_config(tmp_path / "run.sh")
    assert tree["algorithm"].get("overlong_cache") == tokens and "" not in outcomes
    assert outcomes["reward_model.overlong_buffer.len"].kind == (TRANSLATED if tokens else WITHOUT)


@pytest.mark.parametrize(
    ("mode", "lost"), [("gpg", {"clip_ratio_high", "clip_ratio_c"}), ("gspo", {"clip_ratio_c", "loss_agg_mode"})]
)
def test_settings_that_the_imported_loss_does_not_have_are_to_decide(mode: str, lost: set[str], tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    given = f"{actor}.policy_loss.loss_mode={mode} {actor}.loss_agg_mode=token-mean {actor}.clip_ratio_c=5.0"
    (tmp_path / "run.sh").write_text(VERL_DAPO.replace("trainer.nnodes=16", given))
    _, outcomes = import_config(tmp_path / "run.sh")
    decided = {
        key.rpartition(".")[2]
        for key, one in outcomes.items()
        if one.kind == DECIDE and ("the loss" in one.text or "averages" in one.text)
    }
    assert decided == lost


TRL_SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

data = load_dataset("org/sums", "main", split="train")
STEPS = 4 * 25


def short(completions, **more):
    return [-float(len(one)) for one in completions]


def main():
    settings = GRPOConfig(
        output_dir="runs", num_generations=4, max_completion_length=64, max_steps=STEPS, epsilon=0.1, delta=2.0,
        loss_type="dr_grpo", importance_sampling_level="sequence", seed=len(data),
    )
    GRPOTrainer(
        model="org/model", reward_funcs=[short], args=settings, train_dataset=data, peft_config=LoraConfig(r=8),
    ).train()
"""


def test_a_script_of_trl_in_python_is_read_by_its_calls_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRL_SCRIPT + "\nraise SystemExit('executed')\n")
    tree, outcomes = import_config(tmp_path / "train.py")
    assert tree["model"] == "org/model" and tree["reward"] == {"verify": "train.py:short"}
    assert tree["data"]["train"] == [{"path": "org/sums", "subset": "main", "split": "train"}]
    assert tree["trainer"]["steps"] == 100 and tree["trainer"]["lora"]["rank"] == 8
    assert tree["algorithm"]["loss"] == {"name": "gspo", "low": 0.1, "high": 0.1}
    assert {key for key, one in outcomes.items() if one.kind == DECIDE} == {
        "seed",
        "delta",
        "loss_type",
        "reward_funcs",
    }
    (tmp_path / "other.py").write_text("print(1)")
    with pytest.raises(UserError, match="GRPOTrainer"):
        import_config(tmp_path / "other.py")


def test_openrlhf_and_slime_keep_groups_kl_data_fields_and_layout(tmp_path: Path) -> None:
    config, outcomes = imported(tmp_path, "ppo.sh")
    assert (config.flow, config.algorithm["kl_coef"], config.algorithm["kl_estimator"]) == ("grpo", 1e-3, "k3")
    assert (config.algorithm["clip_low"], config.algorithm["clip_high"]) == (0.2, 0.28)
    assert (config.trainer.layout.shard, config.rollout.tensor, config.rollout.samples_per_prompt) == ("full", 2, 8)
    assert config.data.train[0].prompt_field == "context_messages" and config.data.chat_template
    assert config.reward.verify[0].name == "examples/reward_func.py:reward_func"
    assert {"no_such_argument", "adam_offload", "normalize_reward", "num_episodes"} <= kinds(outcomes, DECIDE)
    config, outcomes = imported(tmp_path, "slime.sh")
    assert (config.trainer.steps, config.trainer.prompts_per_step, config.trainer.rows_per_update) == (3000, 32, 256)
    assert (config.trainer.layout.tensor, config.trainer.betas, config.trainer.weight_decay) == (2, (0.9, 0.98), 0.1)
    assert config.reward.verify[0].name == "math" and config.data.train[0].answer_field == "label"
    assert list(config.data.eval) == ["aime"] and config.algorithm["kl_coef"] == 0 and config.rollout.temperature == 0.8
    assert "sglang" in outcomes["sglang_mem_fraction_static"].text and outcomes["MODEL_ARGS"].kind == WITHOUT


MIXTURES = {
    "megatron.sh": "python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo "
    "data.train_files=a.parquet actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 "
    "actor_rollout_ref.actor.megatron.context_parallel_size=2 "
    "actor_rollout_ref.actor.megatron.router_replay.mode=R3 "
    "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01",
    "veomni.sh": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
    "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.veomni.expert_parallel_size=4 "
    "actor_rollout_ref.actor.veomni.router_replay.mode=R2",
    "slime.sh": "python3 train.py --hf-checkpoint m --prompt-data a.jsonl --label-key label --n-samples-per-prompt 8 "
    "--rm-type math --expert-model-parallel-size 4 --use-rollout-routing-replay --moe-aux-loss-coeff 0.01",
    "areal.yaml": "allocation_mode: sglang:d4+megatron:d4e4\nactor: {path: m, eps_clip: 0.2}\n"
    "gconfig: {n_samples: 8}\ntrain_dataset: {path: a.jsonl, batch_size: 8}\n"
    "rollout: {return_routed_experts: true}\n",
    "prime.toml": 'max_steps = 4\n[model]\nname = "m"\n[trainer.model]\nep = 4\n[trainer]\n'
    "enable_router_replay = true\n[orchestrator]\nbatch_size = 64\nrollouts_per_example = 8\n"
    '[[orchestrator.env]]\nid = "sums"\n',
}


@pytest.mark.parametrize("name", MIXTURES)
def test_expert_parallelism_replay_and_balance_are_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(MIXTURES[name])
    converted, outcomes = import_config(tmp_path / name)
    assert converted["trainer"]["layout"]["expert"] == 4
    assert converted["algorithm"]["replay"] == ("training" if name == "veomni.sh" else "inference")
    balanced = [key for key in outcomes if "moe_aux_loss" in key]
    assert [converted["trainer"]["balance"]["auxiliary"] for _ in balanced] == [0.01] * len(balanced)
    assert len(balanced) == (name in ("megatron.sh", "slime.sh"))


def test_trls_accuracy_reward_reads_the_column_solution(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: m\ndataset_name: org/data\nnum_generations: 8\nrouter_aux_loss_coef: 0.02\n"
        "reward_funcs: [think_format_reward, accuracy_reward]\n"
    )
    converted, _ = import_config(tmp_path / "grpo.yaml")
    assert converted["data"]["train"] == [{"path": "org/data", "answer_field": "solution"}]
    assert converted["trainer"]["balance"] == {"auxiliary": 0.02}


def test_trls_yaml_and_arguments_keep_batches_rewards_and_recipe(tmp_path: Path) -> None:
    config, outcomes = imported(tmp_path, "grpo.yaml")
    trainer, rewards = config.trainer, config.reward.verify
    assert (config.flow, trainer.prompts_per_step, trainer.rows_per_update, trainer.steps) == ("grpo", 4, 32, 250)
    assert [(one.name, one.weight) for one in rewards] == [("math", 1.0), ("format", 0.2)]
    assert trainer.lora is not None and (trainer.lora.rank, trainer.warmup_steps, trainer.schedule) == (
        32,
        25,
        "linear",
    )
    assert "experts.gate_up_proj" in trainer.lora.targets
    assert config.algorithm["normalise"] is False and config.algorithm["aggregate"] == "token-mean"
    assert config.rollout.engine == "vllm" and kinds(outcomes, DECIDE) == {"nonsense"}
    assert config.data.template == {"enable_thinking": False} and "gradient_checkpointing_kwargs" in outcomes
    config, outcomes = imported(tmp_path, "dpo.sh")
    assert (config.flow, config.algorithm["beta"], config.workers) == ("dpo", 0.2, 2)
    assert outcomes["config_file"].kind == DECIDE
    assert (config.trainer.prompts_per_step, config.trainer.steps, config.evaluation.every) == (32, 1000, 50)


def test_a_script_that_starts_nothing_known_or_has_no_model_is_refused(tmp_path: Path) -> None:
    for text, says in (("echo hello\n", "starts no training"), ("python -m verl.trainer.main_ppo a.b=1\n", "no model")):
        path = tmp_path / "run.sh"
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            import_config(path)


def test_rows_of_several_data_sources_get_their_own_verifiers_and_shares(tmp_path: Path) -> None:
    rows = [
        {"data_source": name, "prompt": "a"}
        for name in ["openai/gsm8k"] * 3 + ["math_dapo", "aime2024", "codecontests"]
    ]
    write_jsonl(tmp_path / "mixed.jsonl", rows)
    text = "algorithm.adv_estimator: grpo\ndata.train_files: mixed.jsonl\nactor_rollout_ref.model.path: m\n"
    config, _ = imported(tmp_path, "verl.yaml", text)
    result = [(one.where["data_source"], one.verify[0].name, one.weight) for one in config.data.train if one.verify]
    assert result == [
        (["openai/gsm8k"], "gsm8k", 3.0),
        (["math_dapo", "aime2024"], "math", 2.0),
        (["codecontests"], "code", 1.0),
    ]


@pytest.mark.parametrize(
    ("sources", "verifier", "said"),
    [
        (["DigitalLearningGmbH/MATH-lighteval"], "math", ""),
        (["searchR1_nq"], "exact", ""),
        (["apps"], "code", ""),
        (["own/puzzles"], None, "verl has no function for rows of own/puzzles"),
    ],
)
def test_a_yaml_file_without_a_reward_takes_the_verifier_of_its_rows(
    sources: list[str], verifier: str | None, said: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"data_source": name, "prompt": "a"} for name in sources])
    text = "{algorithm: {adv_estimator: grpo}, data: {train_files: rows.jsonl}, actor_rollout_ref: {model: {path: m}}}"
    (tmp_path / "verl.yaml").write_text(text)
    tree, _ = import_config(tmp_path / "verl.yaml")
    assert tree.get("reward", {}).get("verify") == verifier
    lines = list(write_imported(tmp_path / "verl.yaml", tmp_path / "braid.yaml"))
    assert any((verifier or said) in line for line in lines), lines


def model_that_answers(folder: Path, text: str) -> Path:
    """Write a tiny model that has learned to write one text after any prompt."""
    write_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    answer = TOKENIZER(text, add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id]
    prompts = [TOKENIZER(f"{a}+{b}=", add_special_tokens=False)["input_ids"] for a in range(4) for b in range(4)]
    ids = torch.tensor([prompt + answer for prompt in prompts])
    labels = ids.clone()
    labels[:, : len(prompts[0])] = -100
    for _ in range(30):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("framework", ["verl", "slime"])
def test_an_imported_script_trains_for_two_steps_with_rewards(framework: str, tmp_path: Path) -> None:
    model = model_that_answers(tmp_path / "model", "#### 3")
    rows: list[dict[str, Any]] = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    if framework == "verl":
        rows = [
            {"data_source": "openai/gsm8k", "prompt": r["prompt"], "reward_model": {"ground_truth": r["label"]}}
            for r in rows
        ]
        text = (
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.jsonl \\\n"
            " data.train_batch_size=16 data.max_response_length=6 actor_rollout_ref.rollout.n=4 \\\n"
            " actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.total_training_steps=2 \\\n"
            f" actor_rollout_ref.model.path={model} trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.name=hf\n"
        )
    else:
        text = (
            "A=(--prompt-data train.jsonl --input-key prompt --label-key label\n --rm-type math)\n"
            f"python3 train.py --hf-checkpoint {model} ${{A[@]}} --num-rollout 2 --rollout-batch-size 16 \\\n"
            " --n-samples-per-prompt 4 --rollout-max-response-len 6 --actor-num-gpus-per-node 1 --use-kl-loss \\\n"
            " --kl-loss-coef 0.01 --rollout-shuffle --global-batch-size 32\n"
        )
    write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "run.sh").write_text(text)
    list(write_imported(tmp_path / "run.sh", tmp_path / "braid.yaml"))
    tree = yaml.safe_load((tmp_path / "braid.yaml").read_text())
    tree |= {"output": str(tmp_path / "runs"), "device": "cpu", "threads": 1}
    tree["reward"]["sandbox"] = "none"
    (tmp_path / "braid.yaml").write_text(json.dumps(tree))
    with TrainingRun(load_config(tmp_path / "braid.yaml")) as run:
        run.train()
    lines = read_metrics(run.folder)
    assert len(lines) == 2 and all(line["reward/mean"] > 0 for line in lines), lines


TRL_FILES = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward as right, get_soft_overlong_punishment

SAMPLES = 4
ROWS = SAMPLES * 2
LOOP = LOOP + 1
data = load_dataset("json", data_files="sums.jsonl", split="train", num_proc=4)
settings = GRPOConfig(
    per_device_train_batch_size=ROWS, num_generations=SAMPLES, seed=LOOP, top_entropy_quantile=1.0, report_to="none"
)
GRPOTrainer(model="m", args=settings, reward_funcs=REWARDS, train_dataset=data)
"""


@pytest.mark.parametrize(
    ("rewards", "decided"),
    [
        ("[right]", {"seed", "num_train_epochs"}),
        ("[right, get_soft_overlong_punishment(64, 8)]", {"seed", "num_train_epochs", "reward_funcs"}),
    ],
)
def test_a_script_of_trl_names_its_files_rewards_and_products(rewards: str, decided: set[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRL_FILES.replace("REWARDS", rewards))
    tree, outcomes = import_config(tmp_path / "train.py")
    assert tree["data"]["train"] == [{"path": "sums.jsonl", "answer_field": "solution"}]
    assert tree["reward"] == {"verify": "math"} and tree["trainer"]["rows_per_update"] == 8
    assert {key for key, outcome in outcomes.items() if outcome.kind == DECIDE} == decided
    assert outcomes["dataset_num_proc"].kind == WITHOUT


OPTIM = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize(
    ("given", "key", "kind"),
    [
        (f"{OPTIM}.min_lr_ratio=0.1", f"{OPTIM}.min_lr_ratio", DECIDE),
        (f"{OPTIM}.warmup_style=cosine", f"{OPTIM}.warmup_style", TRANSLATED),
        (
            "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            TRANSLATED,
        ),
        (
            "algorithm.rollout_correction.rollout_is_threshold=3.0",
            "algorithm.rollout_correction.rollout_is_threshold",
            WITHOUT,
        ),
    ],
)
def test_settings_that_change_a_run_are_translated_or_to_decide(
    given: str, key: str, kind: str, tmp_path: Path
) -> None:
    _, outcomes = import_text(tmp_path, f"{VERL} {given}")
    assert outcomes[key].kind == kind, outcomes[key]


def test_the_threshold_of_verls_correction_is_its_cap(tmp_path: Path) -> None:
    given = "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=3.0"
    tree, outcomes = import_text(tmp_path, f"{VERL} {given}")
    assert tree["algorithm"]["correction"] == {"name": "truncated", "level": "sequence", "cap": 3.0}
    assert outcomes["algorithm.rollout_correction.rollout_is_threshold"].kind == TRANSLATED
