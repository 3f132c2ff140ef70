"""`braid import-config verl.yaml`: conversion of a verl configuration to Braid, and a line for each key without a
counterpart.

verl.yaml ──keys──▶ verl_keys.yaml: key of Braid, rule ──▶ braid.yaml, checked        keys left over ──▶ a line each
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.parsing import flat, read_yaml

KEYS = Path(__file__).with_name("verl_keys.yaml")
WHOLE = ("engine_kwargs.vllm", "apply_chat_template_kwargs", "override_config")
"""Ends of keys whose value is a mapping."""
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
UNSET = ("", "???", -1)
"""Placeholders in verl's configuration for missing or derived values."""
FLOWS = {
    "grpo": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "grpo_passk": "grpo",
}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
HAVE_KL_IN_REWARD = ("ppo", "rloo", "reinforce_plus_plus")
OPTIMIZERS = {"adamw": "adamw", "adamw8bit": "adamw8bit", "sgd": "sgd"}
TOOL_FORMATS = ("hermes", "llama", "mistral", "deepseek", "glm")
ONE = (("rollout.tensor", 1), ("rollout.pipeline", 1))
"""Braid's defaults that verl writes out."""


@dataclass
class Imported:
    """A configuration of verl by its dotted keys, and the result of its conversion."""

    given: Mapping[str, Any]
    made: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Keys without a counterpart, with the remedy."""

    @property
    def flow(self) -> str:
        named = str(self.given.get("algorithm.adv_estimator", "gae")).rpartition(".")[2].lower()
        dynamic = self.given.get("algorithm.filter_groups.enable") or "dapo" in (
            self.given.get("reward_model.reward_manager"),
            self.given.get("reward.reward_manager.name"),
        )
        return "dapo" if dynamic and named == "grpo" else FLOWS.get(named, "grpo")

    @property
    def devices(self) -> int:
        return int(self.given.get("trainer.n_gpus_per_node") or 8) * int(self.given.get("trainer.nnodes") or 1)


class Left(str):
    """The advice for a key without a counterpart."""


# A rule is a function of the import, verl's value and Braid's key. It returns the value of that key, a `Left`, or None,
# which leaves the key out; it may also set keys of the import itself.


def flow(one: Imported, value: Any, to: str) -> Any:
    named = str(one.given.get("algorithm.adv_estimator", "gae")).rpartition(".")[2].lower()
    if named not in FLOWS:
        return Left(f"no recipe is called {named}; see `braid list recipes` and `braid list advantages`")
    return one.flow


def kl(one: Imported, value: Any, to: str) -> Any:
    """Set the coefficient and estimator of the KL term: in the reward, in the loss, or none."""
    in_reward, in_loss = one.given.get("algorithm.use_kl_in_reward"), one.given.get(f"{ACTOR}.use_kl_loss")
    if one.flow == "dapo":
        return Left("dapo has no KL term; grpo has") if in_loss or in_reward else None
    coefficient, estimator, advice = 0.0, None, None
    if in_loss and one.flow == "grpo":
        coefficient = one.given.get(f"{ACTOR}.kl_loss_coef", 0.001)
        estimator = one.given.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
    elif in_reward and one.flow in HAVE_KL_IN_REWARD:
        coefficient = one.given.get("algorithm.kl_ctrl.kl_coef", 0.001)
        estimator = one.given.get("algorithm.kl_penalty", "kl")
        if one.given.get("algorithm.kl_ctrl.type") == "adaptive" and one.flow == "ppo":
            one.made["algorithm.kl_target"] = one.given.get("algorithm.kl_ctrl.target_kl", 0.1)
    elif in_loss or in_reward:
        where = "in the reward" if one.flow in HAVE_KL_IN_REWARD else "in the loss"
        advice = Left(f"{one.flow} has its KL term {where}")
    one.made["algorithm.kl_coef"] = float(coefficient)
    if estimator is not None:
        known = ESTIMATORS.get(str(estimator).rstrip("+"))
        if known is None:
            return Left(f"no estimator is called {estimator}; see `braid list kl-estimators`")
        one.made["algorithm.kl_estimator"] = known
    return advice


def clip(one: Imported, value: Any, to: str) -> Any:
    both = one.given.get(f"{ACTOR}.clip_ratio", 0.2)
    one.made["algorithm.clip_low"] = one.given.get(f"{ACTOR}.clip_ratio_low", both)
    one.made["algorithm.clip_high"] = one.given.get(f"{ACTOR}.clip_ratio_high", both)


def correction(one: Imported, value: Any, to: str) -> Any:
    if not one.given.get("algorithm.rollout_correction.rollout_is"):
        return None
    cap = one.given.get("algorithm.rollout_correction.rollout_is_threshold", 2.0)
    return {"name": "truncated", "cap": float(cap)}


def eval_sets(one: Imported, value: Any, to: str) -> Any:
    paths = [str(path) for path in (value if isinstance(value, list) else [value])]
    names = [Path(path).stem for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    return dict(zip(names, paths, strict=True))


def of_source(one: Imported, value: Any, to: str) -> Any:
    """Set a key of every source of `data.train`."""
    if value in (*UNSET, "prompt"):
        return
    known = one.made.get("data.train", one.given.get("data.train_files"))
    one.made["data.train"] = [
        {**(entry if isinstance(entry, dict) else {"path": entry}), to.rpartition(".")[2]: value}
        for entry in (known if isinstance(known, list) else [known])
    ]


def lora(one: Imported, value: Any, to: str) -> Any:
    rank, targets = one.given.get(f"{MODEL}.lora_rank"), one.given.get(f"{MODEL}.target_modules")
    if not rank:
        return None
    settings = {"rank": int(rank), "alpha": float(one.given.get(f"{MODEL}.lora_alpha", 16))}
    return {**settings, "targets": targets} if isinstance(targets, list) else settings


def axis(name: str, one: Imported, value: Any, to: str) -> Any:
    """Set an axis of the trainer's layout."""
    if int(value) > 1:
        one.made.setdefault(to, {})[name] = int(value)


def shard(one: Imported, value: Any, to: str) -> Any:
    if str(value).startswith("fsdp") and one.devices > 1:
        one.made.setdefault(to, {})["shard"] = "full"


def vllm_more(one: Imported, value: Any, to: str) -> Any:
    one.made |= {f"{to}.{name}": setting for name, setting in (value or {}).items()}


def verify(one: Imported, value: Any, to: str) -> Any:
    for key in ("reward.custom_reward_function", "custom_reward_function"):
        if path := one.given.get(f"{key}.path"):
            function = one.given.get(f"{key}.name") or "compute_score"
            one.made["reward.verify"] = f"{path}:{function}"
            one.left[f"{key}.path"] = (
                f"rename the parameters of {function}: data_source to source, solution_str to response, ground_truth "
                "to answer, "
                "extra_info to metadata"
            )


def reward_model(one: Imported, value: Any, to: str) -> Any:
    path = one.given.get("reward.reward_model.model_path") or one.given.get("reward_model.model.path")
    if path and (one.given.get("reward.reward_model.enable") or one.given.get("reward_model.enable")):
        one.made |= {"algorithm.reward": "score", "roles.reward.model": path}
    elif one.flow == "ppo":
        one.made["algorithm.reward"] = "verify"


def workers(one: Imported, value: Any, to: str) -> Any:
    if one.devices == 1:
        return None
    one.made.setdefault("runtime", "hybrid")
    return one.devices


def trackers(one: Imported, value: Any, to: str) -> Any:
    names = value if isinstance(value, list) else [value]
    one.made[to] = [name for name in names if name in ("wandb", "swanlab", "mlflow", "tensorboard", "trackio")]
    unknown = [name for name in names if name not in (*one.made[to], "console", "file")]
    return Left(f"no tracker is called {', '.join(unknown)}; see `braid list trackers`") if unknown else None


RULES: dict[str, Callable[[Imported, Any, str], Any]] = {
    "": lambda one, value, to: None if value in UNSET else value,
    "flow": flow,
    "kl": kl,
    "clip": clip,
    "correction": correction,
    "eval_sets": eval_sets,
    "field_name": of_source,
    "first": of_source,
    "lora": lora,
    "shard": shard,
    "vllm_more": vllm_more,
    "verify": verify,
    "reward_model": reward_model,
    "workers": workers,
    "trackers": trackers,
    **{name: partial(axis, name) for name in ("tensor", "pipeline", "sequence")},
    "dynamic": lambda one, value, to: one.flow,
    "at_least_zero": lambda one, value, to: max(0, int(value)),
    "positive": lambda one, value, to: int(value) if int(value) > 0 else None,
    "rows": lambda one, value, to: int(value) * int(one.given.get(f"{ROLLOUT}.n") or 1),
    "reference": lambda one, value, to: value if value not in UNSET and one.made.get("algorithm.kl_coef") else None,
    "staleness": lambda one, value, to: (
        int(value) if one.given.get("trainer.v1.trainer_mode") == "separate_async" else None
    ),
    "tool_format": lambda one, value, to: (
        value if one.given.get(f"{ROLLOUT}.multi_turn.enable") and value in TOOL_FORMATS else None
    ),
    "optimizer": lambda one, value, to: OPTIMIZERS.get(str(value).lower(), f"torch.optim:{value}"),
    "vllm": lambda one, value, to: (
        value if one.given.get(f"{ROLLOUT}.name") == "vllm" and (to, value) not in ONE else None
    ),
}


def import_config(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the nested keys of a Braid configuration, and verl's keys without a counterpart.

    Raises UserError if it is no file of verl.
    """
    if not path.is_file():
        raise UserError(f"no configuration file {path}")
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values of verl, as in `algorithm: {{adv_estimator: grpo}}`")
    table: dict[str, dict[str, Any]] = read_yaml(KEYS)
    known = {key: row["default"] for key, row in table.items() if "default" in row}
    for written, value in flat(tree, WHOLE):
        # A value may be a reference to another key; `+key` is Hydra's syntax for adding a key.
        if value is not None and value != "???" and value != {} and not str(value).startswith("${"):
            known[re.sub(r"(^|\.)\++", r"\1", written)] = value
    one = Imported(known)
    one.made["flow"] = one.flow
    for key, value in known.items():
        row = row_of(key, table)
        if row is None:
            one.left[key] = "verl's own configuration has no such key; see docs/coming-from-verl.md"
        elif "rule" in row or "to" in row:
            if one.flow in row.get("of", one.flow).split():
                to = row.get("to", "")
                values = {str(given).lower(): made for given, made in row.get("values", {}).items()}
                if not values:
                    made = RULES[row.get("rule", "")](one, value, to)
                else:
                    made = values.get(str(value).lower(), Left(row["else"]) if "else" in row else None)
                if isinstance(made, Left):
                    one.left[key] = made
                elif made is not None:
                    one.made[to] = made
        elif row.get("note") == "no counterpart" and value not in (False, 0):
            one.left[key] = "no counterpart"
    if one.flow == "ppo":
        reward_model(one, None, "")
    if "model" not in one.made:
        raise UserError(
            f"{path} names no model, as in `actor_rollout_ref: {{model: {{path: Qwen/Qwen3-4B}}}}`; is it one of verl?"
        )
    if "trainer.steps" not in one.made:
        one.left.setdefault("trainer.total_training_steps", "write trainer.steps: verl counts epochs without it")
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


def write_imported(path: Path, target: Path) -> Iterator[str]:
    """Convert a verl configuration to a Braid file, and yield the lines to print.

    Raises UserError if the target exists.
    """
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
