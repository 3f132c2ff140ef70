"""Rules of `braid import-config` for the keys of prime-rl alone."""

import re
from typing import Any

from braidrl.cli.importing.areal_rules import offpolicyness
from braidrl.cli.importing.imported import Imported, Rule


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


PRIME_RL_RULES: dict[str, Rule] = {
    "prime_batch": prime_batch,
    "prime_lora": prime_lora,
    "environment": environment,
    "environment_argument": environment_argument,
    "async_level": async_level,
}
