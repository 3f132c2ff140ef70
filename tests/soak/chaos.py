"""Runs under random faults: killed and frozen processes, garbage on sockets, damaged checkpoints; `make chaos` prints a
table.

a run ─at a random moment──▶ a fault ──▶ it continues, or ends in a line ──resume─▶ the next fault, two of each kind
    ─▶ the end
           metrics, rows and leftovers are compared with an undisturbed run's

    python -m tests.soak.chaos --faults 20 --seed 3 --runtimes eager distributed streaming stale --file faults.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from braidrl.cluster.watchdog import NEEDED_BY_RAY, descendants, has_ended, name_of
from braidrl.errors import UserError
from braidrl.runtimes.saving.folders import checkpoints_of
from braidrl.runtimes.streaming.resizing import ask
from tests.leftovers import family, open_sockets
from tests.tiny import Workshop, braid, metrics_agree, recorded, sums, write_jsonl, write_model

STEPS, SILENCE_S, LIMIT_S, RESUMES, LOOK_S = 40, 5.0, 240.0, 4, 0.1
TRACEBACK = "Traceback"
STACKS = "import faulthandler, signal; faulthandler.register(signal.SIGUSR2)"
"""A hanging main program dumps its stack."""
OF_EACH = 2
"""Number of faults of each kind per run: a start costs more than all its steps."""
RUNTIMES: dict[str, dict[str, Any]] = {
    "eager": {"rollout": {"engines": 1}},
    "distributed": {"runtime": "distributed", "workers": 2},
    "streaming": {"runtime": "streaming", "streaming": {"workers": {"actor.generate": 2, "actor": 2}}},
    "stale": {"runtime": "streaming", "streaming": {"workers": {"actor.generate": 2}}, "trainer": {"max_staleness": 1}},
    "hybrid": {"runtime": "hybrid", "workers": 2},
    "elastic": {"runtime": "distributed", "workers": 3, "trainer": {"max_restarts": 100}},
    "trainers": {
        "runtime": "streaming",
        "streaming": {"workers": {"actor.generate": 2, "actor": 3}},
        "trainer": {"max_restarts": 100},
    },
}


@dataclass(frozen=True)
class Row:
    """The outcome of one fault."""

    seed: int
    number: int
    runtime: str
    fault: str
    victim: str
    resumes: int
    seconds: float
    trouble: str
    """The violated expectation, or an empty string."""


class Chaos:
    """A workshop, the undisturbed runs, and the random choice of faults."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Work in a folder, and reuse the undisturbed runs of earlier calls in it."""
        data = write_jsonl(folder / "train.jsonl", sums(24))
        self.workshop, self.seed = Workshop(folder, write_model(folder / "model"), data), seed
        self.memory = Path(tempfile.mkdtemp(prefix="memory-", dir=folder))
        os.environ["BRAID_SHARED_MEMORY"] = str(self.memory)

    def config(self, name: str, runtime: str) -> Path:
        trainer = {"steps": STEPS, "checkpoint_every": 2, "deterministic": True, "keep_checkpoints": 3}
        trainer |= RUNTIMES[runtime].get("trainer", {})
        cluster = {"silence_s": SILENCE_S, "wait_limit_s": 60}
        more = {**RUNTIMES[runtime], "trainer": trainer, "cluster": cluster, "dtype": "float64", "trackers": []}
        return self.workshop.config_file(name, **more)

    def run(self, *arguments: Any) -> subprocess.Popen[str]:
        return braid(*arguments, folder=self.workshop.folder, prefix=STACKS)

    def reference(self, runtime: str) -> Path:
        """Return the undisturbed run; it is made once, in one process, for all runtimes that train only current
        rows.
        """
        kind = runtime if "trainer" in RUNTIMES[runtime] else "eager"
        folder = self.workshop.folder / f"quiet-{kind}"
        if not (folder / "report.html").exists():
            shutil.rmtree(folder, ignore_errors=True)
            process = self.run("train", self.config(folder.name, kind))
            _, output = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, output
        return folder

    def one(self, first: int, runtime: str) -> list[Row]:
        """Make a run that meets each kind of fault in a random order, and compare it; a difference counts for each of
        its faults.
        """
        draw, reference = random.Random(f"{self.seed}/{first}"), self.reference(runtime)
        disturbed, met, troubles = Disturbed(self, f"{runtime}-{self.seed}-{first}", runtime), list[Row](), list[str]()
        started = time.monotonic()
        try:
            for fault in draw.sample(list(FAULTS) * OF_EACH, len(FAULTS) * OF_EACH):
                if not disturbed.until(disturbed.moment_for(fault, draw)):
                    break
                time.sleep(draw.random())
                disturbed.look()
                victim, resumes = FAULTS[fault](draw, disturbed.process, disturbed.folder), disturbed.resumes
                met.append(Row(self.seed, first + len(met), runtime, fault, victim, resumes, 0.0, ""))
            disturbed.until(lambda: False)
            troubles += self.compared(disturbed.folder, reference)
        except (subprocess.TimeoutExpired, AssertionError) as error:
            troubles.append(f"hung or ended too soon: {str(error)[:2500]!r}")
        finally:
            disturbed.process.kill()
        trouble = "; ".join([*troubles, *disturbed.troubles, *self.leftovers(disturbed.seen)])
        ends = [*(row.resumes for row in met[1:]), disturbed.resumes]
        seconds = (time.monotonic() - started) / max(1, len(met))
        return [
            replace(row, resumes=end - row.resumes, seconds=seconds, trouble=trouble)
            for row, end in zip(met, ends, strict=bool(met))
        ]

    def compared(self, folder: Path, reference: Path) -> list[str]:
        """Return the differences from the undisturbed run: lines of metrics, rows of each step."""
        troubles = [] if metrics_agree(folder, reference) else ["other metrics"]
        for step in range(1, STEPS + 1):
            if recorded(folder, step).uids() != recorded(reference, step).uids():
                troubles.append(f"other rows in step {step}")
        return troubles

    def leftovers(self, seen: Iterable[int]) -> list[str]:
        """Return the leftovers shortly after the end: processes, shared memory, ports."""
        limit, result = time.monotonic() + 15, ["?"]
        while result and time.monotonic() < limit:
            time.sleep(0.2)
            result = [f"left: {name_of(process)}" for process in seen if not has_ended(process)]
            result += [f"left: {path.name}" for path in self.memory.iterdir() if not path.name.endswith(".owner")]
        return result


class Disturbed:
    """A run that meets faults, and is resumed if it ends early."""

    def __init__(self, chaos: Chaos, name: str, runtime: str) -> None:
        self.chaos, self.folder = chaos, chaos.workshop.folder / name
        self.config = chaos.config(name, runtime)
        self.process = chaos.run("train", self.config)
        self.seen, self.resumes, self.troubles = set[int](), 0, list[str]()
        self.fruitless = 0
        """Number of resumes since the last fault, or since the last step after it."""

    @property
    def steps(self) -> int:
        """Return the number of steps in the metrics."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def look(self) -> None:
        """Record the processes of the run."""
        self.seen |= set(descendants(self.process.pid))

    def moment_for(self, fault: str, draw: random.Random) -> Callable[[], bool]:
        """Return whether it is time for a fault: one or two steps from now, or as soon as the run has been resumed."""
        steps, resumes = max(self.steps + draw.randrange(1, 3), EARLIEST.get(fault, 0)), self.resumes
        soon = draw.random() < 0.5 and fault not in EARLIEST

        def is_time() -> bool:
            there = fault != "damage" or len(checkpoints_of(self.folder)) > 1
            return there and (self.steps >= steps or (soon and self.resumes > resumes))

        return is_time

    def until(self, is_time: Callable[[], bool]) -> bool:
        """Wait for that moment; return False if the run ends first.

        Raises AssertionError if the run hangs or does not make progress.
        """
        limit, steps, self.fruitless = time.monotonic() + LIMIT_S, self.steps, 0
        while not is_time():
            if time.monotonic() > limit:
                os.kill(self.process.pid, signal.SIGUSR2)
                time.sleep(1)
                self.process.kill()
                raise AssertionError(f"it hangs: {self.process.communicate()[1][-2000:]}")
            self.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self.process.wait(LOOK_S) == 0:
                    self.said()
                    return False
                self.fruitless = 0 if self.steps > steps else self.fruitless
                self.resume()
                limit, steps = time.monotonic() + LIMIT_S, self.steps
        return True

    def said(self) -> str:
        """Return the output of a process of the run that has ended; a traceback is a violation."""
        _, output = self.process.communicate(timeout=10)
        self.troubles += [f"a traceback: {output[output.index(TRACEBACK) :][:2000]!r}"] if TRACEBACK in output else []
        return output

    def resume(self) -> None:
        """Resume the run after its end."""
        said = self.said()
        self.resumes, self.fruitless = self.resumes + 1, self.fruitless + 1
        assert self.fruitless <= RESUMES, f"did not come through: {said[-300:]!r}"
        there = (self.folder / "config.yaml").exists()
        again = ("--resume", self.folder, "--newest-whole") if there else (self.config,)
        self.process = self.chaos.run("train", *again)


def victim_of(draw: random.Random, process: subprocess.Popen[str]) -> int:
    """Return a random process of a run, including the main program."""
    return draw.choice(sorted({process.pid, *descendants(process.pid)}))


def called(process: subprocess.Popen[str], victim: int) -> str:
    """Return a name for a process of a run."""
    if victim == process.pid:
        return "main program"
    name, command = name_of(victim), ""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{victim}/cmdline").read_text()
    return "resource tracker" if "resource_tracker" in command else name


def kill(draw: random.Random, process: subprocess.Popen[str], folder: Path) -> str:
    victim = victim_of(draw, process)
    name = called(process, victim)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return name


def freeze(draw: random.Random, process: subprocess.Popen[str], folder: Path) -> str:
    victim = victim_of(draw, process)
    name = called(process, victim)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGSTOP)
        if victim == process.pid:
            time.sleep(8)
            os.kill(victim, signal.SIGCONT)
    return name


def garbage(draw: random.Random, process: subprocess.Popen[str], folder: Path) -> str:
    """Send random bytes to every port of the run."""
    ports = sorted({port for _, port in open_sockets(family(process.pid))})
    for _ in range(300):
        for port in ports:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2) as line:
                line.sendall(draw.choice([b"\x81\x91\x01\x02", draw.randbytes(draw.randrange(1, 2000))]))
    return f"{len(ports)} ports"


def damage(draw: random.Random, process: subprocess.Popen[str], folder: Path) -> str:
    """Kill the run, and corrupt or truncate a file of its newest checkpoint."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    path = draw.choice(sorted(file for file in checkpoints_of(folder)[-1].rglob("*") if file.is_file()))
    content = bytearray(path.read_bytes())
    place = draw.randrange(max(1, len(content) - 64))
    path.write_bytes(content[:place] + (b"" if draw.random() < 0.5 else draw.randbytes(64) + content[place + 64 :]))
    return str(path.relative_to(folder / "checkpoints"))


def full_disk(draw: random.Random, process: subprocess.Popen[str], folder: Path) -> str:
    """Limit the length of files that the run's processes write to a small number of bytes."""
    most = draw.choice([1 << 10, 1 << 14, 1 << 16])
    for victim in (process.pid, *descendants(process.pid)):
        # Ray's own programs do not survive the signal that comes with it.
        if name_of(victim) not in NEEDED_BY_RAY:
            with contextlib.suppress(psutil.Error):
                psutil.Process(victim).rlimit(psutil.RLIMIT_FSIZE, (most, psutil.RLIM_INFINITY))
    return f"files of at most {most} bytes"


def change(draw: random.Random, process: subprocess.Popen[str], folder: Path) -> str:
    """Let an engine join or leave, or kill a rank, which comes back if the run has restarts."""
    names = {victim: name_of(victim) for victim in descendants(process.pid)}
    ranks = sorted(victim for victim, name in names.items() if re.fullmatch(r"rank \d+|actor-\d+", name))
    engines = sorted(victim for victim, name in names.items() if name.startswith("actor.generate"))
    kinds = (["rank"] if ranks else []) + (["join", "leave"] if engines else [])
    if not kinds:
        return "nothing that joins or leaves"
    if (kind := draw.choice(kinds)) == "join":
        with contextlib.suppress(UserError):
            return ask(folder, 1, "actor.generate", limit_s=30)
        return "an engine that may not join"
    victim = draw.choice(ranks if kind == "rank" else engines)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL if kind == "rank" else signal.SIGTERM)
    return f"{names[victim]} leaves"


FAULTS: dict[str, Callable[[random.Random, subprocess.Popen[str], Path], str]] = {
    "kill -9": kill,
    "freeze": freeze,
    "garbage": garbage,
    "damage": damage,
    "full disk": full_disk,
    "join or leave": change,
}
EARLIEST = {"garbage": 1, "damage": 1, "full disk": 1, "join or leave": 1}
"""After this many steps there is something to damage; killed and stopped processes may also be starting."""
DONE_TO = {"kill -9": "Killed", "freeze": "Frozen"}


def table(rows: Iterable[Row]) -> str:
    """Return the faults as a Markdown table."""
    lines = ["| seed | number | runtime | fault | victim | resumed | seconds | violation |", "|" + "---|" * 8]
    lines += [
        f"| {r.seed} | {r.number} | {r.runtime} | {r.fault} | {r.victim} | {r.resumes} | {r.seconds:.0f} | "
        f"{r.trouble} |"
        for r in rows
    ]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Return the number of faults of each kind and runtime, and the number of violations after them."""
    lines = [f"| fault | {' | '.join(RUNTIMES)} | all |", "|" + "---|" * (len(RUNTIMES) + 2)]
    for fault in (*FAULTS, "all"):
        kinds = [row for row in rows if fault in (row.fault, "all")]
        cells = [[row for row in kinds if row.runtime == runtime] for runtime in RUNTIMES] + [kinds]
        counts = [f"{len(cell)}, {sum(bool(row.trouble) for row in cell)} bad" for cell in cells]
        lines.append(f"| {fault} | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def write_summary(page: Path, rows: Sequence[Row]) -> None:
    """Write the number of faults, and of processes killed and frozen, between the page's marks."""
    before, _, rest = page.read_text().partition("<!-- faults -->\n")
    _, _, after = rest.partition("<!-- end -->")
    hit = {did: sorted({row.victim for row in rows if row.fault == fault}) for fault, did in DONE_TO.items()}
    victims = [f"{did}: {', '.join(who)}.\n" for did, who in hit.items() if who]
    lines = [
        f"{len(rows)} faults, each a line of `benchmarks/results/faults.jsonl`:\n",
        summary(rows),
    ]
    page.write_text(f"{before}<!-- faults -->\n" + "\n".join([*lines, "", *victims]) + f"<!-- end -->{after}")


def main() -> None:
    """Inject the faults that the command names, and print a table; exit with 1 after any violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first fault, to continue a seed: a multiple of the faults of a run",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which no further run starts")
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=RUNTIMES)
    parser.add_argument("--folder", type=Path, help="keep this folder; the next call reuses its undisturbed runs")
    parser.add_argument("--file", type=Path, help="append each fault as a line of JSON")
    parser.add_argument("--page", type=Path, help="page whose table of all faults in the file is rewritten")
    given = parser.parse_args()
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="braid-chaos-") as folder:
        chaos = Chaos(given.folder or Path(folder), given.seed)
        started, of_run = time.monotonic(), len(FAULTS) * OF_EACH
        # Each run meets every kind of fault; the seed draws their order, the victims and the moments.
        for number in range(given.first, given.first + given.faults, of_run):
            if time.monotonic() - started > given.seconds:
                break
            made = chaos.one(number, given.runtimes[number // of_run % len(given.runtimes)])
            print("\n".join(table(made).splitlines()[2 if rows else 0 :]), flush=True)
            rows += made
            if given.file:
                with given.file.open("a") as lines:
                    lines.writelines(json.dumps(asdict(row)) + "\n" for row in made)
    seen = [Row(**json.loads(line)) for line in given.file.read_text().splitlines()] if given.file else rows
    bad = sum(bool(row.trouble) for row in rows)
    print(f"\nseed {given.seed}: {bad} of {len(rows)} with a violation\n\n{summary(seen)}")
    if given.page:
        write_summary(given.page, seen)
    raise SystemExit(any(row.trouble for row in rows))


if __name__ == "__main__":
    main()
