"""Roles: named models. Each method makes a stage; on a `Session`'s roles the same methods run immediately."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.flow.stage import ALWAYS, Stage, When
from braidrl.flow.stages import make_stage


@dataclass(frozen=True)
class Role:
    """A named model. Any name is allowed: a flow may have several actors or several references.

    Every method takes the stage's `id` (by default its role and type), the iterations `when` it runs, and the stages
    that it runs `after`.
    """

    name: str

    def generate(
        self,
        *,
        into: str | None = None,
        greedy: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        purpose: str | None = None,
        environment: str | None = None,
        policies: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        id: str | None = None,
        when: When = ALWAYS,
        after: Sequence[str] = (),
    ) -> Stage:
        """Return a stage that samples one trajectory per row; with an environment, plays an episode.

        Args:
            into: Namespace of a second trajectory's columns, as in `greedy.tokens`.
            greedy: Take the likeliest token.
            temperature: Divides the logits; this and the next two default to the configuration's `rollout`.
            top_p: Cumulative probability of the tokens to sample from.
            top_k: Number of tokens to sample from; 0 for all.
            purpose: Key of the random numbers.
            environment: `module:Class`, `module:function`, `gem:name` or `agent:module:function`.
            policies: Other roles that take turns in the environment; each writes its trajectory into the namespace of
                its name, as in `rival.tokens`.
            columns: Columns per token that the engine returns beside log-probs and versions, by name or as
                `file.py:function`; those that a later stage reads need not be named.
        """
        params = {
            "into": into,
            "greedy": greedy,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "purpose": purpose,
            "environment": environment,
            "policies": policies,
            "columns": columns,
        }
        return make_stage("generate", self.name, params, id=id, when=when, after=after)

    def verify(
        self,
        *,
        correct_score: float | None = None,
        wrong_score: float | None = None,
        weight: float | None = None,
        of: str | None = None,
        id: str | None = None,
        when: When = ALWAYS,
        after: Sequence[str] = (),
    ) -> Stage:
        """Return a stage that scores rows by rules, in a process pool.

        Args:
            correct_score: Score of a right answer.
            wrong_score: Score of a wrong one.
            weight: Weight with which the score is added to `score` and `reward`.
            of: Namespace of the responses.
        """
        params = {"correct_score": correct_score, "wrong_score": wrong_score, "weight": weight, "of": of}
        return make_stage("verify", self.name, params, id=id, when=when, after=after)

    def score(
        self,
        *,
        weight: float | None = None,
        of: str | None = None,
        id: str | None = None,
        when: When = ALWAYS,
        after: Sequence[str] = (),
    ) -> Stage:
        """Return a stage that scores rows by a model with a scalar head.

        Args:
            weight: Weight with which the score is added to `score` and `reward`; by default 1 for the role `reward`,
                none for others.
            of: Namespace of the responses.
        """
        return make_stage("score", self.name, {"weight": weight, "of": of}, id=id, when=when, after=after)

    def log_probs(
        self,
        *,
        replay: str | None = None,
        of: str | None = None,
        id: str | None = None,
        when: When = ALWAYS,
        after: Sequence[str] = (),
    ) -> Stage:
        """Return a stage that computes the log-probabilities of the action tokens.

        Args:
            replay: `inference` takes the experts of a mixture that the engine chose, `training` records those of this
                pass for the update.
            of: Namespace of the responses.
        """
        return make_stage("log_probs", self.name, {"replay": replay, "of": of}, id=id, when=when, after=after)

    def values(
        self, *, of: str | None = None, id: str | None = None, when: When = ALWAYS, after: Sequence[str] = ()
    ) -> Stage:
        """Return a stage that computes one value per action token.

        Args:
            of: Namespace of the responses.
        """
        return make_stage("values", self.name, {"of": of}, id=id, when=when, after=after)

    def update(
        self,
        *,
        of: str | None = None,
        loss: Mapping[str, Any] | None = None,
        aggregate: str | Mapping[str, Any] | None = None,
        old: str | None = None,
        kl: Mapping[str, Any] | None = None,
        entropy_coef: float | None = None,
        correction: Mapping[str, Any] | None = None,
        source: "str | Role | None" = None,
        decay: float | None = None,
        ptx_coef: float | None = None,
        positive_coef: float | None = None,
        observation_coef: float | None = None,
        replay: str | None = None,
        id: str | None = None,
        when: When = ALWAYS,
        after: Sequence[str] = (),
    ) -> Stage:
        """Return a stage that trains on the batch, or with `source` copies another role's weights.

        Args:
            of: Namespace of the responses.
            loss: The loss, as in `loss.clip(low=0.2)`.
            aggregate: Aggregation over tokens, as in `token-mean`.
            old: Source of the log-probs before the update: `recompute`, `rollout` (the engine's) or `self` (this pass).
            kl: A KL term, as in `kl.k3(coef=0.001)`.
            entropy_coef: Weight of the entropy bonus.
            correction: Correction for tokens sampled by other numerics or older weights.
            source: The role whose weights are copied.
            decay: Share of the old weights in each copy (EMA); above 0.5 the role needs weights of float32.
            ptx_coef: Weight of the likelihood of pre-training text.
            positive_coef: Weight of the likelihood of right answers.
            observation_coef: Weight of the likelihood of observations in episodes.
            replay: `inference` takes the experts of a mixture that the engine chose, `training` those of the
                recomputed log-probs, with weights from the present
                scores; for log-probs recomputed before the update too.
        """
        source = source.name if isinstance(source, Role) else source
        params = {
            "of": of,
            "loss": loss,
            "aggregate": aggregate,
            "old": old,
            "kl": kl,
            "entropy_coef": entropy_coef,
            "correction": correction,
            "source": source,
            "decay": decay,
            "ptx_coef": ptx_coef or None,
            "positive_coef": positive_coef or None,
            "observation_coef": observation_coef or None,
            "replay": replay,
        }
        return make_stage("update", self.name, params, id=id, when=when, after=after)

    def method(
        self, type: str, *, id: str | None = None, when: When = ALWAYS, after: Sequence[str] = (), **params: Any
    ) -> Stage:
        """Return a stage that calls a method of a user's class on the role's workers.

        Args:
            type: `module:Class.method` or `file.py:Class.method`, registered with a protocol and the columns that it
                writes.
            params: Arguments of the method besides rows.
        """
        return make_stage(type, self.name, params, id=id, when=when, after=after)


actor = Role("actor")
reference = Role("reference")
critic = Role("critic")
reward = Role("reward")
cost = Role("cost")
cost_critic = Role("cost_critic")
