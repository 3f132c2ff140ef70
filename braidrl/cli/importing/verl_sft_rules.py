"""Rules of `braid import-config` for the keys of verl's supervised trainer alone."""

from typing import Any

from braidrl.cli.importing.data_rules import of_source
from braidrl.cli.importing.imported import Imported, Rule


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


VERL_SFT_RULES: dict[str, Rule] = {"nested_field": nested_field, "processes": processes, "verl_sft_lora": verl_sft_lora}
