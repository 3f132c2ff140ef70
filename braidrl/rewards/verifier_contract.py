"""The contract of verifiers, as checks that run against Braid's and users' verifiers in a separate process, as in a
run.

    subject = VerifierUnderTest("verifier.py:counts_steps", right=Completion("2+2=", "4", "4"), wrong=Completion("2+2=",
    "5", "4")) for check in CHECKS:
        check(subject)

A failed check raises AssertionError.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from braidrl.config import RewardConfig
from braidrl.rewards.pool import RewardPool
from braidrl.rewards.verifier import Completion, resolve

ODD = ("", " ", "\n\n", "\0", "∑ 😀 \u202e", "####", "-" * 10_000, "1e999999", "{[(<")


@dataclass(frozen=True)
class VerifierUnderTest:
    """A verifier as named in a configuration, with a right and a wrong answer."""

    name: str
    right: Completion
    wrong: Completion
    params: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        """Return the score of each completion, 1 and 0 for right and wrong.

        Raises AssertionError for a failed check.
        """
        verifier, scores = resolve(self.name, self.params), []
        with RewardPool(RewardConfig(timeout_s=self.timeout_s)) as pool:
            for completion, future in [(c, pool.submit(c, verifier)) for c in completions]:
                outcome = future.result()
                assert outcome.failure is None, (
                    f"{self.name} on {completion.response[:80]!r}: {outcome.failure}: {outcome.detail}"
                )
                scores.append(float(bool(outcome.correct)) if outcome.score is None else outcome.score)
        return scores


def what_is_right_scores_higher(subject: VerifierUnderTest) -> None:
    right, wrong = subject.scores([subject.right, subject.wrong])
    assert right > wrong


def the_same_answer_gets_the_same_score(subject: VerifierUnderTest) -> None:
    first, between, again = subject.scores([subject.right, subject.wrong, subject.right])
    assert first == again != between


def odd_answers_get_a_score_too(subject: VerifierUnderTest) -> None:
    assert len(subject.scores([replace(subject.right, response=text) for text in ODD])) == len(ODD)


CHECKS: tuple[Callable[[VerifierUnderTest], None], ...] = (
    what_is_right_scores_higher,
    the_same_answer_gets_the_same_score,
    odd_answers_get_a_score_too,
)
