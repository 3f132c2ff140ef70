"""Rules of `braid import-config` for steps, batches, optimizers and learning rates."""

from pathlib import Path
from typing import Any

from braidrl.cli.importing.imported import MOST_COUNTED, Decide, Imported

OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "sgd": "sgd",
}


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
