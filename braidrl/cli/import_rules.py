"""Rules of `braid import-config`: from a value of another framework to values of Braid's keys.

A rule is a function of the import, the value and Braid's key. It returns the value of that key, a `Decide` with advice,
or None, which writes nothing; it may also set keys of the import itself. Each framework has a table of keys, which
names the rules.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from braidrl.config import LoraConfig
from braidrl.errors import UserError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
POLICY_LOSS = f"{ACTOR}.policy_loss"
TRL_CAP = "vllm_importance_sampling_clip_max"
UNSET = ("", "???", -1)
"""Placeholders in configurations for missing or derived values."""
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
HAVE_KL_IN_REWARD = ("ppo", "rloo", "reinforce_plus_plus")
OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "sgd": "sgd",
}
TOOL_FORMATS = ("hermes", "llama", "mistral", "deepseek", "glm")
TRACKERS = ("wandb", "swanlab", "mlflow", "tensorboard", "trackio")
ONE = (("rollout.tensor", 1), ("rollout.pipeline", 1))
"""Braid's defaults that verl writes out."""
MOST_COUNTED = 1 << 30
"""Largest data file, in bytes, that is read to count its rows."""


class Decide(str):
    """Advice for a key that has no single counterpart: the user decides."""


@dataclass
class Imported:
    """A configuration of another framework by its keys, including its defaults, and the keys of Braid made from it."""

    source_keys: Mapping[str, Any]
    folder: Path = Path()
    """Folder of the configuration, for data files with relative paths."""
    flow: str = "grpo"
    key: str = ""
    """The key for which a rule is called."""
    converted: dict[str, Any] = field(default_factory=dict)
    together: list[str] = field(default_factory=list)
    """Keys of Braid made from several keys, by the row of another key or at the end."""
    advice: dict[str, str] = field(default_factory=dict)
    """Decisions about keys for the user, in addition to those that their rules return."""
    moved: dict[str, str] = field(default_factory=dict)
    """Braid's keys whose values became settings of another key, by the key."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Braid's keys that were made, and dropped or changed since other keys exclude them; with the reason."""

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first value that is set, among several names of one setting."""
        return next((self.source_keys[key] for key in keys if self.source_keys.get(key) not in (None, *UNSET)), default)

    def number(self, *keys: str, default: int = 1) -> int:
        value = self.get(*keys, default=default)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


Rule = Callable[[Imported, Any, str], Any]


# The algorithm.


def flow(imported: Imported, value: Any, to: str, names: Mapping[str, str]) -> Any:
    name = str(value).rpartition(".")[2].lower()
    if name in BASELINES:
        imported.converted["algorithm.baseline"] = True
    return imported.flow if name in names else Decide(f"no recipe is called {name}; see `braid list recipes`")


def coefficient_of_kl(imported: Imported, in_loss: Any, in_reward: Any, estimator: Any) -> Any:
    """Set the coefficient and estimator of the KL term: in the loss, in the reward, or none."""
    advice, value = None, 0.0
    if imported.flow not in ("grpo", *HAVE_KL_IN_REWARD):
        return Decide(f"{imported.flow} has no KL term; grpo has") if in_loss or in_reward else None
    takes_loss = imported.flow == "grpo" or imported.converted.get("algorithm.baseline", False)
    if in_loss and takes_loss:
        value = in_loss
    elif in_reward and not takes_loss:
        value = in_reward
    elif in_loss or in_reward:
        where = "in the loss" if takes_loss else "in the reward"
        advice = Decide(f"{imported.flow} has its KL term {where}")
    imported.converted["algorithm.kl_coef"] = float(value)
    if imported.converted.get("algorithm.baseline"):
        imported.together.append("algorithm.kl_coef")
        estimator = None if estimator == "k2" else estimator  # its own
        return advice or (Decide("the recipe with a baseline has the estimator k2") if value and estimator else None)
    if value and estimator is not None:
        known_estimator = ESTIMATORS.get(str(estimator).rstrip("+"))
        if known_estimator is None:
            return Decide(f"no estimator is called {estimator}; see `braid list kl-estimators`")
        imported.converted["algorithm.kl_estimator"] = known_estimator
    return advice


def verl_kl(imported: Imported, value: Any, to: str) -> Any:
    in_loss = imported.get(f"{ACTOR}.kl_loss_coef", default=0.001) if imported.get(f"{ACTOR}.use_kl_loss") else 0
    uses = imported.get("algorithm.use_kl_in_reward")
    in_reward = imported.get("algorithm.kl_ctrl.kl_coef", default=0.001) if uses else 0
    if uses and imported.get("algorithm.kl_ctrl.type") == "adaptive" and imported.flow == "ppo":
        imported.converted["algorithm.kl_target"] = imported.get("algorithm.kl_ctrl.target_kl", default=0.1)
    loss, reward = (f"{ACTOR}.kl_loss_type", "low_var_kl"), ("algorithm.kl_penalty", "kl")
    key, usual = loss if in_loss and imported.flow == "grpo" else reward
    return coefficient_of_kl(imported, in_loss, in_reward, imported.get(key, default=usual))


def slime_kl(imported: Imported, value: Any, to: str) -> Any:
    in_loss = imported.get("kl_loss_coef", default=0.0) if imported.get("use_kl_loss") else 0
    return coefficient_of_kl(
        imported, in_loss, imported.get("kl_coef", default=0.0), imported.get("kl_loss_type", default="k1")
    )


def openrlhf_kl(imported: Imported, value: Any, to: str) -> Any:
    coefficient, in_loss = imported.get("init_kl_coef", default=0.01), imported.get("use_kl_loss")
    estimator = imported.get("kl_estimator", default="k1")
    return coefficient_of_kl(imported, coefficient if in_loss else 0, 0 if in_loss else coefficient, estimator)


def trl_beta(imported: Imported, value: Any, to: str) -> Any:
    if imported.flow == "dpo":
        imported.converted["algorithm.beta"] = float(value)
        return None
    if imported.flow in ("grpo", "rloo"):
        return float(value)
    return Decide(f"{imported.flow} has no KL term; grpo has") if value else None


def clip(imported: Imported, value: Any, to: str, both: str, low: str, high: str) -> Any:
    usual = imported.get(both, default=0.2)
    imported.converted["algorithm.clip_low"] = imported.get(low, default=usual)
    imported.converted["algorithm.clip_high"] = imported.get(high, default=usual)


LOSSES: Mapping[str, Callable[[Imported, float, float], dict[str, Any]]] = {
    "gspo": lambda imported, low, high: {"name": "gspo", "low": low, "high": high},
    "cispo": lambda imported, low, high: {"name": "cispo", "low": low, "high": high},
    "geo_mean": lambda imported, low, high: {"name": "gmpo", "low": low, "high": high},
    "gpg": lambda imported, low, high: {"name": "reinforce"},
    "clip_cov": lambda imported, low, high: {"name": "clip_cov", "low": low, "high": high},
    "kl_cov": lambda imported, low, high: {"name": "kl_cov"},
    "dppo_tv": lambda imported, low, high: {"name": "dppo_tv", "delta": high},
    "sapo": lambda imported, low, high: {
        "name": "sapo",
        "tau_positive": imported.get(f"{ACTOR}.tau_pos", "sapo_temperature_pos", default=1.0),
        "tau_negative": imported.get(f"{ACTOR}.tau_neg", "sapo_temperature_neg", default=1.05),
    },
}
"""Losses of Braid by other frameworks' names, with their bounds of the ratio."""
OVER_ROWS = ("gspo", "gmpo", "sapo")
"""Losses that verl and TRL average over rows."""


def loss(imported: Imported, value: Any, to: str) -> Any:
    if value in ("vanilla", "ppo", "clip", None):
        imported.together.append(to)  # the recipe's own
        return None
    if value not in LOSSES:
        return Decide("algorithm.loss, where `braid list losses` has one like it")
    return LOSSES[value](imported, *bounds(imported))


def bounds(imported: Imported) -> tuple[float, float]:
    """Return the bounds of the ratio, below and above 1, by any framework's names."""
    both = imported.get(f"{ACTOR}.clip_ratio", "epsilon", "eps_clip", default=0.2)
    low, high = imported.get("eps_clip_low_high", default=(both, both))
    return (
        float(imported.get(f"{ACTOR}.clip_ratio_low", "eps_clip_low", default=low)),
        float(imported.get(f"{ACTOR}.clip_ratio_high", "epsilon_high", "eps_clip_high", default=high)),
    )


COVARIANCE = {
    "clip_cov_ratio": ("clip_cov", "fraction"),
    "clip_cov_lb": ("clip_cov", "low"),
    "clip_cov_ub": ("clip_cov", "high"),
    "kl_cov_ratio": ("kl_cov", "fraction"),
}
"""The loss and the setting of `algorithm.covariance` by the end of verl's key."""


def covariance(imported: Imported, value: Any, to: str) -> None:
    """Set one value of the tokens that verl's losses over covariances restrain."""
    loss_mode, setting = COVARIANCE[imported.key.rpartition(".")[2]]
    if imported.get(f"{POLICY_LOSS}.loss_mode") != loss_mode:
        return
    imported.converted["algorithm.covariance"] = {
        **imported.converted.get("algorithm.covariance", {}),
        setting: float(value),
    }
    if loss_mode == "clip_cov":
        imported.advice[f"{POLICY_LOSS}.loss_mode"] = (
            "written as the loss clip_cov, which takes the highest covariances between its bounds; verl draws at random"
        )


def loss_kl(imported: Imported, value: Any, to: str) -> None:
    if imported.get(f"{POLICY_LOSS}.loss_mode") == "kl_cov":
        imported.converted["algorithm.loss"] = {"name": "kl_cov", "coef": float(value)}


def ratio_level(imported: Imported, value: Any, to: str) -> Any:
    """Return the loss for TRL's level of the ratio."""
    return (
        loss(imported, "gspo", to) if value == "sequence" else None if value == "token" else Decide("token or sequence")
    )


def loss_alone(imported: Imported) -> None:
    """Drop the settings of the recipe's default loss if the configuration names another loss."""
    if not isinstance(named := imported.converted.get("algorithm.loss"), dict):
        return
    # Losses with bounds already use them.
    lost = ("dual_clip",) if named.keys() & {"low", "high", "delta"} else ("clip_low", "clip_high", "dual_clip")
    for name in ("clip_low", "clip_high", "dual_clip"):
        imported.converted.pop(f"algorithm.{name}", None)
        imported.moved[f"algorithm.{name}"] = "algorithm.loss"
    for name in lost:
        imported.dropped[f"algorithm.{name}"] = f"the loss {named['name']} has no {name}"
    if named["name"] in OVER_ROWS:
        over_rows = "seq-mean-token-mean"
        if imported.converted.get("algorithm.aggregate", over_rows) != over_rows:
            imported.dropped["algorithm.aggregate"] = f"{named['name']} averages over rows: aggregate is {over_rows}"
        imported.converted["algorithm.aggregate"] = over_rows


def aggregate(imported: Imported, value: Any, to: str) -> Any:
    if value == "seq-mean-token-sum-norm":
        longest = imported.get("data.max_response_length", "max_completion_length", default=512)
        most = imported.get(f"{ACTOR}.loss_scale_factor", default=longest)
        return {"name": "token-sum-norm", "max_tokens": int(most)}
    names = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean")
    return value if value in names else Decide("see `braid list aggregations`")


def trl_loss(imported: Imported, value: Any, to: str) -> Any:
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if imported.flow == "dpo":
        return None if name == "sigmoid" else Decide("the recipe dpo has the sigmoid loss; see `braid list losses`")
    if imported.flow == "sft":
        return None if name == "nll" else Decide("the recipe sft has the log-likelihood; see `braid list losses`")
    means = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "bnpo": "token-mean", "cispo": "token-mean"}
    if name in means:
        imported.converted["algorithm.aggregate"] = means[name]
    elif name == "dr_grpo":
        imported.converted["algorithm.aggregate"] = aggregate(imported, "seq-mean-token-sum-norm", to)
    translated = loss(imported, name, to) if name in LOSSES else None
    return translated if translated or name in means or name == "dr_grpo" else Decide("see `braid list losses`")


def overlong(imported: Imported, value: Any, to: str) -> Any:
    """Return the tokens before a response's limit in which DAPO penalises its length, if that is enabled."""
    section = imported.key.rpartition(".")[0]
    is_on = imported.get(f"{section}.enable", default=True)
    return int(imported.number(f"{section}.len", default=0)) or None if is_on else None


def overlong_factor(imported: Imported, value: Any, to: str) -> Any:
    if float(value) != 1 and imported.converted.get("algorithm.overlong_cache"):
        return Decide("the recipe dapo has the penalty 1: write the flow with another, see `braid flow dapo --yaml`")
    return None


CORRECTIONS: Mapping[str, tuple[str, str]] = {
    "token": ("truncated", "token"),
    "sequence": ("truncated", "sequence"),
    "tis": ("truncated", "token"),
    "icepop": ("masked", "token"),
    "token_truncate": ("truncated", "token"),
    "token_mask": ("masked", "token"),
    "sequence_truncate": ("truncated", "sequence"),
    "sequence_mask": ("masked", "sequence"),
}
"""Braid's correction and its level by other frameworks' names: verl's, OpenRLHF's and TRL's."""


def correction(imported: Imported, value: Any, to: str, cap: str, mode: str = "", least: str = "") -> Any:
    """Return importance weights with the bounds in `cap`, one or two numbers, and `least`; `mode` names the kind, by
    default derived from the value.
    """
    if value in (None, False, "null"):
        return None
    kind = "icepop" if imported.get("use_icepop") else str(imported.get(mode, default="token") if mode else value)
    if kind not in CORRECTIONS:
        return Decide(f"no correction is like {kind}; see `braid list corrections`")
    name, level = CORRECTIONS[kind]
    limits = imported.get(cap, default=2.0)
    low, high = limits if isinstance(limits, list) else (imported.get(least, default=0.0), limits)
    weights = {"name": name} if level == "token" else {"name": name, "level": level}
    if name == "masked":
        return weights | {"low": float(low), "high": float(high)}
    if low:
        imported.advice[least or cap] = f"written with cap {high}: truncated weights have no lower bound ({low})"
    return weights | {"cap": float(high)}


def trl_correction(imported: Imported, value: Any, to: str) -> Any:
    cap = "vllm_importance_sampling_cap" if imported.get("vllm_importance_sampling_cap") else TRL_CAP
    return correction(imported, value, to, cap, "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min")


# Data.


def paths(imported: Imported, value: Any, to: str) -> Any:
    """Return paths of data, which may be a list or text with commas; weights are the probabilities."""
    listed = value if isinstance(value, list) else [part for part in str(value).split(",") if part]
    weights = str(imported.get("prompt_data_probs", "dataset_probs", default="")).split(",")
    if len(weights) == len(listed) > 1:
        return [{"path": str(path), "weight": float(weight)} for path, weight in zip(listed, weights, strict=True)]
    return [str(path) for path in listed] if len(listed) > 1 else str(listed[0])


def eval_sets(imported: Imported, value: Any, to: str) -> Any:
    listed = [str(path) for path in (value if isinstance(value, list) else str(value).split(","))]
    names = [Path(path).stem for path in listed]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    return dict(zip(names, listed, strict=True))


def named_sets(imported: Imported, value: Any, to: str) -> Any:
    """Return held-out sets from a text NAME PATH NAME PATH."""
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    if len(words) % 2:
        return Decide("data.eval is {NAME: PATH}")
    return dict(zip(words[::2], words[1::2], strict=True))


def of_source(imported: Imported, value: Any, to: str) -> Any:
    """Set a key of every source of `data.train` and `data.eval`."""
    name = to.rpartition(".")[2]
    if value in (*UNSET, None):
        return None
    if name == "prompt_field" and value == "prompt":
        return imported.together.append("data.train")  # Braid's own name

    def with_key(entry: Any) -> Any:
        return {**(entry if isinstance(entry, dict) else {"path": entry}), name: value}

    train, held_out = imported.converted.get("data.train"), imported.converted.get("data.eval")
    if train is not None:
        imported.converted["data.train"] = [
            with_key(entry) for entry in (train if isinstance(train, list) else [train])
        ]
    if isinstance(held_out, dict) and name not in ("first", "subset", "split"):
        imported.converted["data.eval"] = {key: with_key(entry) for key, entry in held_out.items()}
    return None if train is not None else Decide("data.train names no file")


VERIFIERS: Mapping[str, tuple[str, ...]] = {
    "gsm8k": ("openai/gsm8k",),
    "math": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math_dapo",
        "math",
        "math_dapo_reasoning",
        "aime",
        "numina",
        "hiyouga/geometry3k",
    ),
    "code": ("codecontests", "apps", "codeforces", "taco"),
    "exact": ("searchR1_",),
}
"""Verifiers by verl's `data_source`, or its beginning."""


def verifier_of(source: str) -> str | None:
    """Return the verifier of verl's reward function for a `data_source`; None if verl has none."""
    exact = (name for name, sources in VERIFIERS.items() if source in sources)
    begins = ("aime", "numina", "searchR1_")
    started = (name for name, sources in VERIFIERS.items() if any(source.startswith(b) for b in begins if b in sources))
    return next(exact, None) or next(started, None)


def sources_in(path: Path) -> Counter[str] | None:
    """Count the rows of a data file by `data_source`; return None if the file is not on this machine or lacks the
    field.
    """
    if not path.is_file():
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet

        if "data_source" not in pyarrow.parquet.read_schema(path).names:
            return None
        column = pyarrow.parquet.read_table(path, columns=["data_source"])["data_source"]
        return Counter(map(str, column.to_pylist()))
    if path.suffix != ".jsonl" or path.stat().st_size > MOST_COUNTED:
        return None
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    named = [str(row["data_source"]) for row in records if isinstance(row, dict) and "data_source" in row]
    return Counter(named) if named else None


def verified(imported: Imported, entry: Any) -> list[Any]:
    """Split a data source by verl's reward functions for its rows: one entry for each verifier that its rows need."""
    path = Path(str(entry["path"] if isinstance(entry, dict) else entry)).expanduser()
    counts = sources_in(path if path.is_absolute() else imported.folder / path)
    if counts is None:
        guesses = {name: verifier_of(name) or verifier_of(f"openai/{name}") for name in (path.stem, path.parent.name)}
        counts = Counter({name: 1 for name, verifier in guesses.items() if verifier})
        guess = next((verifier for verifier in guesses.values() if verifier), None)
        imported.advice["reward.verify"] = (
            f"{path} is not here to be read: "
            + (f"{guess} is a guess from its name" if guess else "`exact` is Braid's default")
            + "; verl chooses by each row's data_source"
        )
        return [{**(entry if isinstance(entry, dict) else {"path": str(entry)}), "verify": guess}] if guess else [entry]
    by_verifier: dict[str | None, list[str]] = {}
    for name in counts:
        by_verifier.setdefault(verifier_of(name), []).append(name)
    if unknown := by_verifier.pop(None, []):
        imported.advice["data_source"] = (
            f"verl has no function for rows of {', '.join(unknown)}; name a verifier for them"
        )
    base = entry if isinstance(entry, dict) else {"path": str(entry)}
    if len(by_verifier) == 1 and not unknown:
        return [{**base, "verify": next(iter(by_verifier))}]
    return [
        {**base, "where": {"data_source": names}, "verify": verifier, "weight": float(sum(counts[n] for n in names))}
        for verifier, names in by_verifier.items()
    ] or [entry]


def rewards_by_source(imported: Imported) -> None:
    """Set the verifiers that verl's default function chooses by the rows' `data_source`."""
    if "reward.verify" in imported.converted or imported.converted.get("algorithm.reward") == "score":
        return
    train = imported.converted.get("data.train")
    if train is not None:
        entries = [
            part for entry in (train if isinstance(train, list) else [train]) for part in verified(imported, entry)
        ]
        verifiers = [entry.get("verify") if isinstance(entry, dict) else None for entry in entries]
        if len(set(verifiers)) == 1 and verifiers[0]:
            imported.converted["reward.verify"] = verifiers[0]
            entries = [{key: part for key, part in entry.items() if key != "verify"} for entry in entries]
        short = [entry["path"] if isinstance(entry, dict) and len(entry) == 1 else entry for entry in entries]
        imported.converted["data.train"] = short[0] if len(short) == 1 and isinstance(short[0], str) else short
    for name, entry in (imported.converted.get("data.eval") or {}).items():
        sources = verified(imported, entry)
        if (
            len(sources) == 1
            and isinstance(sources[0], dict)
            and sources[0].get("verify") != imported.converted.get("reward.verify")
        ):
            imported.converted["data.eval"][name] = sources[0]


def verify(imported: Imported, value: Any, to: str) -> Any:
    for key in ("reward.custom_reward_function", "custom_reward_function"):
        if path := imported.get(f"{key}.path"):
            function = imported.get(f"{key}.name", default="compute_score")
            imported.converted["reward.verify"] = f"{path}:{function}"
            imported.advice[f"{key}.path"] = (
                f"rename the parameters of {function}: data_source to source, solution_str to response, ground_truth "
                "to answer, extra_info to metadata"
            )


def served(imported: Imported, value: Any, to: str) -> Any:
    """Return the verifier for OpenRLHF's `remote_rm_url`: a file with `reward_func`, or a server."""
    first = str(value).split(",")[0]
    if first.endswith(".py"):
        imported.advice["remote_rm_url"] = "reward_func(queries, prompts, labels) becomes reward_func(response, answer)"
        return f"{first}:reward_func"
    return {"name": "remote", "params": {"url": first}}


REWARDS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "accuracy": "math",
    "think_format_reward": {"name": "format", "params": {"pattern": "(?s)<think>(?!.*<think>).*</think>.*"}},
    "format": {"name": "format", "params": {"pattern": r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"}},
}
"""Verifiers by the names of TRL's reward functions, and of open-r1's."""


def reward_functions(imported: Imported, value: Any, to: str) -> Any:
    """Return the verifiers for TRL's reward functions, with their weights."""
    names, weights = value if isinstance(value, list) else [value], imported.get("reward_weights", default=[])
    verifiers = []
    for number, name in enumerate(names):
        verifier = REWARDS.get(str(name))
        if verifier is None and ":" in str(name):  # a function defined in the script
            verifier, function = str(name), str(name).rpartition(":")[2]
            imported.advice["reward_funcs"] = (
                f"{function}(completions, ...) becomes {function}(response, answer, metadata)"
            )
        if verifier is None and "." not in str(name):
            imported.advice["reward_funcs"] = (
                f"{name} is not written: a function of yours is file.py:function, called with response, answer and "
                "metadata; a penalty for length is algorithm.overlong_cache of flow=dapo"
            )
            continue
        if verifier is None:
            module, _, function = str(name).rpartition(".")
            verifier = f"{module}:{function}"
            imported.advice["reward_funcs"] = (
                f"{function}(completions, ...) becomes {function}(response, answer, metadata)"
            )
        entry = verifier if isinstance(verifier, dict) else {"name": verifier}
        verifiers.append({**entry, "weight": float(weights[number])} if number < len(weights) else entry)
    if not verifiers:
        return None
    return verifiers[0]["name"] if len(verifiers) == 1 and len(verifiers[0]) == 1 else verifiers


def mixture(imported: Imported, value: Any, to: str) -> Any:
    """Return the sources of TRL's `datasets`, or of the `dataset_mixture` of its recipes."""
    listed: Any = value["datasets"] if isinstance(value, dict) else value
    sources, lost = [], set[str]()
    for entry in listed if isinstance(listed, list) else [listed]:
        source = {MIXED.get(key, key): part for key, part in entry.items() if part is not None}
        lost |= source.keys() - {"path", "subset", "split", "weight"}
        sources.append({key: part for key, part in source.items() if key not in lost})
    if isinstance(value, dict):
        lost |= value.keys() - {"datasets", "seed"}
    if "weight" in lost | {key for source in sources for key in source}:
        imported.advice[imported.key] = "the sources are written; a weight is a share of the draws, and not of the rows"
    if lost:
        imported.advice[imported.key] = (
            f"the sources are written without {', '.join(sorted(lost))}; data.held_out counts rows for evaluation, and "
            "columns that nothing reads do no harm"
        )
    return sources


MIXED = {"id": "path", "name": "subset", "config": "subset"}
"""Braid's keys of a source by those of a mixture."""


def reward_model(imported: Imported, value: Any, to: str) -> Any:
    path = imported.get("reward.reward_model.model_path", "reward_model.model.path")
    if path and imported.get("reward.reward_model.enable", "reward_model.enable"):
        imported.converted |= {"algorithm.reward": "score", "roles.reward.model": path}
    elif imported.flow == "ppo":
        imported.converted["algorithm.reward"] = "verify"


# Steps and rates.


def rows_in(imported: Imported, path: Any) -> int | None:
    """Return the number of rows of a data file; None if it is not here."""
    file = Path(str(path["path"] if isinstance(path, dict) else path)).expanduser()
    file = file if file.is_absolute() else imported.folder / file
    if not file.is_file() or file.stat().st_size > MOST_COUNTED:
        return None
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(file).num_rows)
    return sum(1 for line in file.open("rb") if line.strip()) if file.suffix == ".jsonl" else None


def epochs(imported: Imported, value: Any, to: str) -> Any:
    """Return the steps of some passes over the data, where its files are here to be counted."""
    named = imported.get("trainer.total_training_steps", "num_rollout", "max_steps", "total_train_steps")
    if named is not None:
        return None
    train = imported.converted.get("data.train")
    counts = [rows_in(imported, entry) for entry in (train if isinstance(train, list) else [train])]
    size = imported.converted.get("trainer.prompts_per_step")
    if train is None or None in counts or not size:
        return Decide("trainer.steps: the number of prompts divided by trainer.prompts_per_step, times the epochs")
    return max(1, int(sum(filter(None, counts)) // size * value))


def warmup(imported: Imported, value: Any, to: str) -> Any:
    """Return the steps of a share of the run's."""
    if not value:
        return None
    if (steps := imported.converted.get("trainer.steps")) is None:
        return Decide(f"trainer.warmup_steps: {value} of trainer.steps")
    return round(float(value) * steps)


def schedule(imported: Imported, value: Any, to: str) -> Any:
    names = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "wsd": None}
    name = names.get(str(value), str(value))
    if value == "cosine_with_min_lr":
        imported.advice[imported.key] = "Braid's cosine ends at 0, not at a smallest rate"
    return name if name in ("constant", "linear", "cosine") else Decide("constant, linear or cosine")


def optimizer(imported: Imported, value: Any, to: str) -> Any:
    return OPTIMIZERS.get(str(value).lower(), f"torch.optim:{value}")


def beta_of(number: int, imported: Imported, value: Any, to: str) -> Any:
    betas = list(imported.converted.get(to, (0.9, 0.999)))
    betas[number] = float(value)
    return betas


def divided(imported: Imported, value: Any, to: str) -> Any:
    """Return the rows of one of several optimizer steps on a batch."""
    rows = imported.number("rollout_batch_size") * imported.number("n_samples_per_prompt")
    return max(1, rows // int(value))


def trl_batch(imported: Imported) -> None:
    """Set TRL's sizes, which are products of several keys."""
    world = imported.number("num_processes")
    rows = (
        imported.number("per_device_train_batch_size", default=8)
        * imported.number("gradient_accumulation_steps")
        * world
    )
    samples = imported.number("num_generations", default=8) if imported.flow in ("grpo", "rloo") else 1
    per_device = imported.number("per_device_train_batch_size", default=8) * world
    passes = imported.number("steps_per_generation", default=imported.number("gradient_accumulation_steps"))
    batch = imported.number("generation_batch_size", default=per_device * passes)
    if imported.flow in ("grpo", "rloo"):
        imported.converted["trainer.prompts_per_step"] = max(1, batch // samples)
        imported.converted["trainer.rows_per_update"] = rows
    else:
        imported.converted |= {
            "trainer.prompts_per_step": rows,
            "rollout.samples_per_prompt": 2 if imported.flow != "sft" else 1,
        }
    if "trainer.steps" not in imported.converted:
        steps = epochs(imported, imported.get("num_train_epochs", default=3), "")
        if isinstance(steps, Decide):
            imported.advice.setdefault("num_train_epochs", steps)
        elif steps is not None:
            imported.converted["trainer.steps"] = steps
    if world > 1:
        imported.converted |= {"workers": world, "runtime": "distributed"}


def train_batch(imported: Imported, value: Any, to: str) -> Any:
    """Return OpenRLHF's rows per optimizer step: the batch, if nothing is sampled."""
    if imported.flow not in ("sft", "dpo", "reward_model"):
        return int(value)
    imported.converted |= {
        "trainer.prompts_per_step": int(value),
        "rollout.samples_per_prompt": 1 if imported.flow == "sft" else 2,
    }
    return None


def passes(imported: Imported, value: Any, to: str) -> Any:
    """Return the passes over a batch; without sampling they are epochs, and set the number of steps."""
    if imported.flow not in ("sft", "dpo", "reward_model"):
        return int(value)
    steps = epochs(imported, value, to)
    if isinstance(steps, int):
        imported.converted["trainer.steps"] = steps
    return None if isinstance(steps, int) else steps


def score(imported: Imported, value: Any, to: str) -> Any:
    imported.converted["algorithm.reward"] = "score"
    return str(value).split(",")[0]


# AReaL.


def areal_kl(imported: Imported, value: Any, to: str) -> Any:
    return coefficient_of_kl(
        imported, 0, imported.get("actor.kl_ctl", default=0.1), imported.get("actor.kl_estimator", default="k1")
    )


def group_norm(imported: Imported, value: Any, to: str) -> Any:
    """Set whether advantages are divided by the deviation of their group, which GRPO's are."""
    if value not in ("group", None):
        return Decide(f"rewards over the {value}: a stage advantage.whiten")
    has_deviation = imported.get("actor.reward_norm.std_level") == "group"
    if imported.flow == "grpo" and not has_deviation:
        imported.converted["algorithm.normalise"] = False
    return imported.together.append("flow")


def behaviour_cap(imported: Imported, value: Any, to: str) -> Any:
    """Return weights that leave out tokens whose weight is beyond a cap."""
    return {"name": "masked", "low": 0.0, "high": float(value)} if imported.get("actor.use_decoupled_loss") else None


def areal_minibatches(imported: Imported, value: Any, to: str) -> int:
    rows = imported.number("train_dataset.batch_size") * imported.number("gconfig.n_samples")
    return max(1, rows // int(value))


def areal_lora(imported: Imported, value: Any, to: str) -> Any:
    if not imported.get("actor.use_lora"):
        return None
    targets = imported.get("actor.target_modules")
    settings = {
        "rank": imported.number("actor.lora_rank", default=32),
        "alpha": float(imported.number("actor.lora_alpha", default=16)),
    }
    return {**settings, "targets": targets} if isinstance(targets, list) and targets else settings


ALLOCATED = re.compile(r"(?:(\w+)[:.])?((?:[a-z]+\d+)+)")
AXES = {"t": "tensor", "p": "pipeline", "c": "context", "s": "context"}


def allocation(imported: Imported, value: Any, to: str) -> Any:
    """Set engines and the trainer's layout by AReaL's form of them, as in `sglang:d4t2+fsdp:d8`."""
    if str(value) in ("fsdp", "megatron", "archon"):  # the name alone, in place of its sizes
        return imported.together.append(to)
    parts = [ALLOCATED.fullmatch(part) for part in str(value).split("+")]
    if None in parts:
        return Decide(f"trainer.layout and rollout.engine: {value} has parts of another form")
    sizes = [{axis: int(n) for axis, n in re.findall(r"([a-z]+)(\d+)", part[2])} for part in parts if part]
    names = [str(part[1] or "") for part in parts if part]
    is_engine = imported.key == "rollout.backend"
    if (imported.key == "allocation_mode" and len(parts) > 1) or is_engine:
        if names[0] == "vllm":
            imported.converted["rollout.engine"] = "vllm"
        elif names[0] == "sglang":
            imported.advice[imported.key] = (
                "the layout is written; SGLang is a server: rollout.engine=http, rollout.servers={urls: [...], "
                "dialect: sglang}"
            )
        if sizes[0].get("t", 1) > 1:
            imported.converted["rollout.tensor"] = sizes[0]["t"]
        imported.together.append(to)
    if not is_engine:
        imported.together.append(to)
        layout = {AXES[axis]: n for axis, n in sizes[-1].items() if axis in AXES and n > 1}
        workers_of_trainer = math.prod(n for axis, n in sizes[-1].items() if axis != "e")
        imported.converted["workers"] = workers_of_trainer
        if workers_of_trainer > 1:
            imported.converted.setdefault("runtime", "distributed")
            imported.converted["trainer.layout"] = layout | ({"shard": "full"} if names[-1] in ("", "fsdp") else {})
    return None


def offpolicyness(imported: Imported, value: Any, to: str) -> Any:
    """Return the staleness of asynchronous runs; 0 is synchronous."""
    if int(value):
        imported.converted["runtime"] = "streaming"
    return int(value) or None


def areal_wandb(imported: Imported, value: Any, to: str) -> Any:
    return trackers(imported, "wandb", to) if value not in (False, "disabled") else None


def finish_areal(imported: Imported) -> None:
    loss_alone(imported)
    if imported.flow == "sft":
        imported.converted["rollout.samples_per_prompt"] = 1
    elif "reward.verify" not in imported.converted:
        imported.converted["reward.verify"] = "math"
        imported.advice["reward.verify"] = (
            "`math` is written, as AReaL's examples have it; its scripts name the reward: file.py:function, called "
            "with response and answer"
        )


# verl's supervised trainer.


def nested_field(imported: Imported, value: Any, to: str) -> Any:
    """Set a field of every source, or the field inside it that verl's `prompt_dict_keys` names."""
    inner = imported.get(imported.key.replace("_key", "_dict_keys"))
    names = inner if isinstance(inner, list) else [inner] if inner else []
    return of_source(imported, ".".join([str(value), *map(str, names[:1])]), to)


def processes(imported: Imported, value: Any, to: str) -> Any:
    count = imported.number("nproc_per_node", "trainer.n_gpus_per_node") * imported.number("nnodes", "trainer.nnodes")
    if count == 1:
        return imported.together.append(to)
    imported.converted.setdefault("runtime", "distributed")
    imported.converted["trainer.layout"] = {"shard": "full", **imported.converted.get("trainer.layout", {})}
    return count


def verl_sft_lora(imported: Imported, value: Any, to: str) -> Any:
    rank, targets = imported.number("model.lora_rank", default=0), imported.get("model.target_modules")
    if not rank:
        return None
    settings = {"rank": rank, "alpha": float(imported.number("model.lora_alpha", default=16))}
    return {**settings, "targets": targets} if isinstance(targets, list) else settings


def finish_verl_sft(imported: Imported) -> None:
    imported.converted["rollout.samples_per_prompt"] = 1


# prime-rl.


def prime_batch(imported: Imported, value: Any, to: str) -> int:
    samples = imported.number("orchestrator.group_size")
    return max(1, int(value) // samples)


def prime_lora(imported: Imported, value: Any, to: str) -> Any:
    targets = imported.get("trainer.model.lora.target_modules")
    settings = {
        "rank": imported.number("trainer.model.lora.rank", default=16),
        "alpha": float(imported.get("trainer.model.lora.alpha", default=32)),
    }
    return {**settings, "targets": targets} if isinstance(targets, list) else settings


def environment(imported: Imported, value: Any, to: str) -> Any:
    """Return the environment of verifiers that plays a taskset."""
    return {"name": f"verifiers:{str(value).rpartition('/')[2]}", "params": {}}


def environment_argument(imported: Imported, value: Any, to: str) -> None:
    """Add one of the taskset's settings to its parameters."""
    imported.together.append(to)
    if isinstance(made := imported.converted.get(to), dict):
        section = "args" if ".args." in imported.key else "taskset"
        *sections, name = imported.key.rpartition(f".{section}.")[2].split(".")
        parameters = made["params"]
        for part in sections:
            parameters = parameters.setdefault(part, {})
        parameters[name] = value


def async_level(imported: Imported, value: Any, to: str) -> Any:
    return offpolicyness(imported, value, to)


def finish_prime(imported: Imported) -> None:
    if imported.flow == "sft":
        imported.converted["rollout.samples_per_prompt"] = 1
        return
    imported.converted.setdefault("algorithm.kl_coef", 0.0)
    imported.converted.setdefault("algorithm.normalise", False)
    if "runtime" not in imported.converted and "max_async_level" not in imported.source_keys:
        imported.advice["runtime"] = (
            "prime-rl generates ahead of training by default: runtime=streaming and trainer.max_staleness=1"
        )
    if "rollout.environment" in imported.converted:
        others = [key for key in imported.source_keys if re.search(r"env\.[1-9]\d*\.(?:taskset\.)?id$", key)]
        imported.advice |= dict.fromkeys(
            others, "a run has one environment, and this is another one: write one that mixes both, or run it alone"
        )
        imported.advice["data.train"] = (
            "a file with as many lines as the taskset has tasks; verifiers' environment brings its own questions"
        )


# Devices.


def devices(imported: Imported) -> int:
    """Return the number of devices that train."""
    per_node = imported.number(
        "trainer.n_gpus_per_node", "actor_num_gpus_per_node", "cluster.n_gpus_per_node", default=8
    )
    return per_node * imported.number("trainer.nnodes", "actor_num_nodes", "cluster.n_nodes")


def workers(imported: Imported, value: Any, to: str) -> Any:
    count = devices(imported)
    if count == 1 or "workers" in imported.converted:  # AReaL's allocation goes before its devices
        return imported.together.append(to) if count > 1 else None
    imported.converted.setdefault("runtime", "hybrid")
    return count


def axis(name: str, imported: Imported, value: Any, to: str) -> Any:
    """Set an axis of the trainer's layout."""
    if int(value) > 1:
        imported.converted.setdefault(to, {})[name] = int(value)


def shard(imported: Imported, value: Any, to: str) -> Any:
    if str(value).startswith("fsdp") and devices(imported) > 1:
        imported.converted.setdefault(to, {})["shard"] = "full"


def zero(imported: Imported, value: Any, to: str) -> Any:
    """Set the sharding of a ZeRO stage."""
    if int(value) and devices(imported) > 1:
        imported.converted.setdefault(to, {})["shard"] = "full" if int(value) == 3 else "optimizer"


OFFLOAD = Decide(
    "trainer.resident_gib: GiB of a device for all roles of a process; what a stage does not need waits in host memory"
)


def lora(imported: Imported, value: Any, to: str) -> Any:
    rank = imported.get(f"{MODEL}.lora_rank", "lora_rank")
    if rank is None and imported.get("use_peft"):
        rank = imported.get("lora_r", default=16)
    if not rank:
        return None
    alpha, targets = (
        imported.get(f"{MODEL}.lora_alpha", "lora_alpha"),
        imported.get(f"{MODEL}.target_modules", "target_modules"),
    )
    targets = targets or imported.get("lora_target_modules")
    if stacks := imported.get("lora_target_parameters"):
        # Experts, by the last two parts of their names.
        linear = targets if isinstance(targets, list) else LoraConfig().linear_targets
        targets = [*linear, *(".".join(str(stack).split(".")[-2:]) for stack in stacks)]
    settings: dict[str, Any] = {"rank": int(rank), "alpha": float(alpha or (32 if imported.get("use_peft") else 16))}
    if imported.get("load_in_4bit"):
        settings["base_dtype"] = "nf4"
    return {**settings, "targets": targets} if isinstance(targets, list) else settings


def vllm_more(imported: Imported, value: Any, to: str) -> Any:
    imported.converted |= {f"{to}.{name}": setting for name, setting in (value or {}).items()}


def vllm_one(imported: Imported, value: Any, to: str) -> Any:
    imported.converted[f"{to}.{imported.key.rpartition('.')[2]}"] = value


def vllm(imported: Imported, value: Any, to: str) -> Any:
    is_used = (
        imported.get(f"{ROLLOUT}.name") == "vllm"
        or imported.get("use_vllm")
        or imported.number("vllm_num_engines", default=0)
        or imported.converted.get("rollout.engine") == "vllm"
    )
    if is_used and (to, value) in ONE:
        return imported.together.append(to)
    return value if is_used else None


def trackers(imported: Imported, value: Any, to: str) -> Any:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if sections := [{"name": name} for name in names if name in TRACKERS]:
        imported.converted[to] = [*imported.converted.get(to, []), *sections]
    unknown = [name for name in names if name not in (*TRACKERS, "console", "file", "none", "False")]
    return Decide(f"no tracker is called {', '.join(unknown)}; see `braid list trackers`") if unknown else None


def tracker(name: str, imported: Imported, value: Any, to: str) -> Any:
    return trackers(imported, name, to) if value else None


def tool_format(imported: Imported, value: Any, to: str) -> Any:
    return value if imported.get(f"{ROLLOUT}.multi_turn.enable") and value in TOOL_FORMATS else None


BASELINES = ("reinforce_baseline", "reinforce_plus_plus_baseline")
"""Names of REINFORCE++ with the mean reward of a prompt's samples as its baseline."""
VERL_FLOWS = {
    "reinforce_plus_plus_baseline": "reinforce_plus_plus",
    "grpo": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "grpo_passk": "grpo",
}
SLIME_FLOWS = {
    "reinforce_plus_plus_baseline": "reinforce_plus_plus",
    "grpo": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "ppo": "ppo",
    "reinforce_plus_plus": "reinforce_plus_plus",
}
OPENRLHF_FLOWS = {
    "reinforce_baseline": "reinforce_plus_plus",
    "gae": "ppo",
    "reinforce": "reinforce_plus_plus",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
RULES: dict[str, Rule] = {
    "": lambda imported, value, to: None if value in UNSET else value,
    "verl_flow": partial(flow, names=VERL_FLOWS),
    "slime_flow": partial(flow, names=SLIME_FLOWS),
    "openrlhf_flow": partial(flow, names=OPENRLHF_FLOWS),
    "dynamic": lambda imported, value, to: imported.flow if value else None,
    "kl": verl_kl,
    "slime_kl": slime_kl,
    "openrlhf_kl": openrlhf_kl,
    "trl_beta": trl_beta,
    "together": lambda imported, value, to: imported.together.append(to),
    "init_kwargs": lambda imported, value, to: value.get("dtype", value.get("torch_dtype")) or None,
    "clip": partial(clip, both=f"{ACTOR}.clip_ratio", low=f"{ACTOR}.clip_ratio_low", high=f"{ACTOR}.clip_ratio_high"),
    "slime_clip": partial(clip, both="eps_clip", low="eps_clip_low", high="eps_clip_high"),
    "areal_clip": partial(clip, both="actor.eps_clip", low="actor.eps_clip", high="actor.eps_clip_higher"),
    "areal_kl": areal_kl,
    "areal_lora": areal_lora,
    "areal_minibatches": areal_minibatches,
    "areal_wandb": areal_wandb,
    "allocation": allocation,
    "behaviour_cap": behaviour_cap,
    "group_norm": group_norm,
    "offpolicyness": offpolicyness,
    "nested_field": nested_field,
    "processes": processes,
    "verl_sft_lora": verl_sft_lora,
    "prime_batch": prime_batch,
    "prime_lora": prime_lora,
    "environment": environment,
    "environment_argument": environment_argument,
    "async_level": async_level,
    "at_least_one": lambda imported, value, to: len(value) if isinstance(value, list) else max(1, int(value)),
    "top_k": lambda imported, value, to: int(value) if 0 < int(value) < 10**6 else None,
    "other_model": lambda imported, value, to: value if value != imported.converted.get("model") else None,
    "trl_clip": partial(clip, both="epsilon", low="epsilon", high="epsilon_high"),
    "pair": lambda imported, value, to: imported.converted.update(
        {"algorithm.clip_low": float(value[0]), "algorithm.clip_high": float(value[1])}
    ),
    "loss": loss,
    "entry": lambda imported, value, to: {
        **imported.converted.get(to, {}),
        imported.key.rpartition(".")[2]: value,
    },
    "covariance": covariance,
    "loss_kl": loss_kl,
    "trl_loss": trl_loss,
    "aggregate": aggregate,
    "correction": partial(correction, cap="algorithm.rollout_correction.rollout_is_threshold"),
    "slime_correction": partial(correction, cap="tis_clip", mode="tis_mode"),
    "openrlhf_correction": partial(correction, cap="vllm_is_truncated_threshold", mode="vllm_is_correction_type"),
    "trl_correction": trl_correction,
    "paths": paths,
    "mixture": mixture,
    "eval_sets": eval_sets,
    "named_sets": named_sets,
    "of_source": of_source,
    "verify": verify,
    "verify_function": lambda imported, value, to: ":".join(str(value).rsplit(".", 1)) if value else None,
    "served": served,
    "reward_functions": reward_functions,
    "reward_model": reward_model,
    "epochs": epochs,
    "warmup": warmup,
    "schedule": schedule,
    "optimizer": optimizer,
    "beta1": partial(beta_of, 0),
    "beta2": partial(beta_of, 1),
    "divided": divided,
    "workers": workers,
    "shard": shard,
    "zero": zero,
    "offload": lambda imported, value, to: OFFLOAD if value else None,
    "lora": lora,
    "ratio_level": ratio_level,
    "overlong": overlong,
    "overlong_factor": overlong_factor,
    "vllm": vllm,
    "vllm_more": vllm_more,
    "vllm_one": vllm_one,
    "vllm_engine": lambda imported, value, to: "vllm" if int(value) else None,
    "train_batch": train_batch,
    "passes": passes,
    "score": score,
    "queue": lambda imported, value, to: int(value) if imported.get("async_train") else None,
    "as_list": lambda imported, value, to: value if isinstance(value, list) else [value],
    "trackers": trackers,
    **{f"use_{name}": partial(tracker, name) for name in TRACKERS},
    "tool_format": tool_format,
    **{name: partial(axis, name) for name in ("tensor", "pipeline", "sequence", "context")},
    "at_least_zero": lambda imported, value, to: max(0, int(value)),
    "positive": lambda imported, value, to: int(value) if int(value) > 0 else None,
    "rows": lambda imported, value, to: int(value) * imported.number(f"{ROLLOUT}.n"),
    "negated": lambda imported, value, to: not value,
    "reference": lambda imported, value, to: (
        value if value not in UNSET and imported.converted.get("algorithm.kl_coef") else None
    ),
    "staleness": lambda imported, value, to: (
        int(value) if imported.get("trainer.v1.trainer_mode") == "separate_async" else None
    ),
    "ratio": lambda imported, value, to: max(1.0, int(value) / imported.number("rollout_batch_size")),
}


def check_rules(table: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError for a row with an unknown rule."""
    for key, row in table.items():
        if row.get("rule", "") not in RULES:
            raise UserError(f"{key}: no rule is called {row['rule']!r}")
