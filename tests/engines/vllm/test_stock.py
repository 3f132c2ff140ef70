"""A stock vLLM: it draws by its own numbers and computes ahead, and each token has the version and the log-prob that
drew it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from braidrl.engines import engine_contract as contract
from braidrl.engines.engine_contract import EngineUnderTest, all_of, requests
from braidrl.engines.engine_process import EngineProcess
from braidrl.engines.requests import Request, Response
from braidrl.engines.routing.resuming import ResumingEngine
from braidrl.weights.publisher import ModelWeights
from tests.engines.served import (
    LIMIT,
    LONG_OF_SLOW,
    Served,
    largest_gap,
    other_weights,
    served_model,
    vllm_python,
    write_served_model,
)
from tests.engines.tiny import END, training_log_probs
from tests.tiny import ROOT

# vLLM starts twice, on a busy machine for minutes.
pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]
MODEL = served_model()
ARGUMENTS = """
import json, sys
from vllm import EngineArgs
from braidrl.engines.engine import EngineSpec
from braidrl.engines.vllm.vllm_engine import arguments_of

found = []
for options, reproducible in json.loads(sys.argv[2]):
    arguments = arguments_of(EngineSpec("vllm", sys.argv[1], 16, 100, options=options, reproducible=reproducible))
    EngineArgs(**arguments)
    arguments["logits_processors"] = [kind.__name__ for kind in arguments.get("logits_processors", ())]
    found.append(arguments)
print("found", json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def stock(model: Path) -> Iterator[Served]:
    served = Served("vllm", model, limit_s=500.0, reproducible=False, logprobs_mode="processed_logprobs")
    yield served
    served.close()


def in_training(asked: Sequence[Request], finished: Sequence[Response]) -> list[torch.Tensor]:
    return training_log_probs(MODEL, list(asked), list(finished))


def subject(served: Served) -> EngineUnderTest:
    return EngineUnderTest(lambda: served.engine, END, LIMIT, in_training, other_weights, long=LONG_OF_SLOW)


@pytest.mark.soak
def test_log_probs_of_a_stock_vllm_are_the_trainers_after_each_update(stock: Served) -> None:
    assert stock.run(largest_gap(stock.engine, requests(subject(stock), 4), updates=20)) < 1e-5


async def drawn_by_two_versions(engine: EngineProcess, request: Request) -> Response:
    """Return a row that new weights reached while it was under way."""
    resuming = ResumingEngine(engine)
    for _ in range(20):
        await engine.update_weights(0, ModelWeights(MODEL))
        task = await contract.under_way(engine, request, resuming)
        await resuming.update_weights(3, other_weights())
        result = await task
        if 0 < result.versions.tolist().count(0) < len(result.versions):
            return result
    raise AssertionError("no row of 20 was under way when new weights came")


@pytest.mark.soak
def test_each_token_that_a_core_computed_ahead_has_the_version_that_drew_it(stock: Served) -> None:
    children = psutil.Process(stock.engine.pid).children()
    assert any(b"EngineCore" in Path(f"/proc/{child.pid}/cmdline").read_bytes() for child in children)
    (request, *_) = requests(subject(stock), 1, tokens=LONG_OF_SLOW)
    both = stock.run(drawn_by_two_versions(stock.engine, request))
    before = both.versions.tolist().count(0)
    assert both.versions.tolist() == [0] * before + [3] * (LONG_OF_SLOW - before)
    (by_the_first,) = in_training([request], [both])
    gap = (both.log_probs - by_the_first).abs()
    print(f"{before} tokens before, largest gap {gap[:before].max():.1e}; after, {gap[before]:.1e} nats")
    assert float(gap[:before].max()) < 1e-5 and float(gap[before]) > 1e-3


@pytest.mark.soak
def test_a_stock_vllm_draws_other_tokens_each_time(stock: Served) -> None:
    submitted = requests(subject(stock), 8)
    stock.run(stock.engine.update_weights(0, ModelWeights(MODEL)))
    drawn = [[row.tokens.tolist() for row in stock.run(all_of(stock.engine, submitted))] for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_settings_of_vllm_reach_its_engine_in_both_modes(model: Path) -> None:
    own = {
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "kv_cache_dtype": "fp8",
        "quantization": "fp8",
    }
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}
    asked = json.dumps([(own | ngram, False), (own, True)])
    done = subprocess.run(
        [str(vllm_python() or sys.executable), "-c", ARGUMENTS, str(model), asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stock, by_row = json.loads(done.stdout.rpartition("found ")[2])
    for arguments in (stock, by_row):
        assert {name: arguments[name] for name in own} == own
    assert stock["speculative_config"] == ngram["speculative_config"]
    assert not stock["logits_processors"] and "async_scheduling" not in stock
    assert by_row["logits_processors"] == ["DrawByRow"] and by_row["async_scheduling"] is False
