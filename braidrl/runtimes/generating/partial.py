"""Partial rollout: a response draws at most its token budget, is suspended, and resumes in a later iteration.

admitted, nothing drawn ──▶ generate ──over its budget──▶ suspended: tokens, log-probs, versions ──▶ generate, one version later
                                     ──ended──▶ verify, select, train

Suspended and newly admitted rows are ordinary rows whose `finish_reason` is ABORT.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from braidrl.agents.trajectory import response_columns
from braidrl.algorithms.policy_metrics import repeats_itself
from braidrl.config import Config
from braidrl.data.rows import FinishReason, Rows, Uid
from braidrl.engines.requests import Request, Response, joined, remaining_request
from braidrl.flow import Stage

TO_THE_END = "to_the_end"
"""Parameter of a generate stage whose rows have no budget."""


def admitted(rows: Rows, dtype: str) -> Rows:
    """Return admitted rows with the columns of empty responses; log-probs have the engine's data type."""
    nothing = torch.empty(0, dtype=torch.int64)
    log_probs = nothing.to(torch.float64 if dtype == "float64" else torch.float32)
    empty = [Response(uid, nothing, log_probs, FinishReason.ABORT, nothing) for uid in rows.uids()]
    return rows.with_columns(
        {**response_columns(rows, empty), "reflections": torch.zeros(len(rows), dtype=torch.int64)}
    )


def to_the_end(stage: Stage) -> Stage:
    """Return a generate stage whose rows have no budget."""
    return replace(stage, params={**stage.params, TO_THE_END: True})


class PartialResponses:
    """The earlier tokens of a generate stage's rows, and their present budgets."""

    def __init__(self, stage: Stage, rows: Rows, config: Config, version: int) -> None:
        """Collect the earlier tokens of rows, which weights of `version` continue; a row that would be too stale for the next batch
        has no budget.
        """
        self.config, self.asked = config, dict[Uid, Request]()
        self.before, self.budgets = dict[Uid, Response](), dict[Uid, int | None]()
        starts, reasons = rows["prompt_length"].tolist(), rows["finish_reason"].tolist()
        for i, uid in enumerate(rows.uids()):
            tokens, versions = rows["tokens"][i][starts[i] :], rows["rollout_versions"][i]
            self.before[uid] = Response(uid, tokens, rows["rollout_log_probs"][i], FinishReason(reasons[i]), versions)
            age = version - int(versions.min()) if len(versions) else 0
            ends = TO_THE_END in stage.params or age >= config.trainer.max_staleness
            self.budgets[uid] = None if ends else config.rollout.tokens_per_iteration
        self.complete = {uid: r for uid, r in self.before.items() if r.finish_reason is not FinishReason.ABORT}
        """The responses that had ended before."""

    def rest(self, requests: Iterable[Request]) -> list[Request]:
        """Return the remaining requests of unfinished rows, within their budgets."""
        for request in requests:
            rest, budget = remaining_request(request, self.before[request.uid]), self.budgets[request.uid]
            if rest is not None:
                most = min(rest.sampling.max_tokens, budget or rest.sampling.max_tokens)
                self.asked[request.uid] = replace(rest, sampling=replace(rest.sampling, max_tokens=most))
        return list(self.asked.values())

    def joined(self, drawn: Response, max_sequence_tokens: int) -> Response:
        """Return the whole response; if its budget is spent it is suspended, unless it is complete or repeats itself."""
        request, whole = self.asked[drawn.uid], joined([self.before[drawn.uid], drawn])
        spent = drawn.finish_reason is FinishReason.LENGTH and len(drawn.tokens) == self.budgets[drawn.uid]
        room = max_sequence_tokens - len(request.prompt) - len(drawn.tokens)
        if not spent or room < 1 or len(whole.tokens) >= self.config.rollout.max_response_tokens:
            return whole
        window = self.config.rollout.repeated_tokens
        repeats = window is not None and repeats_itself(whole.tokens, window)
        return replace(whole, finish_reason=FinishReason.REPEAT if repeats else FinishReason.ABORT)
