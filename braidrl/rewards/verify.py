"""Computes the columns `score`, `correct` and `reward` of rows: decodes the sampled tokens and lets the pool check
them.

rows ──submit──> one check per row and verifier ──> pool (beside generation) ──> Pending ──result──> index columns
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from braidrl.config import RewardConfig, VerifierConfig
from braidrl.data.rows import Rows, Uid
from braidrl.errors import UserError
from braidrl.observe.metrics import FAILURE, Sums
from braidrl.rewards.pool import CallOutcome, RewardPool
from braidrl.rewards.verifier import Completion, Verifier, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Scores = tuple[float, float]
RIGHT_OR_WRONG = (1.0, 0.0)
LEFT_OUT = "the row is left out: processes have ended with it"
NOTED = 3
"""Number of failure messages kept from some rows: the most frequent."""


@dataclass(eq=False)
class Pending:
    """Checks in flight for some rows, in the rows' order."""

    rewards: "RuleRewards"
    checks: list[list[tuple[Verifier, Future[CallOutcome]]]]
    prefix: str

    def done(self) -> bool:
        """Return True if `result` will return without waiting."""
        return all(future.done() for row in self.checks for _, future in row)

    def result(self, scores: Scores = RIGHT_OR_WRONG) -> dict[str, Tensor]:
        """Wait, and return the columns `score`, `correct`, `reward`, (B,) float32 each, and `score_<name>` for several
        verifiers.

        `score` and, before reward shaping, `reward` are Σ weight · score over the row's verifiers. `correct`, 0 or 1,
        is the first verifier's verdict. `score_<name>` is NaN in rows whose source does not have that verifier.
        """
        rows = [[(verifier, judged(future.result(), scores)) for verifier, future in row] for row in self.checks]
        total = torch.tensor([sum(v.weight * score for v, (score, _) in row) for row in rows], dtype=torch.float32)
        correct = torch.tensor([float(row[0][1][1]) for row in rows], dtype=torch.float32)
        columns = {"score": total, "correct": correct, "reward": total.clone()}
        if len(self.rewards.labels) > 1:
            named = [{verifier.label: score for verifier, (score, _) in row} for row in rows]
            for label in self.rewards.labels:
                values = [row.get(label, float("nan")) for row in named]
                columns[f"score_{label}"] = torch.tensor(values, dtype=torch.float32)
        return {self.prefix + name: column for name, column in columns.items()}

    def count(self, scores: Scores, sums: Sums) -> dict[tuple[str, str], str]:
        """Wait, add each check's score, metrics and failure to the sums, and return a message by label and failure."""
        messages, failed = dict[tuple[str, str], str](), set[int]()
        counts: Counter[str] = Counter()
        for number, row in enumerate(self.checks):
            for verifier, future in row:
                outcome, label = future.result(), verifier.label
                sums.add(f"checks/{label}/score_mean", judged(outcome, scores)[0])
                for name, value in outcome.metrics.items():
                    sums.add(f"reward/{label}/{name}", value)
                if outcome.failure is not None:
                    failed.add(number)
                    words = f"verifier {label}: {outcome.failure}: {outcome.detail}"
                    counts[words] += 1
                    messages.setdefault((label, outcome.failure), words)
                    sums.add(f"reward/failures/{label}/{outcome.failure}", 1)
        sums.add("reward/failed_fraction", len(failed), len(self.checks))
        for words, count in counts.most_common(NOTED):
            sums.add(FAILURE + words, 0.0, count)
        return messages


def judged(outcome: CallOutcome, scores: Scores) -> tuple[float, bool]:
    """Return the score and correctness of one check.

    A bare score of at least a right answer's is correct; a failure is wrong.
    """
    right, wrong = scores
    if outcome.failure is not None:
        return wrong, False
    if outcome.score is None:
        return (right if outcome.correct else wrong), bool(outcome.correct)
    return outcome.score, outcome.score >= right if outcome.correct is None else outcome.correct


class RuleRewards:
    """The verifiers of a run and their processes, until `close`."""

    def __init__(
        self,
        config: RewardConfig,
        per_source: Mapping[int, Sequence[VerifierConfig]],
        tokenizer: "PreTrainedTokenizerBase",
        source_names: Mapping[int, str] | None = None,
        ends: Collection[int] = (),
    ) -> None:
        """Resolve the verifiers: those of the run, and those of single sources.

        `ends` are the tokens that end a response; verifiers do not get them.
        """
        self._tokenizer, self._ends = tokenizer, ends
        self._skips_special = config.skip_special_tokens
        self._source_names = source_names or {}
        self._default = weighted_verifiers(config.verify)
        self._per_source = {
            source: weighted_verifiers(verifiers_of_source) for source, verifiers_of_source in per_source.items()
        }
        every = [self._default, *self._per_source.values()]
        self.labels = list(
            dict.fromkeys(verifier.label for verifiers_of_source in every for verifier in verifiers_of_source)
        )
        self._pool = RewardPool(config)

    def submit(self, rows: Rows, of: str | None = None, left_out: Collection[Uid] = ()) -> Pending:
        """Start checking rows without waiting; `of` is the namespace of the tokens.

        Rows that are `left_out` count as failed checks.
        """
        prefix = f"{of}." if of else ""
        texts = responses(rows, self._tokenizer, self._ends, self._skips_special, prefix)
        checks = []
        died = Future[CallOutcome]()
        died.set_result(CallOutcome(failure="died", detail=LEFT_OUT))
        uids = rows.uids() if left_out else ()
        for row, source in enumerate(rows["source"].tolist()):
            metadata = rows["metadata"][row]
            name = self._source_names.get(source, str(source))
            completion = Completion(metadata.get("prompt"), texts[row], metadata.get("answer"), metadata, name)
            verifiers = self._per_source.get(source, self._default)
            if uids and uids[row] in left_out:
                checks.append([(verifier, died) for verifier in verifiers])
                continue
            checks.append([(verifier, self._pool.submit(completion, verifier)) for verifier in verifiers])
        return Pending(self, checks, prefix)

    def close(self) -> None:
        self._pool.close()


def weighted_verifiers(configs: Sequence[VerifierConfig]) -> list[Verifier]:
    """Resolve the verifiers of a source under unique labels. Raises UserError as `resolve`, or for an empty list."""
    if not configs:
        raise UserError("`verify` names no verifier; write one, as in `verify: exact`")
    labels: Counter[str] = Counter()
    weighted = []
    for config in configs:
        verifier = resolve(config.name, config.params)
        labels[verifier.label] += 1
        number = f"_{labels[verifier.label]}" if labels[verifier.label] > 1 else ""
        weighted.append(replace(verifier, weight=config.weight, label=verifier.label + number))
    return weighted


def responses(
    rows: Rows, tokenizer: "PreTrainedTokenizerBase", ends: Collection[int], skip_special_tokens: bool, prefix: str = ""
) -> list[str]:
    """Return each row's sampled text without end tokens and padding; with `skip_special_tokens` no special token."""
    tokens, mask = rows[f"{prefix}tokens"], rows[f"{prefix}action_mask"]
    hidden = {*ends, getattr(tokenizer, "pad_token_id", None)}
    sampled = ([token for token in ids if token not in hidden] for ids in tokens.where(mask.values.bool()).tolist())
    return decoded(tokenizer, list(sampled), skip_special_tokens)


WORTH_THREADS = 4096
"""Tokens from which on threads that decode rows save more than it takes to wake them."""


def decoded(tokenizer: Any, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
    """Return the text of each row of ids, as `tokenizer.decode` does: by the Rust library, if it can."""
    from transformers import PreTrainedTokenizerFast  # Processes that only call verifiers do not need it.

    plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if plain and not tokenizer.clean_up_tokenization_spaces:
        tokenizer = tokenizer.backend_tokenizer
        if sum(map(len, rows)) > WORTH_THREADS:
            texts: list[str] = tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens)
            return texts
    return [tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in rows]
