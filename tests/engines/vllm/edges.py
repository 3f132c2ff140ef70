"""Cases that runs seldom meet: tensors that end in the middle, and a stop text within a step: `python -m
tests.engines.vllm.edges`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from braidrl.data.rows import FinishReason
from braidrl.engines.requests import Request, SamplingParams, row_of
from braidrl.engines.stepping import SteppingEngine
from braidrl.engines.vllm.vllm_engine import VllmEngine
from braidrl.engines.vllm.vllm_worker import TakesWeights
from braidrl.weights.model_files import HubNames
from tests.engines.served import served_model
from tests.engines.tiny import make_tokenizer

MODEL = served_model()
FIRST, SECOND, *_ = MODEL.state_dict()


class Loader(TakesWeights):
    """The worker class as vLLM makes it, with a loader that accepts everything."""

    hub_names = HubNames(MODEL)

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.model_runner = SimpleNamespace(get_model=lambda: MODEL)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=MODEL.config))

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        self.loaded = []
        for name, _ in weights_iterator:
            self.loaded.append(name)


def coming(*names: str, then_fails: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, torch.zeros(1)
    if then_fails:
        raise ConnectionError("the run is gone")


def a_stop_text_ends_a_row_within_the_tokens_of_a_step() -> None:
    engine, tokenizer = VllmEngine.__new__(VllmEngine), make_tokenizer()
    SteppingEngine.__init__(engine, tokenizer, (), 64, 0)
    tokens = tokenizer.encode("a stop b")
    # vLLM ends the row by its length in the step in which the text is completed.
    part = SimpleNamespace(token_ids=tokens, logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in tokens])
    step = [SimpleNamespace(request_id="7", finished=True, outputs=[part])]
    engine._engine = SimpleNamespace(step=lambda: step)
    request = Request((0, 0, 0), torch.tensor([1]), SamplingParams(stop=("stop",), max_tokens=len(tokens)))
    row = row_of(request, tokenizer, (), 64)
    row.name, row.versions = "7", [(0, 0)]
    engine.slots, engine._rows, engine.recent = 1, {"7": row}, deque()
    (finished,) = engine.step()
    assert tokenizer.decode(finished.tokens) == "a stop" and finished.finish_reason is FinishReason.STOP


def a_partial_update_refuses_later_ones() -> None:
    worker = Loader()
    worker.load_as_they_come(coming(FIRST, SECOND))
    with pytest.raises(ConnectionError):
        worker.load_as_they_come(coming(then_fails=True))
    assert worker.loaded == [FIRST, SECOND]
    worker.load_as_they_come(coming(SECOND, FIRST))
    with pytest.raises(ConnectionError):
        worker.load_as_they_come(coming(FIRST, then_fails=True))
    with pytest.raises(RuntimeError, match="vLLM must be restarted"):
        worker.load_as_they_come(coming(FIRST, SECOND))


if __name__ == "__main__":
    a_stop_text_ends_a_row_within_the_tokens_of_a_step()
    a_partial_update_refuses_later_ones()
