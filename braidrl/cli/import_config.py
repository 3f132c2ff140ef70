"""`braid import-config verl.yaml`: conversion of a verl configuration to Braid, and a line for each key without a counterpart.

verl.yaml ──keys──▶ verl_keys.yaml: key of Braid, rule ──▶ braid.yaml, checked        keys left over ──▶ a line each
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.parsing import read_yaml

KEYS = Path(__file__).with_name("verl_keys.yaml")
ACTOR, ROLLOUT, REWARD = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "reward"
UNSET = ("", "???", -1)
"""Placeholders in verl's configuration for missing or derived values."""
FLOWS = {
    "grpo": "grpo", "gae": "ppo", "rloo": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus",
    "grpo_passk": "grpo",
}  # fmt: skip
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
HAVE_KL_IN_REWARD = ("ppo", "rloo", "reinforce_plus_plus")
CLIPPED = ("grpo", "dapo", "ppo")
OPTIMIZERS = {"adamw": "adamw", "adamw8bit": "adamw8bit", "sgd": "sgd"}
TURNS, TOOL_FORMATS = f"{ROLLOUT}.multi_turn.enable", ("hermes", "llama", "mistral", "deepseek", "glm")
ONE = (("rollout.tensor", 1), ("rollout.pipeline", 1))
"""Braid's defaults that verl writes out."""


@dataclass
class Imported:
    """A configuration of verl by its dotted keys, and the result of its conversion."""

    given: Mapping[str, Any]
    made: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of Braid."""
    left: dict[str, str] = field(default_factory=dict)
    """Keys without a counterpart, with the remedy."""

    @property
    def flow(self) -> str:
        named = str(self.given.get("algorithm.adv_estimator", "gae")).rpartition(".")[2].lower()
        dynamic = self.given.get("algorithm.filter_groups.enable") or "dapo" in (
            self.given.get("reward_model.reward_manager"), self.given.get("reward.reward_manager.name"),
        )  # fmt: skip
        return "dapo" if dynamic and named == "grpo" else FLOWS.get(named, "grpo")

    def number(self, key: str, default: int = 1) -> int:
        return int(self.given.get(key) or default)


class Left(str):
    """The advice for a key without a counterpart."""


Rule = Callable[[Imported, str, Any, str], None]
"""A function of the import, verl's key and value, and Braid's key; it adds to the import."""


def flow(one: Imported, key: str, value: Any, to: str) -> None:
    one.made["flow"] = one.flow
    named = str(value).rpartition(".")[2].lower()
    if key == "algorithm.adv_estimator" and named not in FLOWS:
        one.left[key] = f"no recipe is called {named}; see `braid list recipes` and `braid list advantages`"


def kl(one: Imported, key: str, value: Any, to: str) -> None:
    """Set the coefficient and estimator of the KL term: in the reward, in the loss, or none."""
    in_reward, in_loss = one.given.get("algorithm.use_kl_in_reward"), one.given.get(f"{ACTOR}.use_kl_loss")
    if one.flow == "dapo":
        if in_loss or in_reward:
            one.left[key] = "dapo has no KL term; grpo has"
        return
    coefficient, estimator = 0.0, None
    if in_loss and one.flow == "grpo":
        coefficient = one.given.get(f"{ACTOR}.kl_loss_coef", 0.001)
        estimator = one.given.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
    elif in_reward and one.flow in HAVE_KL_IN_REWARD:
        coefficient = one.given.get("algorithm.kl_ctrl.kl_coef", 0.001)
        estimator = one.given.get("algorithm.kl_penalty", "kl")
        if one.given.get("algorithm.kl_ctrl.type") == "adaptive" and one.flow == "ppo":
            one.made["algorithm.kl_target"] = one.given.get("algorithm.kl_ctrl.target_kl", 0.1)
    elif in_loss or in_reward:
        one.left[key] = (
            f"{one.flow} has its KL term {'in the reward' if one.flow in HAVE_KL_IN_REWARD else 'in the loss'}"
        )
    one.made["algorithm.kl_coef"] = float(coefficient)
    if estimator is not None:
        known = ESTIMATORS.get(str(estimator).rstrip("+"))
        if known is None:
            one.left[key] = f"no estimator is called {estimator}; see `braid list kl-estimators`"
        else:
            one.made["algorithm.kl_estimator"] = known


def clip(one: Imported, key: str, value: Any, to: str) -> None:
    if one.flow not in CLIPPED:
        return
    both = one.given.get(f"{ACTOR}.clip_ratio", 0.2)
    one.made["algorithm.clip_low"] = one.given.get(f"{ACTOR}.clip_ratio_low", both)
    one.made["algorithm.clip_high"] = one.given.get(f"{ACTOR}.clip_ratio_high", both)


def correction(one: Imported, key: str, value: Any, to: str) -> None:
    if one.given.get("algorithm.rollout_correction.rollout_is"):
        cap = one.given.get("algorithm.rollout_correction.rollout_is_threshold", 2.0)
        one.made[to] = {"name": "truncated", "cap": float(cap)}


def eval_sets(one: Imported, key: str, value: Any, to: str) -> None:
    paths = value if isinstance(value, list) else [value]
    names = [Path(str(path)).stem for path in paths]
    unique = len(set(names)) == len(names)
    one.made[to] = {
        name if unique else f"{name}_{number}": str(path)
        for number, (name, path) in enumerate(zip(names, paths, strict=True))
    }


def of_source(one: Imported, key: str, value: Any, to: str) -> None:
    """Set a key of every source of `data.train`."""
    field_name = to.rpartition(".")[2]
    if value in (*UNSET, "prompt"):
        return
    paths = one.given.get("data.train_files")
    known = one.made.get("data.train", paths)
    listed = known if isinstance(known, list) else [known]
    one.made["data.train"] = [
        {**(entry if isinstance(entry, dict) else {"path": entry}), field_name: value} for entry in listed
    ]


def lora(one: Imported, key: str, value: Any, to: str) -> None:
    rank = one.number("actor_rollout_ref.model.lora_rank", 0)
    if rank:
        one.made[to] = {"rank": rank, "alpha": float(one.given.get("actor_rollout_ref.model.lora_alpha", 16))}
        targets = one.given.get("actor_rollout_ref.model.target_modules", "all-linear")
        if isinstance(targets, list):
            one.made[to]["targets"] = targets


def axis(name: str, one: Imported, key: str, value: Any, to: str) -> None:
    """Set an axis of the trainer's layout."""
    if int(value) > 1:
        one.made.setdefault(to, {})[name] = int(value)


def shard(one: Imported, key: str, value: Any, to: str) -> None:
    if str(value).startswith("fsdp") and one.number("trainer.n_gpus_per_node", 8) * one.number("trainer.nnodes") > 1:
        one.made.setdefault(to, {})["shard"] = "full"


def vllm_more(one: Imported, key: str, value: Any, to: str) -> None:
    for name, setting in (value or {}).items():
        one.made[f"{to}.{name}"] = setting


def verify(one: Imported, key: str, value: Any, to: str) -> None:
    for section in (REWARD, ""):
        prefix = f"{section}.custom_reward_function" if section else "custom_reward_function"
        if path := one.given.get(f"{prefix}.path"):
            function = one.given.get(f"{prefix}.name") or "compute_score"
            one.made["reward.verify"] = f"{path}:{function}"
            one.left[f"{prefix}.path"] = (
                f"rename the parameters of {function}: data_source to source, solution_str to response, ground_truth to answer, "
                "extra_info to metadata"
            )


def reward_model(one: Imported, key: str, value: Any, to: str) -> None:
    path = one.given.get("reward.reward_model.model_path") or one.given.get("reward_model.model.path")
    if path and (one.given.get("reward.reward_model.enable") or one.given.get("reward_model.enable")):
        one.made |= {"algorithm.reward": "score", "roles.reward.model": path}
    elif one.flow == "ppo":
        one.made["algorithm.reward"] = "verify"


def workers(one: Imported, key: str, value: Any, to: str) -> None:
    devices = one.number("trainer.n_gpus_per_node", 8) * one.number("trainer.nnodes")
    if devices > 1:
        one.made |= {"workers": devices}
        one.made.setdefault("runtime", "hybrid")


def trackers(one: Imported, key: str, value: Any, to: str) -> None:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("wandb", "swanlab", "mlflow", "tensorboard", "trackio")]
    one.made[to] = known
    if unknown := [name for name in names if name not in (*known, "console", "file")]:
        one.left[key] = f"no tracker is called {', '.join(unknown)}; see `braid list trackers`"


ENGINES = {"vllm": "vllm", "hf": None, **{str(unset): None for unset in UNSET}}
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
VALUES: dict[str, Callable[[Imported, Any, str], Any]] = {
    "": lambda one, value, to: value,
    "loss": lambda one, value, to: (
        None if value == "vanilla" else Left(f"algorithm.loss, where `braid list losses` has one like {value}")
    ),
    "schedule": lambda one, value, to: (
        value if value in ("constant", "linear", "cosine") else Left("trainer.schedule is constant, linear or cosine")
    ),
    "dtype": lambda one, value, to: (
        None
        if to == "dtype" and DTYPES.get(str(value)) == "bfloat16"  # the default on CUDA
        else DTYPES.get(str(value), Left(f"{to} is bfloat16 or float32"))
    ),
    "engine": lambda one, value, to: ENGINES.get(
        str(value),
        Left(
            f"start servers of {value} and write rollout.engine=http, rollout.servers={{urls: [...], dialect: {value}}}"
        ),
    ),
    "template": lambda one, value, to: value or None,
    "given": lambda one, value, to: value if value not in UNSET else None,
    "at_least_zero": lambda one, value, to: max(0, int(value)),
    "positive": lambda one, value, to: int(value) if int(value) > 0 else None,
    "rows": lambda one, value, to: int(value) * one.number(f"{ROLLOUT}.n"),
    "of_ppo": lambda one, value, to: value if one.flow == "ppo" else None,
    "of_grpo": lambda one, value, to: value if one.flow == "grpo" else None,
    "overlong": lambda one, value, to: value if one.flow == "dapo" else None,
    "dual_clip": lambda one, value, to: value if one.flow in CLIPPED else None,
    "bypass": lambda one, value, to: "rollout" if value else None,
    "greedy": lambda one, value, to: None if value else 0.0,
    "device": lambda one, value, to: value if value in ("cuda", "cpu") else None,
    "reference": lambda one, value, to: value if value not in UNSET and one.made.get("algorithm.kl_coef") else None,
    "runtime": lambda one, value, to: "streaming" if value == "separate_async" else None,
    "staleness": lambda one, value, to: (
        int(value) if one.given.get("trainer.v1.trainer_mode") == "separate_async" else None
    ),
    "tool_format": lambda one, value, to: value if one.given.get(TURNS) and value in TOOL_FORMATS else None,
    "optimizer": lambda one, value, to: OPTIMIZERS.get(str(value).lower(), f"torch.optim:{value}"),
    "vllm": lambda one, value, to: (
        value if one.given.get(f"{ROLLOUT}.name") == "vllm" and (to, value) not in ONE else None
    ),
}
"""Rules that make the value of Braid's key `to` from verl's value, or what is left to do; None leaves the key out."""
RULES: dict[str, Rule] = {
    "flow": flow, "kl": kl, "clip": clip, "correction": correction, "eval_sets": eval_sets, "field_name": of_source,
    "first": of_source, "lora": lora, "shard": shard, "vllm_more": vllm_more,
    "verify": verify, "reward_model": reward_model, "workers": workers, "trackers": trackers,
    **{name: partial(axis, name) for name in ("tensor", "pipeline", "sequence")},
}  # fmt: skip
"""Rules that set several keys, or leave a line for the user."""


def import_config(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the nested keys of a Braid configuration, and verl's keys without a counterpart with remedies.

    `path` is a YAML file of verl: its whole configuration, or the keys that are set, nested or dotted. Raises UserError if it is
    not YAML, or has no key of verl.
    """
    if not path.is_file():
        raise UserError(f"no configuration file {path}")
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values of verl, as in `algorithm: {{adv_estimator: grpo}}`")
    table: dict[str, dict[str, Any]] = read_yaml(KEYS)
    defaults = {key: row["default"] for key, row in table.items() if "default" in row}
    known = {**defaults, **{key: value for key, value in flat(tree) if is_set(value)}}
    one = Imported(known, {"flow": Imported(known).flow})
    for key, value in known.items():
        row = row_of(key, table)
        if row is None:
            one.left[key] = "verl's own configuration has no such key; see docs/coming-from-verl.md"
        elif (rule := row.get("rule", "")) in RULES:
            RULES[rule](one, key, value, row.get("to", ""))
        elif rule or "to" in row:
            made = VALUES[rule](one, value, to := row.get("to", ""))
            if isinstance(made, Left):
                one.left[key] = made
            elif made is not None:
                one.made[to] = made
        elif row.get("note") == "no counterpart" and value not in (False, 0):
            one.left[key] = "no counterpart"
    if one.flow == "ppo":
        reward_model(one, "", None, "")
    one.made = {
        key: value for key, value in one.made.items() if not key.startswith("roles.critic") or one.flow == "ppo"
    }
    if "model" not in one.made:
        raise UserError(
            f"{path} names no model, as in `actor_rollout_ref: {{model: {{path: Qwen/Qwen3-4B}}}}`; is it one of verl?"
        )
    if "trainer.steps" not in one.made:
        one.left.setdefault(
            "trainer.total_training_steps", "write trainer.steps: verl counts epochs where it is not set"
        )
    nested: dict[str, Any] = {}
    for key, value in one.made.items():
        place = nested
        *sections, last = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return nested, one.left


def row_of(key: str, table: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row of a key: its own, else the first with a matching pattern."""
    if key in table:
        return table[key]
    if key.endswith("_target_"):
        return {}
    return next((row for pattern, row in table.items() if "*" in pattern and fnmatchcase(key, pattern)), None)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; `+key` is Hydra's syntax for adding a key."""
    for name, value in tree.items():
        key = f"{prefix}.{str(name).lstrip('+')}" if prefix else str(name).lstrip("+")
        whole = key.endswith(("engine_kwargs.vllm", "apply_chat_template_kwargs", "override_config"))
        if isinstance(value, dict) and value and not whole:
            yield from flat(value, key)
        else:
            yield key, value


def is_set(value: Any) -> bool:
    """Return whether a value is set: not empty, and not a reference to another key."""
    return (
        value is not None and value != "???" and value != {} and not (isinstance(value, str) and value.startswith("${"))
    )


def write_imported(path: Path, target: Path) -> Iterator[str]:
    """Convert a verl configuration to a Braid file, and yield the lines to print. Raises UserError if the target exists."""
    if target.exists():
        raise UserError(f"{target} exists; nothing was overwritten")
    tree, left = import_config(path)
    target.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    yield f"{target}: {len(list(flat(tree)))} keys; check it with `braid train {target} --dry-run`"
    for key, what in left.items():
        yield f"{key}: {what}"
    try:
        parse_config(tree)
    except UserError as error:
        yield f"to be mended in {target}: {error}"
