"""The pool: whatever a verifier does costs its own check and nothing else, and no process stays behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from braidrl.config import RewardConfig
from braidrl.rewards.pool import MOST_IN_FLIGHT, CallOutcome, RewardPool
from braidrl.rewards.verifier import Completion, resolve

OWN = str(Path(__file__).with_name("own_verifiers.py"))


def own(function, **settings):
    return resolve(f"{OWN}:{function}", settings)


def completion(response, answer="ok"):
    return Completion("p", response, answer)


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def described(processes):
    """Return the states and commands of the processes that have not ended."""
    results = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                results.append((process.pid, process.ppid(), process.status(), process.cmdline()[:8]))
    return results


def wait_until(holds, seconds=60.0):
    deadline = time.monotonic() + seconds
    # Evaluate the condition once per turn: a moment later it may not hold any more.
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def test_a_verifier_that_hangs_raises_or_exits_fails_only_its_row():
    words = ["ok", "hang", "ok", "raise", "no", "die", "ok", "exit", "spin", "ok"]
    before = children()
    with RewardPool(RewardConfig(processes=2, timeout_s=1.5)) as pool:
        verifier = own("by_word")
        outcomes = [f.result(60) for f in [pool.submit(completion(word), verifier) for word in words]]
    assert [o.failure for o in outcomes] == [
        None,
        "timeout",
        None,
        "exception",
        None,
        "died",
        None,
        "exception",
        "timeout",
        None,
    ]
    assert [o.correct for o in outcomes if o.failure is None] == [True, True, False, True, True]
    assert "ValueError: no such luck (own_verifiers.py:" in outcomes[3].detail
    assert "exit status 3" in outcomes[5].detail and "1.5 s" in outcomes[1].detail
    assert children() <= before


def test_a_process_loads_neither_torch_nor_the_main_script():
    with RewardPool(RewardConfig(processes=1, timeout_s=5)) as pool:
        modules = pool.submit(completion("x"), own("loaded_modules"))
        other = pool.submit(completion(r"\boxed{\frac{2}{4}}", "0.5"), resolve("math"))
        assert modules.result(60) == CallOutcome(score=0.0)
        assert other.result(60) == CallOutcome(correct=True)
        assert pool.submit(completion("x"), own("loaded_modules")).result(60) == CallOutcome(score=0.0)


def test_returns_that_are_no_score_are_failures_that_say_so():
    with RewardPool(RewardConfig(processes=1, timeout_s=5)) as pool:
        names = ("returns_text", "returns_nan", "counts_exactly")
        text, nan, fraction = (pool.submit(completion("x"), own(name)).result(60) for name in names)
    assert text.failure == nan.failure == fraction.failure == "result"
    assert "'x'" in text.detail and "nan" in nan.detail and "Fraction is not JSON" in fraction.detail


def test_all_fields_reach_the_function_and_score_and_correctness_come_back():
    with RewardPool(RewardConfig(processes=1, timeout_s=5)) as pool:
        right = Completion("p", "r", "a", {"level": 3}, "s")
        assert pool.submit(right, own("judged")).result(60) == CallOutcome(score=0.25, correct=True)
        assert pool.submit(completion("r"), own("judged")).result(60).failure == "exception"


def test_a_completion_that_is_not_json_is_refused_when_submitted():
    with RewardPool(RewardConfig(processes=1, timeout_s=5)) as pool:
        with pytest.raises(TypeError, match="set"):
            pool.submit(Completion("p", "r", {1, 2}), own("judged"))
        assert pool.submit(completion("ok"), own("by_word")).result(60).correct


def test_async_calls_wait_together_and_fail_apart(tmp_path):
    words = ["ok"] * 20 + ["raise", "hang", "no"] + ["ok"] * 20
    with RewardPool(RewardConfig(processes=1, timeout_s=2, sandbox="none")) as pool:
        pool.submit(completion("ok"), own("remote")).result(60)
        verifier = own("remote", calls=str(tmp_path / "calls"))
        outcomes = [f.result(60) for f in [pool.submit(completion(word), verifier) for word in words]]
        called = Counter(word for word in (tmp_path / "calls").read_text().split() if word != "hang")
        assert called == Counter(word for word in words if word != "hang"), (
            "none is called again because of one that hangs"
        )
        together = [pool.submit(completion("x"), own("most_together")) for _ in range(8)]
        assert max(f.result(60).score or 0 for f in together) > 1
    assert [o.failure for o in outcomes[20:23]] == ["exception", "timeout", None]
    assert [o.correct for o in outcomes[:20] + outcomes[22:]] == [True] * 20 + [False] + [True] * 20


def test_as_many_async_calls_as_may_run_at_once_all_end_well_in_the_sandbox():
    """The host of so many copies has more open files than one copy may have."""
    with RewardPool(RewardConfig(processes=1, timeout_s=60)) as pool:
        verifier = own("remote", seconds=1.5)
        outcomes = [f.result(120) for f in [pool.submit(completion("ok"), verifier) for _ in range(MOST_IN_FLIGHT)]]
    assert Counter(outcome.failure for outcome in outcomes) == {None: MOST_IN_FLIGHT}


@pytest.mark.parametrize(("word", "failure"), [("block", "timeout"), ("die", "died")])
def test_an_async_call_that_blocks_or_dies_fails_no_other_call(word, failure):
    with RewardPool(RewardConfig(processes=1, timeout_s=1.5)) as pool:
        verifier = own("blocking")
        futures = [pool.submit(completion(w), verifier) for w in ["ok", "ok", word, "no", "ok"]]
        outcomes = [f.result(60) for f in futures]
        assert pool.submit(completion("ok"), verifier).result(60).correct
    assert [o.failure for o in outcomes] == [None, None, failure, None, None]
    assert [o.correct for o in outcomes] == [True, True, None, False, True]


def test_closing_ends_what_is_under_way_and_what_it_started():
    before = children()
    pool = RewardPool(RewardConfig(processes=1, timeout_s=600))
    calls = [pool.submit(completion(word), own("by_word")) for word in ("child", "ok")]
    slow = pool.submit(completion("hang"), own("remote"))
    # Two hosts of three processes, bubblewrap's included, two copies, and the sleeper that one started.
    assert wait_until(lambda: len(children() - before) == 9)
    pool.close()
    assert wait_until(lambda: children() <= before)
    for call in (*calls, slow):
        with pytest.raises(CancelledError):
            call.result(1)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(completion("ok"), own("by_word"))
    pool.close()


SCRIPT = """
import sys, time
print("main", flush=True)
from braidrl.config import RewardConfig
from braidrl.rewards.pool import RewardPool
from braidrl.rewards.verifier import Completion, resolve
with RewardPool(RewardConfig(processes=2, timeout_s=600)) as pool:
    words = ("ok", "hang", "spin")
    futures = [pool.submit(Completion("p", word, "ok"), resolve(sys.argv[1] + ":by_word")) for word in words]
    slow = pool.submit(Completion("p", "hang", "ok"), resolve(sys.argv[1] + ":remote"))
    print(futures[0].result(60).correct, flush=True)
    time.sleep(600)
"""


@pytest.mark.soak
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_run_leaves_no_process(tmp_path, sent):
    """The script has no `if __name__ == "__main__"`: it must run once all the same."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(script), OWN]
    workers = []
    # A suite that runs in the background ignores SIGINT, and so would its children.
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:
        try:
            assert run.stdout is not None
            assert [run.stdout.readline() for _ in range(2)] == ["main\n", "True\n"]
            parent = psutil.Process(run.pid)

            def all_run() -> bool:
                workers[:] = parent.children(recursive=True)
                return len(workers) == 9

            # Two hosts of three processes, bubblewrap's included, and three copies.
            # The host of the async verifier may still start: under load that has taken more than a minute.
            assert wait_until(all_run, 180), described(workers)
            if sent == signal.SIGKILL:  # Those that are stopped at that moment end too.
                for worker in parent.children():
                    worker.suspend()
            run.send_signal(sent)
            run.wait(20)
        finally:
            run.kill()
    assert wait_until(lambda: not described(workers)), described(workers)


def test_without_processes_a_verifier_runs_here_and_fails_only_its_row():
    before = children()
    with RewardPool(RewardConfig(processes=0)) as pool:
        verifier = own("by_word")
        outcomes = [pool.submit(completion(word), verifier).result(0) for word in ("ok", "raise", "no")]
        assert children() <= before
        assert pool.submit(completion(str(os.getpid())), own("runs_in")).result(0).correct
    assert [outcome.failure for outcome in outcomes] == [None, "exception", None]
    assert [outcome.correct for outcome in (outcomes[0], outcomes[2])] == [True, False]


def test_a_verifier_in_the_temporary_folder_itself_is_called() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write("def one(response):\n    return 1.0\n")
        file.flush()
        with RewardPool(RewardConfig(processes=1)) as pool:
            results = pool.submit(Completion("p", "a", "b", {}), resolve(f"{file.name}:one")).result(60)
    assert results.failure is None and results.score == 1.0
