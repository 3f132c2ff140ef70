"""Turn work into seconds: what a program reaches of a device's figures. Every number here is one that calibration fits.

Work ──price(kind, rates)──▶ Cost        compute = operations / (peak · share) + bytes / (bandwidth · share) + overheads
                                         communication = what computing waits for, and what does not fit behind it
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from braidrl.cluster.device_kinds import DeviceKind
from braidrl.config.reading import explain
from braidrl.config.section import Section
from braidrl.errors import UserError
from braidrl.yaml_text import read_yaml

Phase = Literal["train", "infer", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("train", "infer", "prefill", "decode")


class Work(NamedTuple):
    """What the busiest device of a role does in one phase: operations, bytes by road, and counts."""

    phase: Phase
    operations: float = 0.0
    memory: float = 0.0
    """Bytes to and from its memory, apart from what operations bring with them."""
    activations: float = 0.0
    """Bytes of one activation of every layer and token, which what is between matrices reads and writes several times."""
    tokens: float = 0.0
    """Tokens that logits are computed for, and in generation drawn from."""
    calls: float = 0.0
    """Layers that are computed, one by one."""
    rows: float = 0.0
    steps: float = 0.0
    """Decode steps, optimizer steps, or calls of the stage."""
    link: float = 0.0
    """Bytes within a node that computing waits for."""
    network: float = 0.0
    """Bytes between nodes that computing waits for."""
    collectives: float = 0.0
    behind_link: float = 0.0
    """Bytes within a node that travel while it computes."""
    behind_network: float = 0.0
    """Bytes between nodes that travel while it computes."""
    host: float = 0.0
    """Bytes to and from host memory."""


class Cost(NamedTuple):
    """Seconds of a stage by what takes them."""

    compute: float = 0.0
    memory: float = 0.0
    overhead: float = 0.0
    communication: float = 0.0
    weights: float = 0.0
    """Bringing weights to another layout, or to engines."""
    moves: float = 0.0
    """Between device and host."""

    @property
    def seconds(self) -> float:
        """Return the sum."""
        return sum(self)

    @property
    def bound(self) -> str:
        """Return the name of the largest part."""
        return max(zip(self, self._fields, strict=True))[1]

    def plus(self, other: "Cost") -> "Cost":
        """Return the sum by part."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class PhaseRates(Section):
    """What a phase reaches."""

    share: float = Field(0.4, gt=0)
    """Of the peak operations per second."""
    activation_s: float = Field(0.0, ge=0)
    """Seconds for each byte of activations, where `share` does not have what norms and residuals take in it."""
    token_s: float = Field(0.0, ge=0)
    """Seconds for each token, whatever the model's size: its loss, or its draw."""
    call_s: float = Field(0.0, ge=0)
    """Seconds for each layer, whatever its size."""
    row_s: float = Field(0.0, ge=0)
    """Seconds for each row."""
    step_s: float = Field(0.0, ge=0)
    """Seconds for each step: of decoding, of the optimizer, or a call."""


class RuntimeRates(Section):
    """What a runtime adds to an iteration beside its stages."""

    iteration_s: float = Field(0.0, ge=0)
    """Seconds for each iteration."""
    row_s: float = Field(0.0, ge=0)
    """Seconds for each row."""
    slower: float = Field(0.0, ge=0)
    """Seconds for each second of its stages: its workers share cores, or the memory, with each other."""


class Rates(Section):
    """What programs reach of one kind of device."""

    train: PhaseRates = PhaseRates(share=0.42, call_s=150e-6)
    """Forward and backward passes and the optimizer."""
    infer: PhaseRates = PhaseRates(share=0.5, call_s=100e-6)
    """Forward passes."""
    prefill: PhaseRates = PhaseRates(share=0.5, call_s=50e-6)
    """Prompts of generation."""
    decode: PhaseRates = PhaseRates(share=0.5, call_s=20e-6, step_s=3e-3)
    """Tokens of generation."""
    memory: float = Field(0.7, gt=0)
    """Share of the memory's bandwidth."""
    link: float = Field(0.7, gt=0)
    """Share of a link's bandwidth within a node."""
    network: float = Field(0.7, gt=0)
    """Share of a link's bandwidth between nodes."""
    host: float = Field(0.6, gt=0)
    """Share of the bandwidth to host memory."""
    collective_s: float = Field(20e-6, ge=0)
    """Seconds to begin one collective."""
    behind: float = Field(1.0, ge=0, le=1)
    """Share of computing that communication can hide behind; 0 where the same cores do both."""
    runtimes: dict[str, RuntimeRates] = Field(default_factory=dict)
    """What each runtime adds."""
    stages: dict[str, float] = Field(default_factory=dict)
    """Seconds per row of stages that use no model, by their type."""

    def of(self, phase: Phase) -> PhaseRates:
        """Return the rates of one phase."""
        rates: PhaseRates = getattr(self, phase)
        return rates


@cache
def default_rates() -> dict[str, Rates]:
    """Return the rates that come with the package: typical of GPUs, and those fitted on a CPU."""
    return read_rates(Path(__file__).with_name("rates.yaml"))


def read_rates(path: Path) -> dict[str, Rates]:
    """Return a file's rates by kind. Raises UserError where it holds something else."""
    if not path.is_file():
        raise UserError(f"--rates: there is no file {path}; `braid plan --calibrate RUN --rates {path}` writes it")
    try:
        tree: dict[str, Any] = read_yaml(path) or {}
        return {kind: Rates.model_validate(value) for kind, value in tree.items()}
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error)}") from None


def rates_for(kind: str, known: Mapping[str, Rates]) -> Rates:
    """Return the rates of a kind: its own where there are some, else the typical ones."""
    return known.get(kind) or default_rates().get(kind) or Rates()


def price(work: Work, kind: DeviceKind, rates: Rates, dtype: str) -> Cost:
    """Return the seconds of some work on a kind of device.

    Args:
        dtype: of the operands, as the kind's peaks are named.
    """
    phase = rates.of(work.phase)
    compute = work.operations / (kind.peak[dtype] * phase.share)
    memory = work.memory / (kind.bandwidth * rates.memory) + work.activations * phase.activation_s
    overhead = (
        work.tokens * phase.token_s + work.calls * phase.call_s + work.rows * phase.row_s + work.steps * phase.step_s
    )
    link, network = kind.link * rates.link, kind.network * rates.network
    waited = work.link / link + work.network / network + work.collectives * rates.collective_s
    behind = work.behind_link / link + work.behind_network / network
    left = max(0.0, behind - rates.behind * (compute + memory))
    return Cost(compute, memory, overhead, waited + left, 0.0, work.host / (kind.host * rates.host))
