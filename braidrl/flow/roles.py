"""Roles: named models. Each method makes a stage; the same methods run at once on a `Session`'s roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.flow.stage import ALWAYS, Stage, When
from braidrl.flow.stages import make_stage


@dataclass(frozen=True)
class Role:
    """A model by name. Any name is allowed: a flow may have several actors, or several references."""

    name: str

    def generate(self, *, into: str | None = None, greedy: bool | None = None, temperature: float | None = None,
                 top_p: float | None = None, top_k: int | None = None, purpose: str | None = None,
                 environment: str | None = None,
                 id: str | None = None, when: When = ALWAYS, after: Sequence[str] = ()) -> Stage:  # fmt: skip
        """Sample one trajectory per row; with an environment, `module:Class`, `module:function` or `gem:name`, play an episode."""
        params = {
            "into": into, "greedy": greedy, "temperature": temperature, "top_p": top_p, "top_k": top_k, "purpose": purpose,
            "environment": environment,
        }  # fmt: skip
        return make_stage("generate", self.name, params, id=id, when=when, after=after)

    def verify(self, *, correct_score: float | None = None, wrong_score: float | None = None,
               weight: float | None = None, of: str | None = None,
               id: str | None = None, when: When = ALWAYS, after: Sequence[str] = ()) -> Stage:  # fmt: skip
        """Score rows by rules, in a process pool."""
        params = {"correct_score": correct_score, "wrong_score": wrong_score, "weight": weight, "of": of}
        return make_stage("verify", self.name, params, id=id, when=when, after=after)

    def score(self, *, weight: float | None = None, of: str | None = None,
              id: str | None = None, when: When = ALWAYS, after: Sequence[str] = ()) -> Stage:  # fmt: skip
        """Score rows by a model with a scalar head."""
        return make_stage("score", self.name, {"weight": weight, "of": of}, id=id, when=when, after=after)

    def log_probs(self, *, id: str | None = None, when: When = ALWAYS, after: Sequence[str] = ()) -> Stage:
        """Return the log-probabilities of the action tokens."""
        return make_stage("log_probs", self.name, {}, id=id, when=when, after=after)

    def values(self, *, id: str | None = None, when: When = ALWAYS, after: Sequence[str] = ()) -> Stage:
        """Return one value per action token."""
        return make_stage("values", self.name, {}, id=id, when=when, after=after)

    def update(self, *, loss: Mapping[str, Any] | None = None, aggregate: str | Mapping[str, Any] | None = None, old: str | None = None,
               kl: Mapping[str, Any] | None = None, entropy_coef: float | None = None,
               correction: Mapping[str, Any] | None = None, source: str | Role | None = None, decay: float | None = None,
               ptx_coef: float | None = None, positive_coef: float | None = None,
               id: str | None = None, when: When = ALWAYS, after: Sequence[str] = ()) -> Stage:  # fmt: skip
        """Train on the batch: a loss, how it is aggregated, and what is added to it; or with `source` copy its weights."""
        source = source.name if isinstance(source, Role) else source
        params = {
            "loss": loss, "aggregate": aggregate, "old": old, "kl": kl, "entropy_coef": entropy_coef,
            "correction": correction, "source": source, "decay": decay,
            "ptx_coef": ptx_coef or None, "positive_coef": positive_coef or None,
        }  # fmt: skip
        return make_stage("update", self.name, params, id=id, when=when, after=after)


actor = Role("actor")
reference = Role("reference")
critic = Role("critic")
reward = Role("reward")
cost = Role("cost")
cost_critic = Role("cost_critic")
