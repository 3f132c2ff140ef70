"""Requests to a running `streaming` run to add or remove engines, as files in its folder.

braid workers RUN +2 actor.generate ─▶ RUN/workers/ID.json ─▶ main process: Processes.resize
                                    ◀─ RUN/workers/ID.done ◀─┘
"""

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from braidrl.errors import UserError
from braidrl.runtimes.saving.folders import is_held, run_config

FOLDER = "workers"
ASK_LIMIT_S, ELSEWHERE_LIMIT_S = 60.0, 5.0
"""Seconds to wait for an answer: of a run on this machine, and of one that may be on another machine, or ended."""
LOOK_EVERY_S = 0.1


def ask(run: Path, more: int, group: str, limit_s: float | None = None) -> str:
    """Ask a run for `more` engines of a group, or fewer if it is negative; return its answer.

    Raises UserError if it is no running run of runtime=streaming, refuses, or does not answer within `limit_s` seconds.
    """
    if (runtime := run_config(run).runtime) != "streaming":
        raise UserError(f"{run} has runtime={runtime}: engines join and leave a run of runtime=streaming")
    limit_s = limit_s or (ASK_LIMIT_S if is_held(run) else ELSEWHERE_LIMIT_S)
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    request = folder / f"{time.time_ns()}-{uuid.uuid4().hex}.json"
    unfinished, answer = request.with_suffix(".unfinished"), request.with_suffix(".done")
    unfinished.write_text(json.dumps({"group": group, "more": more}), encoding="utf-8")
    unfinished.replace(request)
    deadline = time.monotonic() + limit_s
    while not answer.is_file():
        if time.monotonic() > deadline:
            request.unlink(missing_ok=True)
            reason = "" if is_held(run) else ", and no process of this machine trains in it"
            raise UserError(
                f"{run} did not answer within {limit_s:g} s{reason}; engines join and leave a run while it runs"
            )
        time.sleep(LOOK_EVERY_S)
    outcome = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if "refused" in outcome:
        raise UserError(outcome["refused"])
    return str(outcome["done"])


def answer_requests(run: Path, resize: Callable[[str, int], str]) -> list[str]:
    """Carry out waiting requests in order; return a line about each that was not refused.

    `resize` returns its outcome as text, or raises UserError.
    """
    lines = list[str]()
    for request in sorted((run / FOLDER).glob("*.json")):
        content = json.loads(request.read_text(encoding="utf-8"))
        try:
            lines.append(resize(content["group"], content["more"]))
            answer = {"done": lines[-1]}
        except UserError as error:
            answer = {"refused": str(error)}
        request.unlink(missing_ok=True)
        unfinished = request.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(answer), encoding="utf-8")
        unfinished.replace(request.with_suffix(".done"))
    return lines
