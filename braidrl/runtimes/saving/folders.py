"""The run folder and its checkpoints: written atomically, the last few kept, `latest` moved last."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from braidrl.config import Config, parse_config
from braidrl.config.reading import apply_override
from braidrl.errors import UserError, WorkerError, first_line, no_room
from braidrl.importing import relative_to
from braidrl.observe.metrics import whole_file
from braidrl.parsing import DUMPER, JSON_BYTES, parse_json, parse_yaml, read_bytes, read_text

LATEST, BEST = "latest", "best.json"
MAY_CHANGE = (
    "runtime",
    "workers",
    "placement",
    "cluster",
    "streaming",
    "device",
    "threads",
    "evaluation",
    "data.eval",
    "trackers",
    "trainer.steps",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.max_tokens_per_device",
    "trainer.activation_checkpointing",
    "trainer.layout",
    "trainer.inference_layout",
    "trainer.resident_gib",
    "trainer.learning_rate",
    "trainer.vision_learning_rate",
    "trainer.max_staleness",
    "trainer.skip_bad_updates",
    "trainer.max_skipped_updates",
    "trainer.accept_changes",
    "rollout.engine",
    "rollout.engines",
    "rollout.reproducible",
    "rollout.servers",
    "rollout.slots",
    "rollout.tensor",
    "rollout.pipeline",
    "rollout.nodes",
    "rollout.grouping",
    "rollout.vllm",
    "reward.processes",
    "reward.timeout_s",
    "reward.max_abs",
    "reward.max_failed_fraction",
    "reward.max_failed_steps",
    "reward.sandbox",
    "rollout.environment.sandbox",
)
"""Keys, or sections, that may change in a resumed run; all others belong to the trained state."""
BEFORE_THE_FIRST_STEP = ("config.yaml", "metrics.jsonl", "report.html", "trace", "tensorboard", "wandb", "swanlab")
"""Files that a run's folder may hold after a refusal before its first step."""
ENDING_S = 3.0
"""Time limit for the children of a killed run to end, and with them the lock on the run's folder."""


def write_config(folder: Path, config: Config) -> None:
    """Write the resolved configuration of a run atomically."""
    text = yaml.dump(absolute(config).model_dump(mode="json"), Dumper=DUMPER, sort_keys=False)
    with whole_file(folder / "config.yaml") as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def with_changes(folder: Path, config: Config) -> list[str]:
    """Write a resumed run's configuration; return a line per changed key, and a line that names the file with the
    former configuration.
    """
    path = folder / "config.yaml"
    former = next(folder / f"config.{n}.yaml" for n in count(1) if not (folder / f"config.{n}.yaml").exists())
    before = flat(parse_yaml(read_text(path), "its text"))
    path.replace(former)
    write_config(folder, config)
    after = flat(parse_yaml(read_text(path), "its text"))
    changed = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
    lines = [f"{key}={new} from here on, before {old}" for key, (old, new) in changed.items() if old != new]
    if not lines:
        former.unlink()
        return []
    return [*lines, f"the configuration before is kept in {former}"]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their dotted keys."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + name: value}
    return values


def new_run_folder(config: Config) -> Path:
    """Make the run's folder with the resolved configuration.

    Raises UserError if a run has started there, or it cannot be written.
    """
    folder = config.output / config.name if config.name else None
    if folder and folder.exists():
        # A run that was refused before its first step leaves only these files.
        metrics = folder / "metrics.jsonl"
        empty = not metrics.exists() or not metrics.stat().st_size
        if not (folder.is_dir() and empty and all(path.name in BEFORE_THE_FIRST_STEP for path in folder.iterdir())):
            raise UserError(f"{folder} exists; resume it with `--resume {folder}` or set another `name`")
    folder = folder or unused_folder(config)
    with named_output(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, config)
    return folder


@contextmanager
def named_output(folder: Path) -> Iterator[None]:
    """Raise UserError that names `output` if `folder` cannot be written; an existing folder stays an OSError."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written ({error.strerror}); set another `output`") from error


def check_output(config: Config) -> None:
    """Raise UserError if a run's folder cannot be created; writes nothing."""
    folder = config.output.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(
            f"output: {config.output} cannot be written: {folder} is no folder to write to; set another `output`"
        )


def absolute(value: Any) -> Any:
    """Return a configuration, or a part of it, with absolute paths, so that a run can resume from any folder."""
    match value:
        case BaseModel():
            return value.model_copy(update={name: absolute(part) for name, part in value})
        case dict():
            return {name: absolute(part) for name, part in value.items()}
        case list() | tuple():
            return type(value)(absolute(part) for part in value)
        case Path():
            return value.expanduser().absolute()
        case str():
            is_flow = value.endswith((".yaml", ".yml")) and Path(value).is_file()
            return str(Path(value).absolute()) if is_flow else relative_to(Path.cwd(), value)
    return value


def unused_folder(config: Config) -> Path:
    """Make a folder named by the flow and the time; of two runs in the same second the later one gets a number.

    Raises UserError if that fails.
    """
    name = f"{Path(config.flow).stem.replace(':', '-')}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = config.output / name, 1
    while True:
        try:
            with named_output(config.output):
                folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = config.output / f"{name}-{number}"


def identity(folder: Path) -> tuple[int, int] | None:
    """Return an identity of a folder that differs if the folder is replaced; None if it is missing."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def held_alone(run: Path) -> Iterator[None]:
    """Lock a run's folder until this process and its children end.

    Raises UserError if another process has locked it.
    """
    handle, limit = os.open(run, os.O_RDONLY), time.monotonic() + ENDING_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise UserError(
                        f"{run} is being trained by another process; wait until that has ended, or end it"
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                # Some network file systems have no such locks.
                if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                    raise
                break
        yield
    finally:
        os.close(handle)


@contextmanager
def full_disk_named(run: Path) -> Iterator[None]:
    """Raise UserError that names the run's folder if a write fails because the disk is full."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, WorkerError) or not (full := no_room(error, run)):
            raise
        raise UserError(f"{run}: {full}") from error


def is_held(run: Path) -> bool:
    """Return True if a process trains in a run's folder, or if its file system has no locks."""
    handle = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def run_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a run's folder, for a resumed run with dotted overrides `key=value`.

    Raises UserError if the folder is no run, its configuration is damaged, or an override changes the trained state.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: it has no config.yaml")
    try:
        tree = dict(parse_yaml(read_text(path), "its text"))
    except (UserError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({first_line(error)}); write it again, or start a new run with the same settings"
        ) from error
    config = parse_config(tree)
    for override in overrides:
        key = override.partition("=")[0]
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE):
            raise UserError(
                f"{key} cannot change in a resumed run, only {', '.join(MAY_CHANGE)}; for another {key} begin a new "
                f"run with model={(latest_checkpoint(folder) or folder / 'checkpoints' / 'step-N') / 'actor'}"
            )
        apply_override(tree, override)
    return parse_config(tree) if overrides else config


def partial_path(path: Path) -> Path:
    """Return the temporary path of a folder while it is being written."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill.

    At the end it is synced to disk and moved to `path`; after an error it is removed.
    """
    partial = partial_path(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        # Several threads wait for the disk.
        with ThreadPoolExecutor() as waiting:
            list(waiting.map(sync, filter(Path.is_file, partial.rglob("*"))))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file or folder to disk; this detects a full disk at the latest."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoints_of(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    numbered = {path.name.removeprefix("step-"): path for path in (run / "checkpoints").glob("step-*")}
    return [numbered[number] for number in sorted(filter(str.isdecimal, numbered), key=int)]


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None before the first.

    Raises UserError if `latest` is not one of them.
    """
    pointer, checkpoints = run / "checkpoints" / LATEST, checkpoints_of(run)
    if not pointer.is_file():
        # A run killed just before it wrote its first `latest` still has a checkpoint.
        return checkpoints[-1] if checkpoints else None
    named = pointer.read_bytes().decode(errors="replace").strip()
    latest = next((path for path in checkpoints if path.name == named), None)
    if latest is None:
        there = (
            f"write {checkpoints[-1].name} into it" if checkpoints else "copy its checkpoints back, or start a new run"
        )
        raise UserError(f"{pointer} names {named!r}, which is no checkpoint of this run; {there}")
    return latest


@dataclass(frozen=True)
class Best:
    """The checkpoint of a run with the highest value of an evaluation metric."""

    checkpoint: str
    metric: str
    value: float


def best_checkpoint(run: Path) -> Best | None:
    """Return the best checkpoint of a run, or None if it keeps none. Raises UserError for a damaged `best.json`."""
    path = run / "checkpoints" / BEST
    if not path.is_file():
        return None
    try:
        return Best(**parse_json(read_bytes(path, JSON_BYTES)))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}); remove it") from error


def checkpoint_to_export(run: Path, best: bool = False) -> Path:
    """Return the latest checkpoint of a run or its `best` one; of a checkpoint's folder, the folder itself.

    Raises UserError if there is none.
    """
    best_known = best_checkpoint(run) if best else None
    if best and best_known is None:
        raise UserError(f"{run} keeps no best checkpoint; name the metric by evaluation.best, as in eval/test/avg@8")
    newest = run / "checkpoints" / best_known.checkpoint if best_known else latest_checkpoint(run)
    checkpoint = run if (run / "state.json").is_file() else newest
    if checkpoint is None:
        raise UserError(f"{run} has no checkpoint yet; train it first, or set trainer.checkpoint_every")
    return checkpoint


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the run state of a checkpoint. Raises UserError for a folder that is not a checkpoint."""
    path = checkpoint / "state.json"
    if not path.is_file():
        raise UserError(f"{checkpoint} is no checkpoint: it has no state.json")
    try:
        state: dict[str, Any] = dict(parse_json(read_bytes(path, JSON_BYTES), finite=False))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}") from error
    return state
