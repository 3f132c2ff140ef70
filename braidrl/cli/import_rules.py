"""Rules of `braid import-config`: how a value of another framework becomes values of Braid's keys.

A rule is a function of the import, the value and Braid's key. It returns the value of that key, a `Decide` with advice,
or None, which writes nothing; it may also set keys of the import itself. Rules are named in the tables of keys, of
which each framework has one.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from braidrl.config import LoraConfig
from braidrl.errors import UserError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
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
    """A configuration of another framework by its keys, its defaults included, and the keys of Braid made of it."""

    given: Mapping[str, Any]
    folder: Path = Path()
    """Folder of the configuration, for data files with relative paths."""
    flow: str = "grpo"
    key: str = ""
    """The key that a rule is called for."""
    made: dict[str, Any] = field(default_factory=dict)
    together: list[str] = field(default_factory=list)
    """Keys of Braid that are made of several keys, by the row of another or at the end."""
    advice: dict[str, str] = field(default_factory=dict)
    """What to decide about keys, in addition to what their own rules return."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Braid's keys that were made, and left out again or changed since other keys exclude them; with the reason."""

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first value that is set, of several names of one setting."""
        return next((self.given[key] for key in keys if self.given.get(key) not in (None, *UNSET)), default)

    def number(self, *keys: str, default: int = 1) -> int:
        value = self.get(*keys, default=default)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


Rule = Callable[[Imported, Any, str], Any]


# The algorithm.


def flow(one: Imported, value: Any, to: str, names: Mapping[str, str]) -> Any:
    name = str(value).rpartition(".")[2].lower()
    return one.flow if name in names else Decide(f"no recipe is called {name}; see `braid list recipes`")


def coefficient_of_kl(one: Imported, in_loss: Any, in_reward: Any, estimator: Any) -> Any:
    """Set the coefficient and estimator of the KL term: in the loss, in the reward, or none."""
    advice, value = None, 0.0
    if one.flow not in ("grpo", *HAVE_KL_IN_REWARD):
        return Decide(f"{one.flow} has no KL term; grpo has") if in_loss or in_reward else None
    if in_loss and one.flow == "grpo":
        value = in_loss
    elif in_reward and one.flow in HAVE_KL_IN_REWARD:
        value = in_reward
    elif in_loss or in_reward:
        where = "in the reward" if one.flow in HAVE_KL_IN_REWARD else "in the loss"
        advice = Decide(f"{one.flow} has its KL term {where}")
    one.made["algorithm.kl_coef"] = float(value)
    if value and estimator is not None:
        known = ESTIMATORS.get(str(estimator).rstrip("+"))
        if known is None:
            return Decide(f"no estimator is called {estimator}; see `braid list kl-estimators`")
        one.made["algorithm.kl_estimator"] = known
    return advice


def verl_kl(one: Imported, value: Any, to: str) -> Any:
    in_loss = one.get(f"{ACTOR}.kl_loss_coef", default=0.001) if one.get(f"{ACTOR}.use_kl_loss") else 0
    uses = one.get("algorithm.use_kl_in_reward")
    in_reward = one.get("algorithm.kl_ctrl.kl_coef", default=0.001) if uses else 0
    if uses and one.get("algorithm.kl_ctrl.type") == "adaptive" and one.flow == "ppo":
        one.made["algorithm.kl_target"] = one.get("algorithm.kl_ctrl.target_kl", default=0.1)
    loss, reward = (f"{ACTOR}.kl_loss_type", "low_var_kl"), ("algorithm.kl_penalty", "kl")
    key, usual = loss if in_loss and one.flow == "grpo" else reward
    return coefficient_of_kl(one, in_loss, in_reward, one.get(key, default=usual))


def slime_kl(one: Imported, value: Any, to: str) -> Any:
    in_loss = one.get("kl_loss_coef", default=0.0) if one.get("use_kl_loss") else 0
    return coefficient_of_kl(one, in_loss, one.get("kl_coef", default=0.0), one.get("kl_loss_type", default="k1"))


def openrlhf_kl(one: Imported, value: Any, to: str) -> Any:
    coefficient, in_loss = one.get("init_kl_coef", default=0.01), one.get("use_kl_loss")
    estimator = one.get("kl_estimator", default="k1")
    return coefficient_of_kl(one, coefficient if in_loss else 0, 0 if in_loss else coefficient, estimator)


def trl_beta(one: Imported, value: Any, to: str) -> Any:
    if one.flow == "dpo":
        one.made["algorithm.beta"] = float(value)
        return None
    if one.flow in ("grpo", "rloo"):
        return float(value)
    return Decide(f"{one.flow} has no KL term; grpo has") if value else None


def clip(one: Imported, value: Any, to: str, both: str, low: str, high: str) -> Any:
    usual = one.get(both, default=0.2)
    one.made["algorithm.clip_low"] = one.get(low, default=usual)
    one.made["algorithm.clip_high"] = one.get(high, default=usual)


LOSSES: Mapping[str, Callable[[Imported, float, float], dict[str, Any]]] = {
    "gspo": lambda one, low, high: {"name": "gspo", "low": low, "high": high},
    "cispo": lambda one, low, high: {"name": "cispo", "low": low, "high": high},
    "geo_mean": lambda one, low, high: {"name": "gmpo", "low": low, "high": high},
    "gpg": lambda one, low, high: {"name": "reinforce"},
    "dppo_tv": lambda one, low, high: {"name": "dppo_tv", "delta": high},
    "sapo": lambda one, low, high: {
        "name": "sapo",
        "tau_positive": one.get(f"{ACTOR}.tau_pos", "sapo_temperature_pos", default=1.0),
        "tau_negative": one.get(f"{ACTOR}.tau_neg", "sapo_temperature_neg", default=1.05),
    },
}
"""Losses of Braid by other frameworks' names, with their bounds of the ratio."""
OVER_ROWS = ("gspo", "gmpo", "sapo")
"""Losses that verl and TRL average over rows."""


def loss(one: Imported, value: Any, to: str) -> Any:
    if value in ("vanilla", "ppo", "clip", None):
        one.together.append(to)  # the recipe's own
        return None
    if value in ("clip_cov", "kl_cov"):
        return Decide(
            f"write the flow as a file with the stage advantage.highest_covariance and loss {value}: "
            "`braid flow CONFIG --yaml` prints this one"
        )
    if value not in LOSSES:
        return Decide("algorithm.loss, where `braid list losses` has one like it")
    both = one.get(f"{ACTOR}.clip_ratio", "epsilon", default=0.2)
    low = one.get(f"{ACTOR}.clip_ratio_low", default=both)
    return LOSSES[value](one, float(low), float(one.get(f"{ACTOR}.clip_ratio_high", "epsilon_high", default=both)))


def ratio_level(one: Imported, value: Any, to: str) -> Any:
    """Return the loss for TRL's level of the ratio."""
    return loss(one, "gspo", to) if value == "sequence" else None if value == "token" else Decide("token or sequence")


def loss_alone(one: Imported) -> None:
    """Leave the settings of the recipe's own loss out where another loss is named."""
    if not isinstance(named := one.made.get("algorithm.loss"), dict):
        return
    # Losses with bounds have taken them over.
    lost = ("dual_clip",) if named.keys() & {"low", "high", "delta"} else ("clip_low", "clip_high", "dual_clip")
    for name in ("clip_low", "clip_high", "dual_clip"):
        one.made.pop(f"algorithm.{name}", None)
    for name in lost:
        one.dropped[f"algorithm.{name}"] = f"the loss {named['name']} has no {name}"
    if named["name"] in OVER_ROWS:
        over_rows = "seq-mean-token-mean"
        if one.made.get("algorithm.aggregate", over_rows) != over_rows:
            one.dropped["algorithm.aggregate"] = f"{named['name']} averages over rows: aggregate is {over_rows}"
        one.made["algorithm.aggregate"] = over_rows


def aggregate(one: Imported, value: Any, to: str) -> Any:
    if value == "seq-mean-token-sum-norm":
        longest = one.get("data.max_response_length", "max_completion_length", default=512)
        most = one.get(f"{ACTOR}.loss_scale_factor", default=longest)
        return {"name": "token-sum-norm", "max_tokens": int(most)}
    known = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean")
    return value if value in known else Decide("see `braid list aggregations`")


def trl_loss(one: Imported, value: Any, to: str) -> Any:
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if one.flow == "dpo":
        return None if name == "sigmoid" else Decide("the recipe dpo has the sigmoid loss; see `braid list losses`")
    if one.flow == "sft":
        return None if name == "nll" else Decide("the recipe sft has the log-likelihood; see `braid list losses`")
    means = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "bnpo": "token-mean", "cispo": "token-mean"}
    if name in means:
        one.made["algorithm.aggregate"] = means[name]
    elif name == "dr_grpo":
        one.made["algorithm.aggregate"] = aggregate(one, "seq-mean-token-sum-norm", to)
    made = loss(one, name, to) if name in LOSSES else None
    return made if made or name in means or name == "dr_grpo" else Decide("see `braid list losses`")


def overlong(one: Imported, value: Any, to: str) -> Any:
    """Return the tokens before a response's limit in which DAPO punishes its length, if that is on."""
    section = one.key.rpartition(".")[0]
    is_on = one.get(f"{section}.enable", default=True)
    return int(one.number(f"{section}.len", default=0)) or None if is_on else None


def overlong_factor(one: Imported, value: Any, to: str) -> Any:
    if float(value) != 1 and one.made.get("algorithm.overlong_cache"):
        return Decide("the recipe dapo has the penalty 1: write the flow with another, see `braid flow dapo --yaml`")
    return None


def correction(one: Imported, value: Any, to: str, cap: str) -> Any:
    return {"name": "truncated", "cap": float(one.get(cap, default=2.0))} if value else None


# Data.


def paths(one: Imported, value: Any, to: str) -> Any:
    """Return paths of data, which may be a list or text with commas; weights are the probabilities."""
    found = value if isinstance(value, list) else [part for part in str(value).split(",") if part]
    weights = str(one.get("prompt_data_probs", "dataset_probs", default="")).split(",")
    if len(weights) == len(found) > 1:
        return [{"path": str(path), "weight": float(weight)} for path, weight in zip(found, weights, strict=True)]
    return [str(path) for path in found] if len(found) > 1 else str(found[0])


def eval_sets(one: Imported, value: Any, to: str) -> Any:
    found = [str(path) for path in (value if isinstance(value, list) else str(value).split(","))]
    names = [Path(path).stem for path in found]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    return dict(zip(names, found, strict=True))


def named_sets(one: Imported, value: Any, to: str) -> Any:
    """Return held-out sets that are written as NAME PATH NAME PATH."""
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    if len(words) % 2:
        return Decide("data.eval is {NAME: PATH}")
    return dict(zip(words[::2], words[1::2], strict=True))


def of_source(one: Imported, value: Any, to: str) -> Any:
    """Set a key of every source of `data.train` and `data.eval`."""
    name = to.rpartition(".")[2]
    if value in (*UNSET, None) or (name == "prompt_field" and value == "prompt"):
        return None

    def with_key(entry: Any) -> Any:
        return {**(entry if isinstance(entry, dict) else {"path": entry}), name: value}

    train, held_out = one.made.get("data.train"), one.made.get("data.eval")
    if train is not None:
        one.made["data.train"] = [with_key(entry) for entry in (train if isinstance(train, list) else [train])]
    if isinstance(held_out, dict) and name not in ("first", "subset", "split"):
        one.made["data.eval"] = {key: with_key(entry) for key, entry in held_out.items()}
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
    """Return the verifier for rows of a `data_source`, as verl chooses its function; None if it knows none."""
    exact = (name for name, sources in VERIFIERS.items() if source in sources)
    begins = ("aime", "numina", "searchR1_")
    started = (name for name, sources in VERIFIERS.items() if any(source.startswith(b) for b in begins if b in sources))
    return next(exact, None) or next(started, None)


def sources_in(path: Path) -> Counter[str] | None:
    """Return the rows of a data file by `data_source`; None if it is not here, or has no such field."""
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
        found = [json.loads(line) for line in file if line.strip()]
    named = [str(row["data_source"]) for row in found if isinstance(row, dict) and "data_source" in row]
    return Counter(named) if named else None


def verified(one: Imported, entry: Any) -> list[Any]:
    """Return a source with verl's function for its rows as verifier: one entry for each verifier that its rows need."""
    path = Path(str(entry["path"] if isinstance(entry, dict) else entry)).expanduser()
    counts = sources_in(path if path.is_absolute() else one.folder / path)
    if counts is None:
        known = {name: verifier_of(name) or verifier_of(f"openai/{name}") for name in (path.stem, path.parent.name)}
        counts = Counter({name: 1 for name, verifier in known.items() if verifier})
        guess = next((verifier for verifier in known.values() if verifier), None)
        one.advice["reward.verify"] = (
            f"{path} is not here to be read: "
            + (f"{guess} is a guess from its name" if guess else "`exact` is Braid's default")
            + "; verl chooses by each row's data_source"
        )
        return [{**(entry if isinstance(entry, dict) else {"path": str(entry)}), "verify": guess}] if guess else [entry]
    by_verifier: dict[str | None, list[str]] = {}
    for name in counts:
        by_verifier.setdefault(verifier_of(name), []).append(name)
    if unknown := by_verifier.pop(None, []):
        one.advice["data_source"] = f"verl has no function for rows of {', '.join(unknown)}; name a verifier for them"
    base = entry if isinstance(entry, dict) else {"path": str(entry)}
    if len(by_verifier) == 1 and not unknown:
        return [{**base, "verify": next(iter(by_verifier))}]
    return [
        {**base, "where": {"data_source": names}, "verify": verifier, "weight": float(sum(counts[n] for n in names))}
        for verifier, names in by_verifier.items()
    ] or [entry]


def rewards_by_source(one: Imported) -> None:
    """Set the verifiers that verl's default function chooses by the rows' `data_source`."""
    if "reward.verify" in one.made or one.made.get("algorithm.reward") == "score":
        return
    train = one.made.get("data.train")
    if train is not None:
        entries = [made for entry in (train if isinstance(train, list) else [train]) for made in verified(one, entry)]
        verifiers = [entry.get("verify") if isinstance(entry, dict) else None for entry in entries]
        if len(set(verifiers)) == 1 and verifiers[0]:
            one.made["reward.verify"] = verifiers[0]
            entries = [{key: part for key, part in entry.items() if key != "verify"} for entry in entries]
        short = [entry["path"] if isinstance(entry, dict) and len(entry) == 1 else entry for entry in entries]
        one.made["data.train"] = short[0] if len(short) == 1 and isinstance(short[0], str) else short
    for name, entry in (one.made.get("data.eval") or {}).items():
        found = verified(one, entry)
        if len(found) == 1 and isinstance(found[0], dict) and found[0].get("verify") != one.made.get("reward.verify"):
            one.made["data.eval"][name] = found[0]


def verify(one: Imported, value: Any, to: str) -> Any:
    for key in ("reward.custom_reward_function", "custom_reward_function"):
        if path := one.get(f"{key}.path"):
            function = one.get(f"{key}.name", default="compute_score")
            one.made["reward.verify"] = f"{path}:{function}"
            one.advice[f"{key}.path"] = (
                f"rename the parameters of {function}: data_source to source, solution_str to response, ground_truth "
                "to answer, extra_info to metadata"
            )


def served(one: Imported, value: Any, to: str) -> Any:
    """Return the verifier for OpenRLHF's `remote_rm_url`: a file with `reward_func`, or a server."""
    first = str(value).split(",")[0]
    if first.endswith(".py"):
        one.advice["remote_rm_url"] = "reward_func(queries, prompts, labels) becomes reward_func(response, answer)"
        return f"{first}:reward_func"
    return {"name": "remote", "params": {"url": first}}


REWARDS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": {"name": "format", "params": {"pattern": "(?s)<think>(?!.*<think>).*</think>.*"}},
}


def reward_functions(one: Imported, value: Any, to: str) -> Any:
    """Return the verifiers for TRL's reward functions, with their weights."""
    names, weights = value if isinstance(value, list) else [value], one.get("reward_weights", default=[])
    made = []
    for number, name in enumerate(names):
        known = REWARDS.get(str(name))
        if known is None and ":" in str(name):  # a function of the script itself
            known, function = str(name), str(name).rpartition(":")[2]
            one.advice["reward_funcs"] = f"{function}(completions, ...) becomes {function}(response, answer, metadata)"
        if known is None and "." not in str(name):
            return Decide("a function of yours is file.py:function, called with response, answer and metadata")
        if known is None:
            module, _, function = str(name).rpartition(".")
            known = f"{module}:{function}"
            one.advice["reward_funcs"] = f"{function}(completions, ...) becomes {function}(response, answer, metadata)"
        entry = known if isinstance(known, dict) else {"name": known}
        made.append({**entry, "weight": float(weights[number])} if number < len(weights) else entry)
    return made[0]["name"] if len(made) == 1 and len(made[0]) == 1 else made


def reward_model(one: Imported, value: Any, to: str) -> Any:
    path = one.get("reward.reward_model.model_path", "reward_model.model.path")
    if path and one.get("reward.reward_model.enable", "reward_model.enable"):
        one.made |= {"algorithm.reward": "score", "roles.reward.model": path}
    elif one.flow == "ppo":
        one.made["algorithm.reward"] = "verify"


# Steps and rates.


def rows_in(one: Imported, path: Any) -> int | None:
    """Return the number of rows of a data file; None if it is not here."""
    found = Path(str(path["path"] if isinstance(path, dict) else path)).expanduser()
    found = found if found.is_absolute() else one.folder / found
    if not found.is_file() or found.stat().st_size > MOST_COUNTED:
        return None
    if found.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(found).num_rows)
    return sum(1 for line in found.open("rb") if line.strip()) if found.suffix == ".jsonl" else None


def epochs(one: Imported, value: Any, to: str) -> Any:
    """Return the steps of some passes over the data, where its files are here to be counted."""
    named = one.get("trainer.total_training_steps", "num_rollout", "max_steps")
    if named is not None:
        return None
    train = one.made.get("data.train")
    counts = [rows_in(one, entry) for entry in (train if isinstance(train, list) else [train])]
    size = one.made.get("trainer.prompts_per_step")
    if train is None or None in counts or not size:
        return Decide("trainer.steps: the number of prompts divided by trainer.prompts_per_step, times the epochs")
    return max(1, int(sum(filter(None, counts)) // size * value))


def warmup(one: Imported, value: Any, to: str) -> Any:
    """Return the steps of a share of the run's."""
    if not value:
        return None
    if (steps := one.made.get("trainer.steps")) is None:
        return Decide(f"trainer.warmup_steps: {value} of trainer.steps")
    return round(float(value) * steps)


def schedule(one: Imported, value: Any, to: str) -> Any:
    names = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "wsd": None}
    name = names.get(str(value), str(value))
    if value == "cosine_with_min_lr":
        one.advice["lr_scheduler"] = "Braid's cosine ends at 0, not at a smallest rate"
    return name if name in ("constant", "linear", "cosine") else Decide("constant, linear or cosine")


def optimizer(one: Imported, value: Any, to: str) -> Any:
    return OPTIMIZERS.get(str(value).lower(), f"torch.optim:{value}")


def beta_of(number: int, one: Imported, value: Any, to: str) -> Any:
    betas = list(one.made.get(to, (0.9, 0.999)))
    betas[number] = float(value)
    return betas


def divided(one: Imported, value: Any, to: str) -> Any:
    """Return the rows of one of several optimizer steps on a batch."""
    rows = one.number("rollout_batch_size") * one.number("n_samples_per_prompt")
    return max(1, rows // int(value))


def trl_batch(one: Imported) -> None:
    """Set TRL's sizes, which are products of several keys."""
    world = one.number("num_processes")
    rows = one.number("per_device_train_batch_size", default=8) * one.number("gradient_accumulation_steps") * world
    samples = one.number("num_generations", default=8) if one.flow in ("grpo", "rloo") else 1
    per_device = one.number("per_device_train_batch_size", default=8) * world
    passes = one.number("steps_per_generation", default=one.number("gradient_accumulation_steps"))
    batch = one.number("generation_batch_size", default=per_device * passes)
    if one.flow in ("grpo", "rloo"):
        one.made["trainer.prompts_per_step"] = max(1, batch // samples)
        one.made["trainer.rows_per_update"] = rows
    else:
        one.made |= {"trainer.prompts_per_step": rows, "rollout.samples_per_prompt": 2 if one.flow != "sft" else 1}
    if "trainer.steps" not in one.made:
        made = epochs(one, one.get("num_train_epochs", default=3), "")
        if isinstance(made, Decide):
            one.advice.setdefault("num_train_epochs", made)
        elif made is not None:
            one.made["trainer.steps"] = made
    if world > 1:
        one.made |= {"workers": world, "runtime": "distributed"}


def train_batch(one: Imported, value: Any, to: str) -> Any:
    """Return OpenRLHF's rows of an optimizer step, which are the whole batch where nothing is sampled."""
    if one.flow not in ("sft", "dpo", "reward_model"):
        return int(value)
    one.made |= {"trainer.prompts_per_step": int(value), "rollout.samples_per_prompt": 1 if one.flow == "sft" else 2}
    return None


def passes(one: Imported, value: Any, to: str) -> Any:
    """Return the passes over a batch; where nothing is sampled they are passes over the data, and give steps."""
    if one.flow not in ("sft", "dpo", "reward_model"):
        return int(value)
    steps = epochs(one, value, to)
    if isinstance(steps, int):
        one.made["trainer.steps"] = steps
    return None if isinstance(steps, int) else steps


def score(one: Imported, value: Any, to: str) -> Any:
    one.made["algorithm.reward"] = "score"
    return str(value).split(",")[0]


# Devices.


def devices(one: Imported) -> int:
    """Return the number of devices that train."""
    each = one.number("trainer.n_gpus_per_node", "actor_num_gpus_per_node", default=8)
    return each * one.number("trainer.nnodes", "actor_num_nodes")


def workers(one: Imported, value: Any, to: str) -> Any:
    count = devices(one)
    if count == 1:
        return None
    one.made.setdefault("runtime", "hybrid")
    return count


def axis(name: str, one: Imported, value: Any, to: str) -> Any:
    """Set an axis of the trainer's layout."""
    if int(value) > 1:
        one.made.setdefault(to, {})[name] = int(value)


def shard(one: Imported, value: Any, to: str) -> Any:
    if str(value).startswith("fsdp") and devices(one) > 1:
        one.made.setdefault(to, {})["shard"] = "full"


def zero(one: Imported, value: Any, to: str) -> Any:
    """Set the sharding of a ZeRO stage."""
    if int(value) and devices(one) > 1:
        one.made.setdefault(to, {})["shard"] = "full" if int(value) == 3 else "optimizer"


OFFLOAD = Decide(
    "trainer.resident_gib: GiB of a device for all roles of a process; what a stage does not need waits in host memory"
)


def lora(one: Imported, value: Any, to: str) -> Any:
    rank = one.get(f"{MODEL}.lora_rank", "lora_rank")
    if rank is None and one.get("use_peft"):
        rank = one.get("lora_r", default=16)
    if not rank:
        return None
    alpha, targets = one.get(f"{MODEL}.lora_alpha", "lora_alpha"), one.get(f"{MODEL}.target_modules", "target_modules")
    targets = targets or one.get("lora_target_modules")
    if stacks := one.get("lora_target_parameters"):
        # Experts, by the last two parts of their names.
        linear = targets if isinstance(targets, list) else LoraConfig().linear_targets
        targets = [*linear, *(".".join(str(stack).split(".")[-2:]) for stack in stacks)]
    settings: dict[str, Any] = {"rank": int(rank), "alpha": float(alpha or (32 if one.get("use_peft") else 16))}
    if one.get("load_in_4bit"):
        settings["base_dtype"] = "nf4"
    return {**settings, "targets": targets} if isinstance(targets, list) else settings


def vllm_more(one: Imported, value: Any, to: str) -> Any:
    one.made |= {f"{to}.{name}": setting for name, setting in (value or {}).items()}


def vllm_one(one: Imported, value: Any, to: str) -> Any:
    one.made[f"{to}.{one.key.rpartition('.')[2]}"] = value


def vllm(one: Imported, value: Any, to: str) -> Any:
    is_used = one.get(f"{ROLLOUT}.name") == "vllm" or one.get("use_vllm") or one.number("vllm_num_engines", default=0)
    return value if is_used and (to, value) not in ONE else None


def trackers(one: Imported, value: Any, to: str) -> Any:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if made := [{"name": name} for name in names if name in TRACKERS]:
        one.made[to] = [*one.made.get(to, []), *made]
    unknown = [name for name in names if name not in (*TRACKERS, "console", "file", "none", "False")]
    return Decide(f"no tracker is called {', '.join(unknown)}; see `braid list trackers`") if unknown else None


def tracker(name: str, one: Imported, value: Any, to: str) -> Any:
    return trackers(one, name, to) if value else None


def tool_format(one: Imported, value: Any, to: str) -> Any:
    return value if one.get(f"{ROLLOUT}.multi_turn.enable") and value in TOOL_FORMATS else None


VERL_FLOWS = {
    "grpo": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "grpo_passk": "grpo",
}
SLIME_FLOWS = {
    "grpo": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "ppo": "ppo",
    "reinforce_plus_plus": "reinforce_plus_plus",
}
OPENRLHF_FLOWS = {
    "gae": "ppo",
    "reinforce": "reinforce_plus_plus",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
RULES: dict[str, Rule] = {
    "": lambda one, value, to: None if value in UNSET else value,
    "verl_flow": partial(flow, names=VERL_FLOWS),
    "slime_flow": partial(flow, names=SLIME_FLOWS),
    "openrlhf_flow": partial(flow, names=OPENRLHF_FLOWS),
    "dynamic": lambda one, value, to: one.flow if value else None,
    "kl": verl_kl,
    "slime_kl": slime_kl,
    "openrlhf_kl": openrlhf_kl,
    "trl_beta": trl_beta,
    "together": lambda one, value, to: one.together.append(to),
    "init_kwargs": lambda one, value, to: value.get("dtype", value.get("torch_dtype")) or None,
    "clip": partial(clip, both=f"{ACTOR}.clip_ratio", low=f"{ACTOR}.clip_ratio_low", high=f"{ACTOR}.clip_ratio_high"),
    "slime_clip": partial(clip, both="eps_clip", low="eps_clip_low", high="eps_clip_high"),
    "trl_clip": partial(clip, both="epsilon", low="epsilon", high="epsilon_high"),
    "pair": lambda one, value, to: one.made.update(
        {"algorithm.clip_low": float(value[0]), "algorithm.clip_high": float(value[1])}
    ),
    "loss": loss,
    "trl_loss": trl_loss,
    "aggregate": aggregate,
    "correction": partial(correction, cap="algorithm.rollout_correction.rollout_is_threshold"),
    "slime_correction": partial(correction, cap="tis_clip"),
    "openrlhf_correction": partial(correction, cap="vllm_is_truncated_threshold"),
    "trl_correction": partial(correction, cap="vllm_importance_sampling_clip_max"),
    "paths": paths,
    "eval_sets": eval_sets,
    "named_sets": named_sets,
    "of_source": of_source,
    "verify": verify,
    "verify_function": lambda one, value, to: ":".join(str(value).rsplit(".", 1)) if value else None,
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
    "offload": lambda one, value, to: OFFLOAD if value else None,
    "lora": lora,
    "ratio_level": ratio_level,
    "overlong": overlong,
    "overlong_factor": overlong_factor,
    "vllm": vllm,
    "vllm_more": vllm_more,
    "vllm_one": vllm_one,
    "vllm_engine": lambda one, value, to: "vllm" if int(value) else None,
    "train_batch": train_batch,
    "passes": passes,
    "score": score,
    "queue": lambda one, value, to: int(value) if one.get("async_train") else None,
    "as_list": lambda one, value, to: value if isinstance(value, list) else [value],
    "trackers": trackers,
    **{f"use_{name}": partial(tracker, name) for name in TRACKERS},
    "tool_format": tool_format,
    **{name: partial(axis, name) for name in ("tensor", "pipeline", "sequence", "context")},
    "at_least_zero": lambda one, value, to: max(0, int(value)),
    "positive": lambda one, value, to: int(value) if int(value) > 0 else None,
    "rows": lambda one, value, to: int(value) * one.number(f"{ROLLOUT}.n"),
    "negated": lambda one, value, to: not value,
    "reference": lambda one, value, to: value if value not in UNSET and one.made.get("algorithm.kl_coef") else None,
    "staleness": lambda one, value, to: int(value) if one.get("trainer.v1.trainer_mode") == "separate_async" else None,
    "ratio": lambda one, value, to: max(1.0, int(value) / one.number("rollout_batch_size")),
}


def check_rules(table: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError for a row that names no rule."""
    for key, row in table.items():
        if row.get("rule", "") not in RULES:
            raise UserError(f"{key}: no rule is called {row['rule']!r}")
