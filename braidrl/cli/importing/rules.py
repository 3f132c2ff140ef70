"""Rules of `braid import-config`: from a value of another framework to values of Braid's keys.

A rule is a function of the import, the value and Braid's key. It returns the value of that key, a `Decide` with advice,
or None, which writes nothing; it may also set keys of the import itself. Each framework has a table of keys, which
names the rules.
"""

from functools import partial

from braidrl.cli.importing.algorithm_rules import (
    aggregate,
    clip,
    correction,
    covariance,
    flow,
    loss,
    loss_kl,
    openrlhf_kl,
    overlong,
    overlong_factor,
    ratio_level,
    slime_kl,
    trl_beta,
    trl_correction,
    trl_loss,
    verl_kl,
)
from braidrl.cli.importing.areal_rules import AREAL_RULES
from braidrl.cli.importing.data_rules import (
    eval_sets,
    mixture,
    named_sets,
    of_source,
    paths,
    reward_functions,
    reward_model,
    served,
    verify,
)
from braidrl.cli.importing.device_rules import (
    OFFLOAD,
    TRACKERS,
    axis,
    lora,
    shard,
    tool_format,
    tracker,
    trackers,
    vllm,
    vllm_more,
    vllm_one,
    workers,
    zero,
)
from braidrl.cli.importing.imported import ACTOR, ROLLOUT, UNSET, Rule
from braidrl.cli.importing.prime_rl_rules import PRIME_RL_RULES
from braidrl.cli.importing.step_rules import (
    beta_of,
    divided,
    epochs,
    optimizer,
    passes,
    schedule,
    score,
    train_batch,
    warmup,
)
from braidrl.cli.importing.verl_sft_rules import VERL_SFT_RULES

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
    **AREAL_RULES,
    **VERL_SFT_RULES,
    **PRIME_RL_RULES,
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
    "at_least_one": lambda imported, value, to: len(value) if isinstance(value, list) else max(1, int(value)),
    "top_k": lambda imported, value, to: int(value) if 0 < int(value) < 10**6 else None,
    "other_model": lambda imported, value, to: value if value != imported.converted.get("model") else None,
    "trl_clip": partial(clip, both="epsilon", low="epsilon", high="epsilon_high"),
    "pair": lambda imported, value, to: imported.converted.update(
        {"algorithm.clip_low": float(value[0]), "algorithm.clip_high": float(value[1])}
    ),
    "loss": loss,
    "entry": lambda imported, value, to: {**imported.converted.get(to, {}), imported.key.rpartition(".")[2]: value},
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
    **{name: partial(axis, name) for name in ("tensor", "pipeline", "sequence", "context", "expert")},
    "at_least_zero": lambda imported, value, to: max(0, int(value)),
    "coefficient": lambda imported, value, to: float(value) or None,
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
