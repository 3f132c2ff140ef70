"""Replayed steps use the recorded addresses and give the rows the same bits.

CUDA graphs need CUDA. The replacement here keeps a step's operations with the very tensors that they touched, and
repeats them in the same memory. It therefore reveals everything that a step computes outside of tensors, or from
tensors that have moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.embedded.graphs import Recorder, StepGraphs
from braidrl.engines.requests import Response, SamplingParams
from braidrl.training.compute import experts
from tests.cases import soak_but
from tests.engines.tiny import CONFIGS, make_model, make_requests, make_tokenizer


class Tape(TorchDispatchMode):
    """The operations of a step, with the tensors that they read and the memory that they wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """A recorder that, as CUDA's with its memory pool, records nothing more once one of its graphs has been dropped."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tape]] = []

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        assert all(tape() is not None for tape in self.made), "the pool has outlived a graph"
        with torch.no_grad(), Tape() as tape:
            step()
        self.made.append(weakref.ref(tape))
        return tape.replay


def refuse(step: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError(
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
    )


def recording_engine(
    name: str, dtype: torch.dtype = torch.float32, recorder: Callable[[], Recorder] = TapeRecorder
) -> tuple[EmbeddedEngine, StepGraphs]:
    model = make_model(name, dtype)
    engine, graphs = (
        EmbeddedEngine(model, make_tokenizer(), Decoding(16, 256, shrink=False, compile=False)),
        StepGraphs(recorder),
    )
    engine._graphs = graphs
    return engine, graphs


def plain_engine(name: str, dtype: torch.dtype = torch.float32) -> EmbeddedEngine:
    return EmbeddedEngine(make_model(name, dtype), make_tokenizer(), Decoding(16, 256, shrink=False, compile=False))


def same(first: list[Response], second: list[Response]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.tokens, b.tokens) and torch.equal(a.log_probs, b.log_probs) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", soak_but(["qwen3"], CONFIGS))
def test_rows_are_the_same_to_the_bit_with_recorded_steps(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "moe" in name and dtype == torch.float64:
        pytest.skip("float64 has no grouped products, and one for each expert cannot be recorded")
    # Steps are recorded on CUDA, which has no compiled products; a tape cannot repeat these.
    monkeypatch.setattr(experts, "is_batch_invariant", lambda *_: False)
    requests = make_requests(8, 5, SamplingParams(temperature=0.8, max_tokens=40), apart=13)
    engine, graphs = recording_engine(name, dtype)
    assert same(engine.generate(requests), plain_engine(name, dtype).generate(requests))
    assert 1 < len(graphs.graphs) <= 5


def test_steps_are_recorded_once_for_several_generations_and_see_new_weights() -> None:
    requests = make_requests(4, 4, SamplingParams(max_tokens=12, ends=False), apart=7)
    engine, graphs = recording_engine("qwen3")
    plain, recorded = plain_engine("qwen3"), []
    for version in range(1, 5):
        assert same(engine.generate(requests), plain.generate(requests))
        recorded.append((len(graphs.graphs), {read: id(graph) for read, graph in graphs.graphs.items()}))
        for changed in (engine, plain):
            with torch.no_grad():
                for parameter in changed.model.parameters():
                    parameter.mul_(1.01)
            changed.publish(version)
    # The first generation makes the cache, layer by layer.
    assert recorded[1] == recorded[2] == recorded[3]


def test_steps_are_recorded_anew_where_memory_moved() -> None:
    short = make_requests(2, 2, SamplingParams(max_tokens=8, ends=False))
    long = make_requests(2, 2, SamplingParams(max_tokens=60, ends=False))
    engine, graphs = recording_engine("qwen3")
    plain = plain_engine("qwen3")
    for requests in (short, long, short):
        assert same(engine.generate(requests), plain.generate(requests))
    kept = engine._cache.capacity
    assert kept >= 60
    engine.clear()
    assert engine._cache.capacity == 0
    assert same(engine.generate(short), plain.generate(short))
    assert len(graphs.graphs) == 1


def test_steps_that_cannot_be_recorded_run_as_they_are_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    requests = make_requests(4, 4, SamplingParams(max_tokens=12, ends=False))
    engine, graphs = recording_engine("qwen3", recorder=lambda: refuse)
    plain = plain_engine("qwen3")
    for _ in range(2):
        assert same(engine.generate(requests), plain.generate(requests))
    assert len(graphs.graphs) == 0
    assert [line.getMessage() for line in caplog.records if "cannot be recorded" in line.getMessage()][1:] == []
    assert "during CUDA graph capture" in caplog.text


def test_few_lengths_are_recorded_and_little_is_read_in_vain() -> None:
    graphs = StepGraphs(lambda: refuse)
    read = {n: int(graphs.logits(1, n, torch.tensor)) for n in range(1, 16385)}
    assert len(set(read.values())) < 60
    assert all(n <= padded <= max(n + 31, n * 9 / 8 + 1) for n, padded in read.items())
