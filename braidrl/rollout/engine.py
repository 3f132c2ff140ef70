"""What every engine can do, whoever wrote it: the one protocol behind which models generate.

submit ──▶ Response          one response per request, whenever it ends
abort  ──▶ the same, at once, with what there is

`braidrl.rollout.contract` holds the checks that an engine must pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from braidrl.rollout.requests import Request, Response, Uid


class EngineError(RuntimeError):
    """The engine failed, not the request: the same request may succeed elsewhere, or here after `recover`."""


@dataclass(frozen=True)
class Load:
    """What an engine is busy with."""

    slots: int
    """Rows that it decodes at once."""
    running: int
    """Rows that are being decoded."""
    waiting: int
    """Rows that have no slot yet."""

    @property
    def rows(self) -> int:
        """Rows under way."""
        return self.running + self.waiting


class WeightSource(Protocol):
    """One version of a model's weights, as any engine can take them."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every tensor of the model by its name; a tied one comes under each of its names."""


class ModelWeights:
    """The weights of a module in this process."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self._model.state_dict().items()


class Engine(Protocol):
    """Generates responses. All methods belong to one event loop."""

    async def submit(self, request: Request) -> Response:
        """The response. Raises UserError for a request that cannot be answered, and EngineError when the engine fails."""

    async def abort(self, uid: Uid) -> None:
        """Ends a row at once: its `submit` returns what there is. Raises KeyError when it is not under way."""

    async def pause(self) -> None:
        """No token is drawn until `resume`. Rows keep what they have, and requests may be submitted."""

    async def resume(self) -> None:
        """Goes on where `pause` stopped."""

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        """From the next token on the weights are those of `version`; rows under way go on with them.

        Without a source they are what the engine shares with its trainer. Raises ValueError where the source lacks a tensor.
        """

    async def sleep(self) -> None:
        """Gives memory back; requests wait until `wake`. Raises RuntimeError while rows are under way."""

    async def wake(self) -> None:
        """Takes requests again."""

    async def recover(self) -> int:
        """Makes a failed engine ready, and returns the version of its weights. Raises EngineError when it cannot."""

    def load(self) -> Load:
        """What the engine is busy with now."""
