"""The engine protocol: the interface of everything that generates.

submit ──▶ Response          one response per request, when it ends
abort  ──▶ the same response immediately, with the tokens drawn so far

`braidrl.engines.engine_contract` holds the checks that an engine must pass.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from braidrl.data.rows import Uid
from braidrl.engines.requests import Request, Response
from braidrl.importing import PluginRegistry

if TYPE_CHECKING:
    from torch import nn

    from braidrl.weights.publisher import WeightSource

T = TypeVar("T")
ENGINES = PluginRegistry(
    "rollout engine",
    {
        "embedded": "braidrl.engines.engine_process:embedded_engine",
        "vllm": "braidrl.engines.engine_process:vllm_engine",
        "http": "braidrl.engines.http.http_engine:HttpEngine",
    },
    arguments=("spec",),
    methods=("abort",),
)
"""Engine factories: called with an `EngineSpec`, each returns a `SteppingEngine` or a `ServedEngine`; only `http` is
given servers.
"""

OF_VLLM = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # Otherwise vLLM binds each worker to a separate NUMA node, and refuses more workers than nodes.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables of vLLM, set unless the run's own environment sets them."""
NOTHING_YET = -1
"""The version of an engine whose process or server was restarted."""


class EngineError(RuntimeError):
    """An error of the engine, not of the request.

    The same request may succeed on another engine, or here after `recover`.
    """


def check_idle(name: str, rows: Collection[Uid], does: str) -> None:
    """Raise RuntimeError while an engine has rows in flight; `does` is the operation that requires an idle engine."""
    if rows:
        raise RuntimeError(f"{name}: {len(rows)} rows are under way; an engine {does} when it has none")


@dataclass(frozen=True)
class Speculated:
    """Counts of an engine's passes, tokens and guesses since its start."""

    passes: int = 0
    """Passes of the model, each counted for every row that participated."""
    tokens: int = 0
    """Tokens drawn."""
    drafted: int = 0
    """Guesses checked by passes."""
    accepted: int = 0
    """Guesses that were right."""

    def __add__(self, other: "Speculated") -> "Speculated":
        return Speculated(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def since(self, earlier: "Speculated") -> "Speculated":
        """Return the counts after `earlier`; for an engine restarted since, all counts."""
        if earlier.passes > self.passes:
            return self
        return Speculated(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Load:
    """An engine's current load."""

    slots: int
    """Rows that it can decode together."""
    running: int
    waiting: int
    """Rows without a slot."""
    speculated: Speculated | None = None
    """None for an engine that does not guess tokens, or does not report it."""

    @property
    def rows(self) -> int:
        """Return the number of rows in flight."""
        return self.running + self.waiting


@dataclass(frozen=True)
class NodePart:
    """A node's part of an engine over several nodes."""

    node: int
    """The node's rank; 0 has the scheduler."""
    nodes: int
    address: str
    """This node's address for other nodes."""
    host: str = ""
    """The first node's address, where the ranks meet at `port`; both are set by a start."""
    port: int = 0


@dataclass(frozen=True)
class EngineSpec:
    """The settings of an engine, as plain data for its process."""

    kind: str
    """`embedded`, `vllm`, or a user's `module:name` or `file.py:name`."""
    model: str
    """A Hugging Face directory."""
    slots: int
    max_sequence_tokens: int
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    """cpu or cuda: the first of `devices`."""
    threads: int | None = 1
    """CPU threads of each of its processes; None keeps the environment's setting."""
    tensor: int = 1
    """Tensor-parallel ranks that shard the weights, each a process."""
    pipeline: int = 1
    """Pipeline-parallel ranks, each of them `tensor` processes."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of this kind of engine; `rollout.engine_settings` for a user's engine."""
    devices: tuple[int, ...] | None = None
    """The CUDA devices that its processes see, one each, by index among the run's devices; None for all."""
    reproducible: bool = True
    """True if a row's random numbers must draw its tokens."""
    adapts_rows: bool = False
    """True if an engine of vLLM starts only as many of its `slots` rows as fit into its keys and values."""
    images: dict[str, Any] | None = None
    """The settings of `data.images`, for a multimodal model."""
    train_vision: bool = False
    part: NodePart | None = None
    """The part of its process, if an engine spans several nodes."""

    @property
    def vllm_options(self) -> dict[str, Any]:
        """Return the arguments of vLLM's engine that the configuration sets: the user's, and the engine's shape."""
        options = {**self.options, "tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline}
        if (part := self.part) is not None:
            options |= {
                "distributed_executor_backend": "mp",
                "nnodes": part.nodes,
                "node_rank": part.node,
                "master_addr": part.host,
                "master_port": part.port,
            }
        return options

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables to set before the engine's packages are imported."""
        if self.kind != "vllm":
            return {}
        variables = dict(OF_VLLM)
        if self.part is not None:
            from braidrl.cluster.process_groups import interface_of  # it needs torch

            variables |= {"VLLM_HOST_IP": self.part.address, "GLOO_SOCKET_IFNAME": interface_of(self.part.address)}
        variables = {name: value for name, value in variables.items() if value and name not in os.environ}
        # On the CPU vLLM computes eagerly, but would still compile small parts of its sampling with a C++ compiler.
        return variables | ({"TORCHDYNAMO_DISABLE": "1"} if self.device == "cpu" else {})


class Engine(Protocol):
    """A generator of responses, as seen by the caller that submits rows."""

    async def submit(self, request: Request) -> Response:
        """Generate a response.

        Raises UserError for a request that cannot be answered, and EngineError when the engine fails.
        """

    async def abort(self, uid: Uid) -> None:
        """End a row immediately: `submit` returns its tokens so far. Raises KeyError if the row is not in flight."""


class ServedEngine(Engine, Protocol):
    """An engine that is started and closed, such as a process or a server. All methods belong to one event loop."""

    max_sequence_tokens: int
    """The maximum length of prompt and response together, in tokens."""

    async def start(self) -> None:
        """Start the engine, and return when it accepts requests.

        Raises UserError for a wrong configuration, EngineError if it fails.
        """

    async def update_weights(self, version: int, source: "WeightSource | None" = None) -> None:
        """Use the weights of `source` from the next row on; None means that the engine's tensors already have this
        version.

        Raises ValueError if the source lacks a tensor, and RuntimeError while rows are in flight, which a
        `ResumingEngine` preempts.
        """

    async def sleep(self) -> None:
        """Free memory; requests wait until `wake`. Raises RuntimeError while rows are in flight."""

    async def wake(self) -> None:
        """Accept requests again."""

    async def recover(self) -> int:
        """Make a failed engine ready, and return the version of its weights. Raises EngineError if that fails."""

    def load(self) -> Load:
        """Return the engine's current load."""

    async def close(self) -> None:
        """Stop the engine; may be called without `start`."""


@dataclass(frozen=True)
class EngineMemory:
    """The memory of an engine on the trainer's device."""

    model: "nn.Module"
    """The model that decodes; the trainer's module if shared."""
    cache_bytes: int
    """Bytes that are freed while it does not generate: keys and values of all its slots, and packed weights."""
