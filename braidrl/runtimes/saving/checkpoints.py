"""A run's checkpoints: their content apart from the models, and how they are written, one at a time, checked and
exported.

They are written synchronously, or from copies in a thread while the next steps run:

step N ──copies──▶ thread: write ─▶ sync ─▶ rename ─▶ `latest`
step N + 1 ...         │
step N + 2 ◀──error?───┘

A manifest with the size and SHA-256 of each file is written last, and checked before any file is used. Workers write
their parts in threads too, and report the outcome later:

driver ──save, copy──▶ worker: copies ──▶ thread: writes        the worker trains on
       ──written─────────────────────────▶ trouble, or none
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from safetensors import SafetensorError

from braidrl.cluster.world import World
from braidrl.config import Config
from braidrl.errors import UserError, first_line
from braidrl.flow.selecting import Selection
from braidrl.observe.metrics import whole_file
from braidrl.runtimes.interfaces import Backend, Position, StartedBatch
from braidrl.runtimes.saving.folders import (
    BEST,
    LATEST,
    Best,
    best_checkpoint,
    checkpoint_to_export,
    checkpoints_of,
    latest_checkpoint,
    partial_path,
    read_state,
    sync,
    written_whole,
)
from braidrl.training.roles.checkpoint import BALANCE, DIGESTS, OPTIMIZER, Write
from braidrl.weights.file import digest

FORMAT = 2
LEFT_OUT = "-left-out"
TROUBLES = (OSError, SafetensorError)
"""Errors of a full or missing disk."""
WRITE_LIMIT_S = 3600.0
"""Time limit for one write, to disk or shared memory."""
MANIFEST = "manifest.json"
READERS = 4
"""Number of files read at once; hashing releases the interpreter lock."""


class LostWrite(OSError):
    """A checkpoint is abandoned because a process that wrote it died; the run continues."""


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """Runs writes one after another in a thread; as a context manager it waits for the last."""

    def __init__(self, what: str = "the checkpoint") -> None:
        self._what = what
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=what)
        self._started: Future[Any] | None = None

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def begin(self, parts: Sequence[Write]) -> None:
        """Wait for the previous work, then run the calls in the thread. Raises as `wait` does."""
        self.wait()
        calls = list(parts)
        self._started = self._thread.submit(lambda: [part() for part in calls])

    @property
    def is_running(self) -> bool:
        """Return True while the thread writes."""
        return self._started is not None and not self._started.done()

    def check(self) -> None:
        """Raise, once, the error of the last write; do nothing while the thread still writes."""
        if not self.is_running:
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written. Raises the error of the write, once."""
        if self._started is not None:
            # After an interrupt the next call raises it.
            try:
                error = self._started.exception(WRITE_LIMIT_S)
            except TimeoutError:
                raise TimeoutError(f"{self._what} could not be written within {WRITE_LIMIT_S:g} s") from None
            self._started = None
            if error is not None:
                raise error

    def trouble(self) -> str:
        """Wait, and return the disk error in one line, or an empty string. Raises all other errors."""
        try:
            self.wait()
        except TROUBLES as error:
            return first_line(error)
        return ""


def check_written(trouble: str) -> None:
    """Raise OSError if a worker had a disk error."""
    if trouble:
        raise OSError(trouble)


@dataclass(frozen=True)
class RunState:
    """The run after `step` complete iterations; its tables are the backend's, or files in a checkpoint."""

    step: int
    version: int
    position: Position
    fingerprints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class LoaderForm(TypedDict, total=False):
    """The loader's part of a state, as far as it is checked."""

    admitted: Count
    data: dict[str, Any]


class SamplingForm(TypedDict, total=False):
    """The selection's part of a state, as far as it is checked."""

    target: Count
    epoch_groups: Count
    judged: Count
    admitted: Count
    observed: list[Any]


class StateForm(TypedDict):
    """The keys of `state.json` that every checkpoint has."""

    step: Count
    version: Count
    stages: dict[str, Any]
    fingerprints: dict[str, dict[str, Any]]
    started: list[dict[str, Any]]
    loader: LoaderForm | None
    sampling: SamplingForm | None
    surplus: Count


class Checkpoints:
    """The checkpoints of one rank; the `first` rank writes shared files."""

    def __init__(self, run: Path, config: Config, first: bool) -> None:
        self.run, self.keep_last, self.first = run, config.trainer.keep_checkpoints, first
        self.in_background = config.trainer.checkpoint_async
        self.learning = True
        """False while optimizer steps are skipped: an older checkpoint may be the last one that can be trained on."""
        self.is_lost = False
        """True if the last checkpoint was lost with a process that wrote it."""
        self._writing = BackgroundWriter()
        self._step = 0

    def save(self, state: RunState, backend: Backend[Any], best: tuple[str, float] | None = None) -> None:
        """Write a checkpoint, or start to; `best` is its metric and value if it is the best so far.

        Raises UserError if it, or the previous one, could not be written. Other ranks send their state to the first
        rank, or write their shards into the same folder.
        """
        self.wait()
        self._step, self.is_lost, position = state.step, False, state.position
        path = self.run / "checkpoints" / f"step-{state.step}"
        with self._explained(), ExitStack() as unfinished:
            if self.first:
                unfinished.enter_context(written_whole(path))
            calls = backend.save(partial_path(path), copy=self.in_background)
            tables = {f"surplus-{number}": table for number, table in enumerate(position.surplus)}
            for number, batch in enumerate(position.started):
                tables |= {f"started-{number}": batch.table, f"started-{number}{LEFT_OUT}": batch.left_out}
                tables |= {f"started-{number}-surplus-{n}": surplus for n, surplus in enumerate(batch.after.surplus)}
            for name, table in tables.items():
                backend.save_rows((partial_path(path) if self.first else path) / f"{name}.rows", table)
            if self.first:
                started = [
                    {"iteration": batch.iteration, "outcome": asdict(batch.outcome), "reports": batch.reports}
                    | plain_position(batch.after)
                    for batch in position.started
                ]
                about = {"format": FORMAT, "step": state.step, "version": state.version, "stages": position.stages}
                about |= {"fingerprints": state.fingerprints, "started": started, **plain_position(position)}
                (partial_path(path) / "state.json").write_text(json.dumps(about))
                most_checkpoints = self.keep_last if self.learning else None
                named = Best(path.name, *best) if best else None
                calls = [partial(self._finish, unfinished.pop_all(), path, calls, most_checkpoints, named)]
            if self.in_background:
                self._writing.begin(calls)
            else:
                for call in calls:
                    call()

    def _finish(
        self, unfinished: ExitStack, path: Path, calls: Sequence[Write], keep_last: int | None, best: Best | None
    ) -> None:
        """Run the calls, and point `latest`, and for the best checkpoint `best.json`, to the complete checkpoint.

        Then remove the oldest checkpoints beyond `keep_last`, but never the best. None keeps all.
        """
        with unfinished:
            for call in calls:
                call()
            write_manifest(partial_path(path))
        pointers = {LATEST: f"{path.name}\n"} | ({BEST: json.dumps(asdict(best))} if best else {})
        for pointer, text in pointers.items():
            with whole_file(path.parent / pointer) as moved:
                moved.write_text(text, encoding="utf-8")
                sync(moved)
        checkpoints, best_so_far = checkpoints_of(self.run), best_checkpoint(self.run)
        for old in checkpoints[: checkpoints.index(path) + 1][:-keep_last] if keep_last is not None else ():
            if best_so_far is None or old.name != best_so_far.checkpoint:
                shutil.rmtree(old)

    def wait(self, block: bool = True) -> None:
        """Wait for the background write, unless `block` is False and it still runs. Raises UserError if it failed."""
        with self._explained():
            try:
                self._writing.wait() if block else self._writing.check()
            except LostWrite:
                self.is_lost = True

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise UserError, in one line, for a checkpoint that could not be written."""
        try:
            yield
        except TROUBLES as error:
            before = latest_checkpoint(self.run)
            previous = f"the one before it, {before.name}, is whole" if before else "the run has none before it"
            raise UserError(
                f"the checkpoint of step {self._step} could not be written ({first_line(error)}); {previous}: make "
                f"room, and go on with `braid train --resume {self.run}`"
            ) from error


def plain_position(position: Position) -> dict[str, Any]:
    """Return a position as JSON values, with the number of tables instead of the surplus."""
    return {"loader": position.loader, "sampling": position.sampling, "surplus": len(position.surplus)}


def load_checkpoint(folder: Path) -> RunState:
    """Return the state of a checkpoint. Raises UserError for a folder that is not a checkpoint of this format."""
    state = read_state(folder)
    if state.get("format") != FORMAT:
        raise UserError(f"{folder} has checkpoint format {state.get('format')}; this version reads {FORMAT}")
    try:
        msgspec.convert(state, StateForm)
    except msgspec.ValidationError as error:
        raise UserError(f"{folder / 'state.json'} is no state of a run: {error}; remove this checkpoint") from None
    if folder.name.startswith("step-") and folder.name != f"step-{state['step']}":
        raise UserError(f"{folder / 'state.json'} is the state of step {state['step']}; remove this checkpoint")

    def position(saved: Mapping[str, Any], prefix: str, started: Sequence[StartedBatch] = ()) -> Position:
        surplus = [folder / f"{prefix}surplus-{number}.rows" for number in range(saved["surplus"])]
        return Position(saved["loader"], saved["sampling"], surplus, saved.get("stages", {}), started)

    started = []
    for number, saved in enumerate(state.get("started", [])):
        name = f"started-{number}"
        fields: dict[str, Any] = {n: v if n == "dropped" else tuple(v) for n, v in saved["outcome"].items()}
        table, left_out, outcome = folder / f"{name}.rows", folder / f"{name}{LEFT_OUT}.rows", Selection(**fields)
        after = position(saved, f"{name}-")
        started.append(StartedBatch(saved["iteration"], table, left_out, outcome, saved["reports"], after))
    return RunState(state["step"], state["version"], position(state, "", started), state.get("fingerprints", {}))


def resume_point(run: Path, newest_whole: bool = False, world: World | None = None) -> Path | None:
    """Return the checkpoint to resume from, with each of its files checked; None before the first.

    All ranks of a `world` call this together. If the latest is damaged, `newest_whole` uses the newest complete one;
    otherwise UserError names the command to do so.
    """
    latest = latest_checkpoint(run)
    trouble = checkpoint_damage(latest, world) if latest else ""
    if latest is None or not trouble:
        return latest
    earlier = [checkpoint for checkpoint in reversed(checkpoints_of(run)) if checkpoint != latest]
    intact = next((checkpoint for checkpoint in earlier if not checkpoint_damage(checkpoint, world)), None)
    if intact is None:
        raise UserError(f"{latest}: {trouble}, and no other checkpoint is whole; copy one back, or start a new run")
    if not newest_whole:
        command = f"braid train --resume {run} --newest-whole"
        raise UserError(f"{latest}: {trouble}; {intact.name} is complete, go on from it with `{command}`")
    return intact


def write_manifest(folder: Path) -> None:
    """Write the manifest of a complete folder, with the digests of the ranks that wrote the weights."""
    written: dict[str, list[Any]] = {}
    for path in folder.glob(f"*/{DIGESTS}"):
        written |= {str(Path(path.parent.name, name)): about for name, about in json.loads(path.read_text()).items()}
        path.unlink()
    files = written | digests(folder, [path for path in files_in(folder) if path not in written])
    (folder / MANIFEST).write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1))


def files_in(folder: Path) -> list[str]:
    """Return the paths of all files in a folder except its manifest."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return sorted(str(path.relative_to(folder)) for path in files)


def digests(folder: Path, files: Sequence[str]) -> dict[str, list[Any]]:
    """Return the size in bytes and the SHA-256 of files, by their paths in the folder."""
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(files, readers.map(digest, [folder / file for file in files]), strict=True))


def checkpoint_damage(folder: Path, world: World | None = None) -> str:
    """Return the damage of a checkpoint, with the file's name; empty if each file matches its manifest.

    All ranks of a `world` call this together, and each reads a share of the files.
    """
    world = world or World()
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text())["files"])
        files = files_in(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    try:
        read_here: dict[str, list[Any]] = digests(folder, files[world.rank :: world.size])
    except OSError as error:
        read_here = {str(error.filename): [first_line(error)]}
    digest_of = {
        name: about for part in world.gather("digests of a checkpoint", read_here) for name, about in part.items()
    }
    for name in sorted(manifest | digest_of):
        if name not in digest_of:
            return f"{name} is missing"
        if name not in manifest:
            return f"{name} is not of this checkpoint"
        if digest_of[name] != manifest[name]:
            return f"{name} is not as it was written (its size or its checksum differs)"
    return ""


def export_model(run: Path, folder: Path, role: str | None = None, best: bool = False) -> str:
    """Copy a trained model out of a checkpoint, or out of a run's latest or `best` one, to a new Hugging Face
    directory; describe it in a line.

    `role` is by default the actor, or the only role. Raises UserError if that is not possible.
    """
    checkpoint = checkpoint_to_export(run, best)
    if trouble := checkpoint_damage(checkpoint):
        raise UserError(f"{checkpoint}: {trouble}; nothing was exported, name another checkpoint's folder")
    # Surplus rows written by several workers are folders too.
    roles = sorted(path.parent.name for path in checkpoint.glob("*/config.json"))
    role = role or (roles[0] if len(roles) == 1 else "actor")
    source = checkpoint / role
    if role not in roles:
        raise UserError(f"{checkpoint} holds no role {role!r}, only {', '.join(roles)}; name one by --role")
    if folder.exists():
        raise UserError(f"{folder} exists; nothing was overwritten")
    with written_whole(folder) as copied:
        state = shutil.ignore_patterns(*(f"{stem}*.safetensors*" for stem in (OPTIMIZER, BALANCE)))
        shutil.copytree(source, copied, dirs_exist_ok=True, ignore=state)
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return f"{folder}: {architecture}, {size / 2**20:.1f} MiB of weights, from {checkpoint}"
