"""What every engine can do, whoever wrote it: the one protocol behind which models generate.

submit ──▶ Response          one response per request, whenever it ends
abort  ──▶ the same, at once, with what there is

`braidrl.engines.engine_contract` holds the checks that an engine must pass.
"""

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import nn

from braidrl.data.rows import Uid
from braidrl.engines.requests import Request, Response
from braidrl.importing import PluginRegistry
from braidrl.weights.in_place import GenerationWeights
from braidrl.weights.publisher import WeightSource

T = TypeVar("T")
ENGINES = PluginRegistry(
    "rollout engine",
    {
        "embedded": "braidrl.engines.process.process_server:embedded_engine",
        "vllm": "braidrl.engines.process.process_server:vllm_engine",
        "http": "braidrl.engines.http.http_engine:HttpEngine",
    },
)
"""What makes an engine: called with an `EngineSpec` it returns a `SteppingEngine` or a `ServedEngine`; only `http` is told of servers."""


class EngineError(RuntimeError):
    """The engine failed, not the request: the same request may succeed elsewhere, or here after `recover`."""


@dataclass(frozen=True)
class Load:
    """An engine's current load."""

    slots: int
    """Rows that it decodes at once."""
    running: int
    """Rows that are being decoded."""
    waiting: int
    """Rows that have no slot yet."""

    @property
    def rows(self) -> int:
        """Return the number of rows in flight."""
        return self.running + self.waiting


class Engine(Protocol):
    """Generates responses. All methods belong to one event loop."""

    async def submit(self, request: Request) -> Response:
        """Generate a response. Raises UserError for a request that cannot be answered, and EngineError when the engine fails."""

    async def abort(self, uid: Uid) -> None:
        """End a row at once: its `submit` returns what there is. Raises KeyError when it is not in flight."""

    async def pause(self) -> None:
        """Draw no token until `resume`. Rows keep what they have, and requests may be submitted."""

    async def resume(self) -> None:
        """Continue after `pause`."""

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        """Use other weights from the next token on; rows in flight continue with them.

        Args:
            version: Of the weights.
            source: Where they come from; with None the engine's own tensors are this version already.

        Raises:
            ValueError: The source lacks a tensor.
        """

    async def sleep(self) -> None:
        """Free memory; requests wait until `wake`. Raises RuntimeError while rows are in flight."""

    async def wake(self) -> None:
        """Accept requests again."""

    async def recover(self) -> int:
        """Make a failed engine ready, and return the version of its weights. Raises EngineError when it cannot."""

    def load(self) -> Load:
        """Return what the engine is busy with now."""


class ServedEngine(Engine, Protocol):
    """An engine with a beginning and an end, such as a process or a server."""

    @property
    def max_sequence_tokens(self) -> int:
        """Return the tokens of prompt and response together."""

    async def start(self) -> None:
        """Return when it takes requests. Raises UserError where it cannot be used as it is, EngineError where it fails."""

    async def close(self) -> None:
        """End what `start` began; may be called without it."""


@dataclass(frozen=True)
class EngineMemory:
    """What an engine takes of the device of the process that trains."""

    model: nn.Module
    """What it decodes with; the trainer's own module where it shares that."""
    cache_bytes: int
    """Keys and values of all its slots."""
    weights: GenerationWeights | None = None
    """Where the model's weights give way to those of training."""


class RoleEngine(Protocol):
    """What generates for a role, as the process that executes its stages uses it: whole batches, without an event loop of its own."""

    @property
    def max_sequence_tokens(self) -> int:
        """Return the tokens of prompt and response together."""

    @property
    def slots(self) -> int:
        """Return how many rows are decoded at once."""

    @property
    def in_flight(self) -> int:
        """Return how many rows are being decoded."""

    is_collective: bool
    """True where ranks decode together: those without rows call `generate` too, and it takes no turns in an environment."""

    @property
    def memory(self) -> EngineMemory | None:
        """Return what can leave the device while other roles need the room; None where nothing of it is known here."""

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        rows_to_end: Callable[[], Iterable[Uid]] | None = None,
    ) -> list[Response]:
        """Return all responses, in the order of `requests`.

        Args:
            requests: One per row.
            on_finished: Called with each response that ends by itself.
            rows_to_end: Asked after each step, or every few milliseconds, for rows to end with what they have; it may name some that
                have ended.

        Raises:
            UserError: For a prompt that leaves no room for a response.
            RuntimeError: While rows are in flight.
        """

    def run(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """Return what `work` returns, which has the engine for as long as it runs."""

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Generate with other weights from now on.

        Args:
            version: Of the weights.
            source: Where they come from; with None the engine's own tensors are this version already.

        Raises:
            ValueError: The source lacks a tensor.
        """

    def clear(self) -> None:
        """Drop every row, and give the memory of keys and values back."""

    def sleep(self) -> None:
        """Give back what generation alone needs; weights may be published meanwhile. Raises RuntimeError while rows are in flight."""

    def wake(self) -> None:
        """Get ready to generate again."""

    def close(self) -> None:
        """End whatever it has started."""
