"""Rules of `braid import-config` for devices, layouts, adapters, engines and trackers."""

from typing import Any

from braidrl.cli.importing.imported import ROLLOUT, Decide, Imported
from braidrl.config import LoraConfig

MODEL = "actor_rollout_ref.model"
TOOL_FORMATS = ("hermes", "llama", "mistral", "deepseek", "glm")
ONE = (("rollout.tensor", 1), ("rollout.pipeline", 1))
"""Braid's defaults that verl writes out."""
TRACKERS = ("wandb", "swanlab", "mlflow", "tensorboard", "trackio")


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
