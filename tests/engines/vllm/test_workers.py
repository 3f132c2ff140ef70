"""vLLM with its model divided between two worker processes: the contract, weights that each worker takes its part of,
and their ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import torch

from braidrl.cluster.world import Ranks
from braidrl.engines import engine_contract as contract
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.engine import EngineError
from braidrl.engines.engine_contract import EngineUnderTest, all_of, requests
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.training.loading import load_decoder
from braidrl.weights.collective import WeightOffer
from braidrl.weights.publisher import ModelWeights
from braidrl.weights.shards import snapshot, weight_parts
from tests.engines.served import (
    LIMIT,
    LONG_OF_SLOW,
    Served,
    largest_gap,
    other_weights,
    served_model,
    write_served_model,
)
from tests.engines.tiny import END, make_tokenizer, training_log_probs
from tests.engines.vllm.hosted_runs import ENVIRONMENT, vllm_interpreter
from tests.tiny import ROOT
from tests.training.decoders.families import write_family
from tests.training.decoders.test_families import ON_VLLM

# Three processes of vLLM start, on a busy machine for minutes.
pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]
MODEL = served_model()
# Checks that depend on the computing process; another test compares log-probs with training's.
CHECKS = (
    contract.every_request_is_answered_once_with_what_it_asked_for,
    contract.abort_gives_what_there_is,
    contract.new_weights_draw_the_tokens_after_them,
    contract.weights_that_lack_a_tensor_are_refused,
)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_served_model(tmp_path_factory.mktemp("served") / "model")
    divided = Served("vllm", model, limit_s=500.0, tensor=2)
    yield divided
    divided.close()


def in_training(asked: Sequence[Request], finished: Sequence[Response]) -> list[torch.Tensor]:
    return training_log_probs(MODEL, list(asked), list(finished))


def subject(divided: Served) -> EngineUnderTest:
    return EngineUnderTest(lambda: divided.engine, END, LIMIT, in_training, other_weights, long=LONG_OF_SLOW)


def workers_of(divided: Served) -> list[psutil.Process]:
    """The processes that hold parts of the model."""
    result = [
        child
        for child in psutil.Process(divided.engine.pid).children(recursive=True)
        if b"Worker_TP" in command_of(child)
    ]
    assert len(result) == 2, result
    return result


def command_of(process: psutil.Process) -> bytes:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes()


def all_gone(processes: Sequence[psutil.Process], limit_s: float = 30.0) -> bool:
    end = time.monotonic() + limit_s
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        if time.monotonic() > end:
            return False
        with suppress(psutil.NoSuchProcess):
            time.sleep(0.1)
    return True


@pytest.mark.parametrize("checks", [CHECKS, pytest.param(contract.CHECKS, marks=pytest.mark.soak)], ids=["some", "all"])
def test_two_workers_keep_the_contract(
    divided: Served, checks: Sequence[Callable[[EngineUnderTest], Awaitable[None]]]
) -> None:
    for check in checks:
        divided.run(divided.engine.update_weights(0, ModelWeights(MODEL)))
        divided.run(check(subject(divided)))  # type: ignore[arg-type]


def test_two_workers_draw_one_engines_tokens_with_the_trainers_log_probs(
    divided: Served,
) -> None:
    submitted = requests(subject(divided), 8)
    divided.run(divided.engine.update_weights(0, ModelWeights(MODEL)))
    finished = divided.run(all_of(divided.engine, submitted))
    alone = EmbeddedEngine(MODEL, make_tokenizer(), Decoding(16, LIMIT)).generate(submitted)
    assert [row.tokens.tolist() for row in finished] == [row.tokens.tolist() for row in alone]
    assert divided.run(largest_gap(divided.engine, submitted[:4], updates=20)) < 1e-5


@pytest.mark.parametrize(
    ("family", "inner"), [("qwen3_moe", "moe_intermediate_size"), ("gpt_oss", "intermediate_size")]
)
def test_two_workers_receive_their_slices_of_each_expert(tmp_path: Path, family: str, inner: str) -> None:
    folder = write_family(tmp_path / "model", family, **ON_VLLM[family], **{inner: 64})
    trained = load_decoder(str(folder), torch.float32, "cpu").requires_grad_(False).eval()
    prompts = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(3))
    submitted = [Request((0, n, 0), prompt, SamplingParams(max_tokens=24)) for n, prompt in enumerate(prompts)]
    sizes = {"all": sum(p.nbytes for p in trained.parameters())}
    sizes["experts"] = sum(p.nbytes for name, p in trained.named_parameters() if ".experts." in name)
    with (
        closing(Served("vllm", folder, limit_s=500.0, tensor=2)) as served,
        closing(WeightOffer(Ranks(), "127.0.0.1", 60.0, torch.device("cpu"))) as offer,
    ):
        for version in range(1, 3):
            for parameter in trained.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape))
            before = offer.sent_bytes
            served.run(served.engine.update_weights(version, offer.keep(version, snapshot(weight_parts(trained)))))
            sent = offer.sent_bytes - before
            finished = served.run(all_of(served.engine, submitted))
            for response, expected in zip(finished, training_log_probs(trained, submitted, finished), strict=True):
                torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-5)
            print(f"sent {sent} bytes of {sizes}")
            assert sent < 2 * sizes["all"] - 0.9 * sizes["experts"], "whole experts went to both workers"


@pytest.mark.soak
def test_an_engine_with_a_killed_worker_fails_and_recovers_completely(divided: Served) -> None:
    engine, (request, *_) = divided.engine, requests(subject(divided), 1)
    divided.run(engine.update_weights(0, ModelWeights(MODEL)))
    before, first = workers_of(divided), divided.run(engine.submit(request))
    os.kill(before[1].pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        divided.run(engine.submit(request))
    assert divided.run(engine.recover()) == -1
    assert all_gone(before)
    divided.run(engine.update_weights(5, ModelWeights(MODEL)))
    again = divided.run(engine.submit(request))
    assert again.tokens.tolist() == first.tokens.tolist() and set(again.versions.tolist()) == {5}


@pytest.mark.soak
def test_an_engine_whose_transfer_failed_is_given_weights_again_without_a_restart(divided: Served) -> None:
    engine, (request, *_) = divided.engine, requests(subject(divided), 1)
    divided.run(engine.update_weights(0, ModelWeights(MODEL)))
    first, pid = divided.run(engine.submit(request)), engine.pid
    with closing(WeightOffer(Ranks(), "127.0.0.1", 60.0, torch.device("cpu"))) as offer:
        with pytest.raises(EngineError, match="have changed since that version"):
            divided.run(engine.update_weights(6, offer.keep(6, weight_parts(MODEL), lambda: False)))
        assert divided.run(engine.recover()) == -1 and engine.pid == pid
        divided.run(engine.update_weights(7, offer.keep(7, weight_parts(MODEL))))
    again = divided.run(engine.submit(request))
    assert again.tokens.tolist() == first.tokens.tolist() and set(again.versions.tolist()) == {7}


def test_workers_end_with_the_process_that_schedules_for_them(divided: Served) -> None:
    workers, (request, *_) = workers_of(divided), requests(subject(divided), 1)
    assert divided.engine.pid is not None
    os.kill(divided.engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended; its exit status is -9"):
        divided.run(divided.engine.submit(request))
    assert all_gone(workers)


def test_stop_texts_within_a_step_end_rows_and_partial_updates_are_refused() -> None:
    command = [vllm_interpreter(), "-m", "tests.engines.vllm.edges"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_rows_that_begin_by_their_expected_length_are_not_preempted(tmp_path: Path) -> None:
    model, result = write_served_model(tmp_path / "model"), []
    for ways in ([], ["adapts"]):
        path = tmp_path / "found.json"
        command = [vllm_interpreter(), "-m", "tests.engines.vllm.preemptions", str(model), str(path), *ways]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        result.append(json.loads(path.read_text()))
        print(ways, {name: value for name, value in result[-1].items() if name != "tokens"})
    fixed, adapting = result
    assert fixed["tokens"] == adapting["tokens"], "the number of rows at once changes no row"
    assert fixed["preempted"] > 0 and adapting["preempted"] == adapting["seen"] == 0
    assert adapting["most"] > 4, "more rows than fit with their whole limit"
