"""An engine that loses a process fails as a whole: pending calls name the process, and new processes replace it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.engine import EngineError
from braidrl.engines.engine_contract import EngineUnderTest, all_of, requests
from braidrl.engines.engine_process import EngineProcess
from braidrl.engines.requests import Response
from braidrl.engines.routing.router import EngineService
from braidrl.errors import UserError
from braidrl.weights.publisher import ModelWeights
from tests.engines.served import LIMIT, served_model, spec, write_served_model
from tests.engines.tiny import END, make_tokenizer
from tests.tiny import ROOT

MODEL = served_model()
LIMIT_S = 120.0
WAIT_S = 8.0
"""Seconds that the processes of an engine wait for each other."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("divided") / "model")


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[EngineService]:
    """Return two engines of two processes each, with the weights of version 4."""
    divided = spec("tensor-parallel", model)
    engines = [EngineProcess(divided, f"engine {number}", limit_s=LIMIT_S) for number in range(2)]
    service = EngineService(engines, limit_s=LIMIT_S)
    service.publish(4, ModelWeights(MODEL))
    yield service
    service.close()


def members(engine: EngineProcess) -> list[psutil.Process]:
    leader = psutil.Process(engine.pid)
    return [leader, *leader.children()]


def subject(service: EngineService) -> EngineUnderTest:
    return EngineUnderTest(lambda: service.router, END, LIMIT, lambda asked, finished: [], lambda: ModelWeights(MODEL))


@pytest.mark.parametrize("lost", [0, 1], ids=["leader", "follower"])
def test_rows_of_an_engine_that_lost_a_process_move_and_it_recovers(service: EngineService, lost: int) -> None:
    dying, answered = service.engines[0], []
    assert isinstance(dying, EngineProcess)
    before = members(dying)
    assert len(before) == 2
    # Different lengths, so that both engines still have rows when the first rows end.
    wanted = [
        replace(request, sampling=replace(request.sampling, max_tokens=5 + 7 * number % 40))
        for number, request in enumerate(requests(subject(service), 40))
    ]

    def kill(finished: Response) -> None:
        answered.append(finished.uid)
        if len(answered) == 3:
            before[lost].kill()

    finished = service.generate(wanted, kill)
    assert sorted(answered) == [row.uid for row in wanted], "every row exactly once"
    whole = EmbeddedEngine(MODEL, make_tokenizer(), 16, LIMIT).generate(wanted)
    assert [row.tokens.tolist() for row in finished] == [row.tokens.tolist() for row in whole]
    assert service.run(lambda router: router.recover()) == 4 and len(service.router.alive) == 2
    psutil.wait_procs(before, timeout=LIMIT_S)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in before)
    (again,) = service.run(lambda _: all_of(dying, wanted[:1]))
    assert set(again.versions.tolist()) == {4} and again.tokens.tolist() == whole[0].tokens.tolist()


def test_a_call_waiting_for_a_lost_follower_names_it(service: EngineService) -> None:
    engine = service.engines[1]
    assert isinstance(engine, EngineProcess)
    _, follower = members(engine)
    (request, *_) = requests(subject(service), 1)
    follower.kill()
    ended = rf"engine 1: follower 1 \(process {follower.pid}\) ended; its exit status is -9"
    for _ in range(2):
        with pytest.raises(EngineError, match=ended):
            service.run(lambda _: engine.submit(request))
    assert service.run(lambda _: engine.recover()) == -1, "fresh processes, with the weights of the folder"
    service.publish(4, ModelWeights(MODEL))


@pytest.mark.soak
def test_a_silent_follower_is_waited_for_until_the_limit(model: Path) -> None:
    """At twice this limit the run would also give up the leader, without knowing the process that the leader waits for."""
    engine = EngineProcess(replace(spec("tensor-parallel", model), limit_s=2 * WAIT_S), limit_s=LIMIT_S)
    service = EngineService([engine], limit_s=LIMIT_S)
    with closing(service):
        (request, *_) = requests(subject(service), 1)
        _, follower = members(engine)
        follower.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(EngineError, match=rf"follower 1 \(process {follower.pid}\) was waited for"):
            service.run(lambda _: engine.submit(request))
        assert WAIT_S <= time.monotonic() - begun < LIMIT_S


def test_processes_end_with_the_run_however_it_ends(model: Path) -> None:
    program = f"""
import asyncio, sys, time
from pathlib import Path
from braidrl.engines.engine_process import EngineProcess
from tests.engines.served import spec
async def main():
    engine = EngineProcess(spec("tensor-parallel", Path({str(model)!r})))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert run.stdout is not None
    leader = psutil.Process(int(run.stdout.readline()))
    processes = [leader, *leader.children()]
    run.kill()
    run.wait()
    run.stdout.close()
    assert len(processes) == 2 and not psutil.wait_procs(processes, timeout=LIMIT_S)[1]


def test_a_model_with_an_indivisible_size_is_a_user_error(model: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.tensor=3 does not divide the model's 4 attention heads"):
        EngineService([EngineProcess(replace(spec("embedded", model), tensor=3))])
