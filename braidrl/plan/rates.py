"""Rates: convert work to seconds by the share of a device's peak that programs achieve. Calibration fits all rates.

Work ──price(kind, rates)──▶ Cost        compute = operations / (peak · share) + bytes / (bandwidth · share) + overheads
                                         communication = exposed transfers + overlapped transfers that exceed the
                                         overlap
"""

from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from braidrl.cluster.device_kinds import DeviceKind
from braidrl.config.reading import explain
from braidrl.config.section import Section
from braidrl.errors import UserError
from braidrl.parsing import read_yaml

Phase = Literal["train", "infer", "prefill", "decode"]
VLLM = ("vllm", "http")
"""Values of `rollout.engine` that vLLM's rates describe."""


class Work(NamedTuple):
    """The work of a role's busiest device in one phase: operations, bytes by link, and counts."""

    phase: Phase
    operations: float = 0.0
    memory: float = 0.0
    """Bytes to and from device memory, except those included in operations."""
    activations: float = 0.0
    """Bytes of one hidden state per layer and token; elementwise operations read and write them several times."""
    tokens: float = 0.0
    """Tokens with logits (in generation: sampled tokens)."""
    calls: float = 0.0
    rows: float = 0.0
    steps: float = 0.0
    """Decode steps, optimizer steps, or calls of the stage."""
    link: float = 0.0
    """Exposed bytes within a node."""
    network: float = 0.0
    """Exposed bytes between nodes."""
    collectives: float = 0.0
    behind_link: float = 0.0
    """Bytes within a node that overlap with compute."""
    behind_network: float = 0.0
    """Bytes between nodes that overlap with compute."""


class Cost(NamedTuple):
    """The seconds of a stage, split by cause."""

    compute: float = 0.0
    memory: float = 0.0
    overhead: float = 0.0
    communication: float = 0.0
    weights: float = 0.0
    """Weight updates: resharding or publication to engines."""
    moves: float = 0.0
    """Copies between device and host."""

    @property
    def seconds(self) -> float:
        return sum(self)

    @property
    def bound(self) -> str:
        """Return the name of the largest cause."""
        return max(zip(self, self._fields, strict=True))[1]

    def plus(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class PhaseRates(Section):
    """The achieved rates of one phase."""

    share: float = Field(0.4, gt=0)
    """Share of the peak operations per second."""
    activation_s: float = Field(0.0, ge=0)
    """Seconds per byte of activations for norms and residuals, if `share` does not include them."""
    token_s: float = Field(0.0, ge=0)
    """Seconds per token for its loss or its sampling, independent of model size."""
    call_s: float = Field(0.0, ge=0)
    """Seconds per layer call, independent of its size."""
    row_s: float = Field(0.0, ge=0)
    step_s: float = Field(0.0, ge=0)
    """Seconds per decode step, optimizer step or stage call."""


class RuntimeRates(Section):
    """A runtime's overhead in addition to its stages."""

    iteration_s: float = Field(0.0, ge=0)
    row_s: float = Field(0.0, ge=0)
    slower: float = Field(0.0, ge=0)
    """Seconds per second of its stages, as workers share cores or memory bandwidth."""


class EngineRates(Section):
    """The achieved rates of one engine. The defaults are typical of vLLM on a GPU."""

    prefill: PhaseRates = PhaseRates(share=0.5, call_s=50e-6)
    decode: PhaseRates = PhaseRates(share=0.5, call_s=20e-6, step_s=3e-3)


class Rates(Section):
    """The achieved rates on one kind of device."""

    train: PhaseRates = PhaseRates(share=0.42, call_s=150e-6)
    """Forward and backward passes and the optimizer."""
    infer: PhaseRates = PhaseRates(share=0.5, call_s=100e-6)
    prefill: PhaseRates = PhaseRates(share=0.5, call_s=50e-6)
    """Prefill by the embedded engine, or by a user's engine."""
    decode: PhaseRates = PhaseRates(share=0.5, token_s=5e-6, step_s=4.2e-3)
    """Decoding by these engines.

    Defaults: the embedded engine on an H200 (benchmarks/results/gpu-nvidia-h200-full.json).
    """
    vllm: EngineRates = EngineRates()
    """Prefill and decoding by vLLM, in a run's engines or in servers."""
    memory: float = Field(0.7, gt=0)
    """Share of the memory's bandwidth."""
    link: float = Field(0.7, gt=0)
    """Share of a link's bandwidth within a node."""
    network: float = Field(0.7, gt=0)
    """Share of a link's bandwidth between nodes."""
    host: float = Field(0.6, gt=0)
    """Share of the bandwidth to host memory."""
    collective_s: float = Field(20e-6, ge=0)
    """Latency of one collective, in seconds."""
    behind: float = Field(1.0, ge=0, le=1)
    """Share of compute that communication can overlap; 0 if the same cores do both."""
    runtimes: dict[str, RuntimeRates] = Field(default_factory=dict)
    stages: dict[str, float] = Field(default_factory=dict)
    """Seconds per row of stages without a model, by stage type."""

    def of(self, phase: Phase, engine: str = "embedded") -> PhaseRates:
        """Return the rates of one phase, which for prefill and decode depend on the engine (`rollout.engine`)."""
        generates = self.vllm if phase in ("prefill", "decode") and engine in VLLM else self
        rates: PhaseRates = getattr(generates, phase)
        return rates


BUILT_IN = {"cpu": Rates(behind=0.0)}
"""Rates of kinds of devices that differ from the typical values of `Rates`."""


def read_rates(path: Path) -> dict[str, Rates]:
    """Read rates by device kind from a file. Raises UserError if it is missing or invalid."""
    if not path.is_file():
        raise UserError(f"--rates: there is no file {path}; `braid plan --calibrate RUN --rates {path}` writes it")
    try:
        return TypeAdapter(dict[str, Rates]).validate_python(read_yaml(path) or {})
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, Rates)[0]}") from None


def price(work: Work, kind: DeviceKind, rates: Rates, dtype: str, engine: str = "embedded") -> Cost:
    """Return the cost of the busiest device's work; `dtype` is a key of `kind.peak`, and `engine` prices prefill and
    decode.
    """
    phase = rates.of(work.phase, engine)
    compute = work.operations / (kind.peak[dtype] * phase.share)
    memory = work.memory / (kind.bandwidth * rates.memory) + work.activations * phase.activation_s
    overhead = (
        work.tokens * phase.token_s + work.calls * phase.call_s + work.rows * phase.row_s + work.steps * phase.step_s
    )
    link, network = kind.link * rates.link, kind.network * rates.network
    waited = work.link / link + work.network / network + work.collectives * rates.collective_s
    behind = work.behind_link / link + work.behind_network / network
    left = max(0.0, behind - rates.behind * (compute + memory))
    return Cost(compute, memory, overhead, waited + left)
