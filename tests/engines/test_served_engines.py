"""Engines in separate processes (embedded, vLLM): the contract, weight updates, and the death of an engine or its
run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from braidrl.data.rows import Uid
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.engine import EngineError
from braidrl.engines.engine_contract import CHECKS, EngineUnderTest, all_of, requests
from braidrl.engines.engine_process import EngineProcess
from braidrl.engines.requests import Request, Response
from braidrl.engines.routing.router import EngineService
from braidrl.errors import UserError
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.parallel.layouts import DataParallel
from braidrl.weights.file import WeightFile, WeightWriter, stored_weights
from braidrl.weights.publisher import ModelWeights
from braidrl.weights.shards import weight_parts
from tests.engines.served import (
    LIMIT,
    LONG,
    LONG_OF_SLOW,
    Served,
    largest_gap,
    other_weights,
    served_model,
    spec,
    vllm_python,
    write_served_model,
)
from tests.engines.tiny import END, make_tokenizer, training_log_probs
from tests.tiny import ROOT, braid

MODEL = served_model()
KINDS = ("embedded", pytest.param("vllm", marks=pytest.mark.soak))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, model: Path) -> Iterator[Served]:
    own = {"enable_sleep_mode": True} if request.param == "vllm" else {}
    served = Served(request.param, model, **own)
    yield served
    served.close()


def subject(served: Served) -> EngineUnderTest:
    long = LONG if served.engine.spec.kind == "embedded" else LONG_OF_SLOW
    return EngineUnderTest(lambda: served.engine, END, LIMIT, in_training, other_weights, long=long)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_engines_in_processes_keep_the_contract(
    served: Served, check: Callable[[EngineUnderTest], Awaitable[None]]
) -> None:
    served.run(served.engine.update_weights(0, ModelWeights(MODEL)))
    served.run(check(subject(served)))  # type: ignore[arg-type]


def test_a_rows_callback_gets_each_token_before_its_response(served: Served) -> None:
    seen: list[tuple[int, int]] = []
    (request, *_) = requests(subject(served), 1)
    finished = served.run(served.engine.submit(replace(request, on_token=lambda *token: seen.append(token))))
    assert seen == list(enumerate(finished.tokens.tolist()))


def test_log_probs_after_each_update_are_those_of_the_trainer(served: Served) -> None:
    assert served.run(largest_gap(served.engine, requests(subject(served), 4), offered=True)) < 1e-5


def test_a_users_column_is_that_of_the_trainers_distribution(served: Served) -> None:
    served.run(served.engine.update_weights(0, ModelWeights(MODEL)))
    column = f"{ROOT}/examples/plugins/token_column.py:top_two"
    submitted = [replace(request, columns=(column,)) for request in requests(subject(served), 4)]
    submitted[1] = replace(submitted[1], columns=())
    endless = replace(submitted[0].sampling, max_tokens=LONG_OF_SLOW, ends=False, temperature=0.5)

    async def with_abort() -> list[Response]:
        seen = asyncio.Event()
        cut = replace(submitted[0], uid=(0, 99, 0), sampling=endless, on_token=lambda n, _: n > 3 and seen.set())
        submitted.append(cut)
        tasks = [asyncio.ensure_future(served.engine.submit(request)) for request in submitted]
        await seen.wait()
        await served.engine.abort(cut.uid)
        return await asyncio.gather(*tasks)

    finished = served.run(with_abort())
    assert 3 < len(finished[-1].tokens) < LONG_OF_SLOW and "top_two" not in finished[1].per_token
    for request, response in zip(submitted, finished, strict=True):
        if request.columns:
            ids = torch.cat([request.prompt, response.tokens])
            with torch.no_grad():
                logits = MODEL(ids[None], sequences=PackedSequences.of([len(ids)])).logits[
                    0, len(request.prompt) - 1 : -1
                ]
            expected = (logits / request.sampling.log_prob_temperature).log_softmax(-1).topk(2, -1).values
            torch.testing.assert_close(response.per_token["top_two"], expected, rtol=0, atol=1e-5)


def test_a_call_waiting_for_a_killed_process_fails(served: Served) -> None:
    engine, (request, *_) = served.engine, requests(subject(served), 1)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"engine 0 \(process {engine.pid}\) ended; .*-9"):
        served.run(engine.submit(request))


@pytest.mark.parametrize(
    ("kind", "count"), [("embedded", 2), *(pytest.param("vllm", count, marks=pytest.mark.soak) for count in (2, 4))]
)
def test_rows_of_a_killed_process_move_and_it_recovers_with_current_weights(
    request: pytest.FixtureRequest, model: Path, kind: str, count: int
) -> None:
    python = vllm_python() if kind == "vllm" else None
    engines = [EngineProcess(spec(kind, model), f"engine {number}", python) for number in range(count)]
    service = EngineService(engines, limit_s=120.0)
    request.addfinalizer(service.close)
    service.publish(4, ModelWeights(MODEL))
    subject = EngineUnderTest(lambda: service.router, END, LIMIT, in_training, other_weights)
    # Different lengths, so that the killed engine still has rows when the first ones end.
    submitted = [
        replace(request, sampling=replace(request.sampling, max_tokens=20 + 29 * number % 200))
        for number, request in enumerate(requests(subject, 40))
    ]
    dying, staying, answered = service.engines[0], service.engines[1], []
    # Kernels of vLLM round otherwise than those of training, so that a draw at the end of an interval may differ.
    of_one = service.run(lambda _: all_of(staying, submitted)) if kind == "vllm" else []
    expected = {row.uid: row.tokens.tolist() for row in of_one} or all_alone(submitted)

    def kill(finished: Response) -> None:
        answered.append(finished.uid)
        if len(answered) == 3:
            assert dying.pid is not None
            os.kill(dying.pid, signal.SIGKILL)

    finished = service.generate(submitted[::-1], kill)
    assert sorted(answered) == [row.uid for row in submitted], "every row exactly once"
    assert [row.uid for row in finished] == [row.uid for row in submitted[::-1]]
    assert {row.uid: row.tokens.tolist() for row in finished} == expected
    assert service.run(lambda router: router.recover()) == 4 and len(service.router.alive) == count
    (again,) = service.run(lambda _: all_of(dying, submitted[:1]))
    assert set(again.versions.tolist()) == {4} and again.tokens.tolist() == expected[again.uid]
    assert dying.pid is not None
    os.kill(dying.pid, signal.SIGSTOP)
    dying.limit_s = 0.5
    with pytest.raises(EngineError, match=r"engine 0 \(process \d+\).* 0.5 s.*sleep"):
        service.run(lambda _: dying.sleep())


def test_an_engine_ends_with_its_run_however_that_ends(model: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from braidrl.cluster.local import copy_as_fork_server
from braidrl.engines.engine_process import EngineProcess
from tests.engines.served import spec
copy_as_fork_server(["braidrl.engines.engine_process"])
async def main():
    engine = EngineProcess(spec("embedded", Path({str(model)!r})))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with braid(prefix=program) as run:
        assert run.stdout is not None
        engine = psutil.Process(int(run.stdout.readline()))
        run.kill()
    engine.wait(120.0)


def in_training(asked: Sequence[Request], finished: Sequence[Response]) -> list[torch.Tensor]:
    return training_log_probs(MODEL, list(asked), list(finished))


def all_alone(wanted: Sequence[Request]) -> dict[Uid, list[int]]:
    """Return the tokens that one engine in this process samples."""
    engine = EmbeddedEngine(MODEL, make_tokenizer(), Decoding(16, LIMIT))
    return {row.uid: row.tokens.tolist() for row in engine.generate(wanted)}


def written_by_its_rank() -> WeightFile:
    parts = weight_parts(MODEL)
    return WeightWriter(parts, DataParallel()).write(parts)


@pytest.mark.parametrize("write", [lambda: stored_weights(ModelWeights(MODEL).tensors()), written_by_its_rank])
def test_a_weight_file_has_every_tensor(write: Callable[[], WeightFile]) -> None:
    with closing(write()) as shared:
        given = dict(shared.tensors())
        assert shared.shapes() == {name: tensor.shape for name, tensor in MODEL.state_dict().items()}
        assert set(given) == set(MODEL.state_dict())
        assert all(torch.equal(given[name], tensor) for name, tensor in MODEL.state_dict().items())


def test_an_unusable_model_or_interpreter_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.python: .*none is no interpreter"):
        EngineService([EngineProcess(spec("vllm", tmp_path), python=tmp_path / "none")])
    with pytest.raises(UserError, match="there is no folder"):
        EngineService([EngineProcess(spec("embedded", tmp_path / "none"))])
