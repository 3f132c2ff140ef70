"""Tensors that come one by one into a worker of vLLM, and end in the middle: `python -m tests.engines.vllm.partial_update`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from braidrl.engines.vllm.vllm_worker import TakesWeights
from braidrl.weights.model_files import HubNames
from tests.engines.served import served_model

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


def main() -> None:
    worker = Loader()
    worker.load_as_they_come(coming(FIRST, SECOND))
    with pytest.raises(ConnectionError):
        worker.load_as_they_come(coming(then_fails=True))
    assert worker.loaded == [FIRST, SECOND]
    worker.load_as_they_come(coming(SECOND, FIRST))
    with pytest.raises(ConnectionError):
        worker.load_as_they_come(coming(FIRST, then_fails=True))
    with pytest.raises(RuntimeError, match="vLLM has to be started anew"):
        worker.load_as_they_come(coming(FIRST, SECOND))


if __name__ == "__main__":
    main()
