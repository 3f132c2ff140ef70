"""The frameworks whose configurations are read: how each is recognised, its table of keys, and its recipe.

a file's keys, a script's command ─▶ Framework ─▶ NAME_keys.yaml, flow, settings that follow from several keys
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from braidrl.cli.import_scripts import COMMAND_LINE
from braidrl.cli.importing.algorithm_rules import loss_alone
from braidrl.cli.importing.areal_rules import AREAL_FLOWS, finish_areal
from braidrl.cli.importing.data_rules import reward_model, rewards_by_source, solution_column
from braidrl.cli.importing.device_rules import workers
from braidrl.cli.importing.imported import Imported
from braidrl.cli.importing.prime_rl_rules import finish_prime
from braidrl.cli.importing.rules import OPENRLHF_FLOWS, SLIME_FLOWS, VERL_FLOWS
from braidrl.cli.importing.step_rules import trl_batch
from braidrl.cli.importing.verl_sft_rules import finish_verl_sft
from braidrl.errors import UserError
from braidrl.parsing import read_yaml

FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True, eq=False)
class Framework:
    """Another framework: its table of keys, and how its configurations are recognised."""

    name: str
    command: re.Pattern[str]
    """The pattern of a command that starts it."""
    marks: frozenset[str] = frozenset()
    """Prefixes of keys, one of which its files have."""
    has_overrides: bool = False
    """True if its command takes `key=value` in place of `--key value`."""
    starts: Callable[[Sequence[str], int], bool] = lambda words, at: True
    """Whether the words of a command, with the one that matched, start it."""
    flow: Callable[[Mapping[str, Any]], str] = lambda given: "grpo"
    """The recipe of a configuration."""
    finish: Callable[[Imported], None] = lambda imported: None
    """Settings that follow from several keys."""

    @cached_property
    def table(self) -> dict[str, dict[str, Any]]:
        table: dict[str, dict[str, Any]] = read_yaml(FOLDER / f"{self.name.lower()}_keys.yaml")
        return table

    @cached_property
    def names(self) -> dict[str, str]:
        """The table's name of each key that other versions call otherwise (`also`)."""
        return {other: key for key, row in self.table.items() for other in row.get("also", ())}

    def row(self, key: str) -> dict[str, Any] | None:
        """Return the row of a key: an exact one, otherwise the first with a matching pattern."""
        if key in self.table:
            return self.table[key]
        if key.endswith("_target_"):
            return {"note": "not needed"}
        return next((row for row_key, row in self.table.items() if "*" in row_key and fnmatchcase(key, row_key)), None)


def verl_flow(keys: Mapping[str, Any]) -> str:
    named = str(keys.get("algorithm.adv_estimator", "gae")).rpartition(".")[2].lower()
    managers = (keys.get("reward_model.reward_manager"), keys.get("reward.reward_manager.name"))
    if named == "grpo" and (keys.get("algorithm.filter_groups.enable") or "dapo" in managers):
        return "dapo"
    return VERL_FLOWS.get(named, "grpo")


def trl_flow(keys: Mapping[str, Any]) -> str:
    words = re.findall(r"grpo|rloo|dpo|sft|reward", str(keys.get(COMMAND_LINE, "")))
    if words:
        return "reward_model" if words[-1] == "reward" else str(words[-1])
    if any(key in keys for key in ("num_generations", "max_completion_length", "reward_funcs", "epsilon")):
        return "grpo"
    if any(key in keys for key in ("beta", "loss_type", "label_smoothing", "precompute_ref_log_probs", "ld_alpha")):
        return "dpo"
    if "center_rewards_coefficient" in keys:
        return "reward_model"
    return "sft"


def openrlhf_flow(keys: Mapping[str, Any]) -> str:
    word = re.search(r"train_(\w+?)(?:_ray)?(?:\.py)?$", str(keys.get(COMMAND_LINE, "")))
    trainer = word[1] if word else "ppo"
    if trainer not in ("sft", "dpo", "rm", "ppo"):
        raise UserError(f"OpenRLHF's train_{trainer} has no counterpart; those of sft, dpo, rm and ppo are read")
    named = {"sft": "sft", "dpo": "dpo", "rm": "reward_model"}.get(trainer)
    return named or OPENRLHF_FLOWS.get(str(keys.get("advantage_estimator", "gae")), "grpo")


def slime_flow(keys: Mapping[str, Any]) -> str:
    if keys.get("loss_type") == "sft_loss":
        return "sft"
    return SLIME_FLOWS.get(str(keys.get("advantage_estimator", "grpo")), "grpo")


def areal_flow(keys: Mapping[str, Any]) -> str:
    if (of_pairs := AREAL_FLOWS.get(str(keys.get("train_dataset.type")))) is not None:
        return of_pairs
    if "gconfig.n_samples" not in keys and "actor.eps_clip" not in keys:
        return "sft"
    if any(key.startswith("critic.") for key in keys):
        return "ppo"
    if keys.get("actor.importance_sampling_level") == "sequence":
        return "gspo"
    if keys.get("actor.overlong_reward_penalty") or keys.get("actor.dynamic_sampling"):
        return "dapo"
    return "rloo" if keys.get("actor.reward_norm.mean_leave1out") else "grpo"


def prime_flow(keys: Mapping[str, Any]) -> str:
    is_supervised = any(re.match(r"data\.(?:name|dataset|source|batch_size|splits)", key) for key in keys)
    return "sft" if is_supervised and "orchestrator.group_size" not in keys else "grpo"


def finish_verl(imported: Imported) -> None:
    if imported.flow == "ppo":
        reward_model(imported, None, "")
    if "workers" not in imported.converted and (count := workers(imported, None, "")):
        imported.converted["workers"] = count
    loss_alone(imported)
    rewards_by_source(imported)


def finish_trl(imported: Imported) -> None:
    trl_batch(imported)
    solution_column(imported)
    if "async" in str(imported.source_keys.get(COMMAND_LINE)):
        imported.advice["runtime"] = (
            "AsyncGRPOTrainer generates beside training: runtime=streaming and trainer.max_staleness"
        )
    if COMMAND_LINE not in imported.source_keys and imported.flow not in ("grpo", "rloo"):
        imported.advice["flow"] = f"{imported.flow} is a guess: a YAML file of TRL does not name its trainer"
    loss_alone(imported)


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(
            "verl-SFT",
            re.compile(r"verl[\w.]*sft_trainer\w*$"),
            frozenset({"model.partial_pretrain"}),
            has_overrides=True,
            flow=lambda given: "sft",
            finish=finish_verl_sft,
        ),
        Framework(
            "verl",
            re.compile(r"verl[\w.]*\.(?:main_(?!eval|generation)\w+|\w*trainer\w*)$|main_(?:ppo|dapo)(?:\.py)?$"),
            frozenset({"actor_rollout_ref.", "algorithm.adv_estimator", "data.train_files"}),
            has_overrides=True,
            flow=verl_flow,
            finish=finish_verl,
        ),
        Framework("OpenRLHF", re.compile(r"openrlhf[\w./]*train_\w+(?:\.py)?$"), flow=openrlhf_flow, finish=loss_alone),
        Framework(
            "slime",
            re.compile(r"(?:^|/)train(?:_async)?\.py$"),
            starts=lambda words, at: not any("launcher" in word for word in words[:at]),
            flow=slime_flow,
        ),
        Framework(
            "prime-rl",
            re.compile(
                r"(?:^|/)(?:rl|sft|trainer|orchestrator)$|prime_rl[\w/.]*(?:rl|train|sft|orchestrator)(?:\.py)?$"
            ),
            frozenset({"orchestrator.", "trainer.", "inference.", "optim.", "rollouts_per_example", "data.", "env"}),
            starts=lambda words, at: any(word.startswith("@") for word in words[at:]),
            flow=prime_flow,
            finish=finish_prime,
        ),
        Framework(
            "TRL",
            re.compile(r"^(?:grpo|rloo|dpo|sft|reward)$|(?:grpo|rloo|dpo|sft|reward)\w*\.py$"),
            frozenset(
                {
                    "model_name_or_path",
                    "per_device_train_batch_size",
                    "num_generations",
                    "max_completion_length",
                    "output_dir",
                    "dataset_name",
                }
            ),
            starts=lambda words, at: (
                "online" not in words[at] and (words[at] not in ("sft", "dpo", "reward") or "trl" in words[:at])
            ),
            flow=trl_flow,
            finish=finish_trl,
        ),
        Framework(
            "AReaL",
            re.compile(r"areal[\w.]*launcher[\w.]*$|\.py$"),
            frozenset({"gconfig.", "allocation_mode", "train_dataset.path", "actor.path"}),
            has_overrides=True,
            flow=areal_flow,
            finish=finish_areal,
        ),
    )
}
