"""Rules of `braid import-config` for the keys of AReaL alone."""

import math
import re
from functools import partial
from typing import Any

from braidrl.cli.importing.algorithm_rules import clip, coefficient_of_kl, loss_alone
from braidrl.cli.importing.device_rules import trackers
from braidrl.cli.importing.imported import Decide, Imported, Rule


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


AREAL_FLOWS = {"dpo": "dpo", "rw": "reward_model"}
"""Recipes of pairs, by the type of a data set."""


def behaviour_cap(imported: Imported, value: Any, to: str) -> Any:
    """Return weights that leave out tokens whose weight is beyond a cap."""
    if imported.get("actor.rejection_sampling.metric", default="ratio") != "ratio":
        return Decide("algorithm.correction: masked or truncated, by token or row")
    return {"name": "masked", "low": 0.0, "high": float(value)} if imported.get("actor.use_decoupled_loss") else None


def decoupled(imported: Imported, value: Any, to: str) -> Any:
    """Return nothing if a cap sets the correction of the engine's log-probs; otherwise ask for one."""
    if value is not True:
        return None
    caps = ("actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap", "actor.rejection_sampling.upper")
    return imported.together.append(to) if imported.get(*caps) else Decide(f"{to}: the weights have no cap; write one")


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
AXES = {"t": "tensor", "p": "pipeline", "c": "context", "s": "context", "e": "expert"}


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
    if imported.flow == "grpo" and not imported.get("actor.reward_norm.mean_level"):
        imported.advice["actor.reward_norm"] = (
            "AReaL subtracts no mean of a group without it, and flow=grpo does; a flow of your own has other advantages"
        )
    if imported.flow in ("sft", *AREAL_FLOWS.values()):
        imported.converted["rollout.samples_per_prompt"] = 1 if imported.flow == "sft" else 2
    elif "reward.verify" not in imported.converted:
        imported.converted["reward.verify"] = "math"
        imported.advice["reward.verify"] = (
            "`math` is written, as AReaL's examples have it; its scripts name the reward: file.py:function, called "
            "with response and answer"
        )


AREAL_RULES: dict[str, Rule] = {
    "areal_clip": partial(clip, both="actor.eps_clip", low="actor.eps_clip", high="actor.eps_clip_higher"),
    "areal_kl": areal_kl,
    "areal_lora": areal_lora,
    "areal_minibatches": areal_minibatches,
    "areal_wandb": areal_wandb,
    "allocation": allocation,
    "behaviour_cap": behaviour_cap,
    "decoupled": decoupled,
    "group_norm": group_norm,
    "offpolicyness": offpolicyness,
}
