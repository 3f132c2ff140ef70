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

FOLDER = "workers"
ASK_LIMIT_S = 60.0
LOOK_EVERY_S = 0.1


def ask(run: Path, more: int, group: str, limit_s: float = ASK_LIMIT_S) -> str:
    """Ask a run for `more` engines of a group, or fewer if it is negative; return its answer.

    Raises UserError if the run refuses, or does not answer within `limit_s` seconds.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not the folder of a run: it has no config.yaml")
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
            raise UserError(
                f"{run} did not answer within {limit_s:g} s; engines join and leave a run of runtime=streaming that is "
                "running"
            )
        time.sleep(LOOK_EVERY_S)
    told = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if "refused" in told:
        raise UserError(told["refused"])
    return str(told["done"])


def answer_requests(run: Path, resize: Callable[[str, int], str]) -> None:
    """Carry out waiting requests in order; `resize` returns its outcome as text, or raises UserError."""
    for request in sorted((run / FOLDER).glob("*.json")):
        content = json.loads(request.read_text(encoding="utf-8"))
        try:
            answer = {"done": resize(content["group"], content["more"])}
        except UserError as error:
            answer = {"refused": str(error)}
        request.unlink(missing_ok=True)
        unfinished = request.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(answer), encoding="utf-8")
        unfinished.replace(request.with_suffix(".done"))
