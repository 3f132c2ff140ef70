"""A streaming run with workers on Ray in a separate process, since Ray allows one cluster per process; it prints a
summary at the end.

python -m tests.runtimes.on_ray CONFIG [GROUP]        kills a worker of the group (-9) while it holds rows
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from braidrl.config import load_config
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.streaming.orders import StreamingBackend
from tests.runtimes.streaming.test_program import kill_when_it_holds_rows


def main(config: str, *groups: str) -> None:
    killed: list[int] = []
    with TrainingRun(load_config(Path(config))) as run:
        program = run.backend
        assert isinstance(program, StreamingBackend)
        killers = [threading.Thread(target=kill_when_it_holds_rows, args=(program, group, killed)) for group in groups]
        for killer in killers:
            killer.start()
        run.train()
        for killer in killers:
            killer.join()
        starts = {member.group.name: member.starts for member in program.processes.members}
        runs = [place.run for place in program.processes.storage_locations.values()]
    print(json.dumps({"starts": starts, "runs": runs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
