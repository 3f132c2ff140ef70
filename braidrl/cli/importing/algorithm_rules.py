"""Rules of `braid import-config` for flows, losses, clipping, KL and corrections."""

from collections.abc import Callable, Mapping
from typing import Any

from braidrl.cli.importing.imported import ACTOR, Decide, Imported

POLICY_LOSS = f"{ACTOR}.policy_loss"
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
HAVE_KL_IN_REWARD = ("ppo", "rloo", "reinforce_plus_plus")
TRL_CAP = "vllm_importance_sampling_clip_max"
BASELINES = ("reinforce_baseline", "reinforce_plus_plus_baseline")
"""Names of REINFORCE++ with the mean reward of a prompt's samples as its baseline."""


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


def verl_correction(imported: Imported, value: Any, to: str) -> Any:
    """Return the importance weights of verl, whose threshold has no effect without `rollout_is`."""
    section = "algorithm.rollout_correction"
    return correction(imported, imported.get(f"{section}.rollout_is"), to, f"{section}.rollout_is_threshold")


def trl_correction(imported: Imported, value: Any, to: str) -> Any:
    cap = "vllm_importance_sampling_cap" if imported.get("vllm_importance_sampling_cap") else TRL_CAP
    return correction(imported, value, to, cap, "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min")
