"""Engines join and leave a run while it runs, and its result stays the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from braidrl.cli.commands import app
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.saving.folders import held_alone
from braidrl.runtimes.streaming import resizing
from braidrl.runtimes.streaming.orders import StreamingBackend
from tests.runtimes.streaming.test_program import assert_same, in_process, nothing_is_left, sections_of
from tests.tiny import Workshop, sums, write_jsonl, write_model

__all__ = ["nothing_is_left"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("resizing")
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(24)))


@pytest.fixture
def asked() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs requests beside a run, and raises their error at the end of the test."""
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []

    def start(requests: Callable[[], None]) -> None:
        def run() -> None:
            try:
                requests()
            except BaseException as error:
                failures.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_a_run_with_a_join_a_leave_and_a_preemption_equals_an_undisturbed_one(
    workshop: Workshop, asked: Callable[[Callable[[], None]], None]
) -> None:
    group, counts = "actor.generate", list[int]()
    with in_process(workshop, "resized", **sections_of("grpo", steps=6)) as run:
        backend = run.backend
        assert isinstance(backend, StreamingBackend)

        def engines() -> int:
            with backend.control.changed:
                counts.append(len(backend.control.loading.engines))
                return counts[-1]

        def wait_for(count: int) -> None:
            limit = time.monotonic() + 60
            while engines() != count:
                assert time.monotonic() < limit, f"the run has ended, or still has no {count} engines"
                time.sleep(0.02)

        def resize() -> None:
            with pytest.raises(UserError, match=r"actor.generate has 1 engine, .*needs 1"):
                resizing.ask(run.folder, -1, group)
            with pytest.raises(UserError, match=r"no group 'actor.generat'.*actor.generate"):
                resizing.ask(run.folder, 1, "actor.generat")
            assert "2 engines join; actor.generate then has 3 engines" in resizing.ask(run.folder, 2, group)
            wait_for(3)
            # The one that was there first leaves by a signal, as a scheduler sends it.
            os.kill(backend.processes.workers_of(group)[0][0].process.pid, signal.SIGTERM)
            wait_for(2)
            assert "1 engine leaves; actor.generate then has 1 engine" in resizing.ask(run.folder, -1, group)
            wait_for(1)

        asked(resize)
        run.train()
    assert max(counts) == 3 and counts[-1] == 1
    assert {line["streaming/workers/actor.generate"] for line in read_metrics(run.folder)} & {1, 2, 3}
    assert_same(workshop.run("eager", **sections_of("grpo", steps=6)), run.folder)


@pytest.mark.parametrize("more", ["+2", "-1"])
def test_the_command_takes_a_sign_and_names_what_is_no_run(tmp_path: Path, more: str) -> None:
    ended = CliRunner().invoke(app, ["workers", str(tmp_path), more, "actor.generate"])
    assert isinstance(ended.exception, UserError) and "config.yaml" in str(ended.exception), ended.output


def test_a_folder_without_a_running_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml"):
        resizing.ask(tmp_path, 1, "actor.generate")
    settings = "{flow: grpo, model: none, data: {train: none.jsonl}, reward: {verify: exact}, runtime: RUNTIME}"
    (tmp_path / "config.yaml").write_text(settings.replace("RUNTIME", "eager"))
    with pytest.raises(UserError, match=r"has runtime=eager"):
        resizing.ask(tmp_path, 1, "actor.generate")
    (tmp_path / "config.yaml").write_text(settings.replace("RUNTIME", "streaming"))
    with pytest.raises(UserError, match=r"within 0\.2 s, and no process of this machine trains in it"):
        resizing.ask(tmp_path, 1, "actor.generate", limit_s=0.2)
    assert not list((tmp_path / resizing.FOLDER).iterdir())
    with held_alone(tmp_path), pytest.raises(UserError, match=r"did not answer within 0\.2 s;"):
        resizing.ask(tmp_path, 1, "actor.generate", limit_s=0.2)
