"""Export of a trained model: the checkpoint's Hugging Face directory without the optimizer."""

import shutil
from pathlib import Path

from braidrl.errors import UserError
from braidrl.runtimes.saving.checkpoints import checkpoint_damage
from braidrl.runtimes.saving.folders import latest_checkpoint, whole_folder
from braidrl.training.roles.checkpoint import OPTIMIZER, PARTS, describe_worker


def export_model(run: Path, folder: Path, role: str | None = None) -> str:
    """Copy a trained model out of a run.

    Args:
        run: The run's folder (its latest checkpoint is used), or a checkpoint's folder.
        folder: Destination of the Hugging Face directory; it must not exist.
        role: The role; by default the actor, or the only role.

    Returns:
        A line about what was copied.

    Raises:
        UserError: There is no such model, the checkpoint is damaged, or the folder exists.
    """
    checkpoint = run if (run / "state.json").is_file() else latest_checkpoint(run)
    if checkpoint is None:
        raise UserError(f"{run} has no checkpoint yet; train it first, or set trainer.checkpoint_every")
    trouble = checkpoint_damage(checkpoint)
    if trouble:
        raise UserError(f"{checkpoint}: {trouble}; nothing was exported, name another checkpoint's folder")
    roles = sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
    role = role or (roles[0] if len(roles) == 1 else "actor")
    source = checkpoint / role
    if role not in roles:
        raise UserError(f"{checkpoint} holds no role {role!r}, only {', '.join(roles)}; name one by --role")
    if folder.exists():
        raise UserError(f"{folder} exists; nothing was overwritten")
    with whole_folder(folder) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(OPTIMIZER, PARTS))
    return f"{folder}: {describe_worker(folder)}, from {checkpoint}"
