"""Partial rollout: rows that were suspended, with their earlier tokens and the budget of their next ones.

A response draws at most its token budget, is suspended, and resumes in a later iteration:

admitted, no tokens yet ─▶ generate ─over its budget──▶ suspended: tokens, log-probs, versions
    ─▶ generate, one version later
                                    ─ended──▶ verify, select, train

Suspended and newly admitted rows are ordinary rows whose `finish_reason` is ABORT.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from braidrl.agents.resuming import Recorded
from braidrl.algorithms.policy_metrics import repeats_itself
from braidrl.config import Config
from braidrl.data.rows import FinishReason, Rows, Uid
from braidrl.data.token_columns import VERSIONS, returned_columns
from braidrl.engines.requests import Request, Response, joined, remaining_request
from braidrl.flow import Stage
from braidrl.flow.signatures import columns_of

TO_THE_END = "to_the_end"
"""Parameter of a generate stage whose rows have no budget."""


def budget_of(stage: Stage, versions: Tensor, config: Config, version: int) -> int | None:
    """Return the tokens that weights of `version` may add to a row whose tokens have `versions`; None, without a limit,
    for a row too stale for the next batch.
    """
    age = version - int(versions.min()) if len(versions) else 0
    ends = TO_THE_END in stage.params or age >= config.trainer.max_staleness
    return None if ends else config.rollout.tokens_per_iteration


def recorded_episodes(stage: Stage, rows: Rows, config: Config, version: int) -> dict[Uid, Recorded]:
    """Return the recorded earlier draws of the rows' episodes, with their budgets."""
    names = [column.name for column in returned_columns(columns_of(stage))]
    recorded = dict[Uid, Recorded]()
    for i, uid in enumerate(rows.uids()):
        tokens, mask, lengths = rows["tokens"][i], rows["action_mask"][i], rows["sequence_lengths"][i]
        per_token = {name: rows[name][i] for name in names}
        budget = budget_of(stage, per_token[VERSIONS], config, version)
        sequence = tokens[len(tokens) - int(lengths[-1]) :]
        recorded[uid] = Recorded(tokens[mask.bool()], per_token, sequence, budget)
    return recorded


class PartialResponses:
    """The earlier tokens of a generate stage's rows, and their current budgets."""

    def __init__(self, stage: Stage, rows: Rows, config: Config, version: int) -> None:
        """Collect the earlier tokens of rows, to be continued by weights of `version`."""
        self.config, self.requests = config, dict[Uid, Request]()
        self.before, self.budgets = dict[Uid, Response](), dict[Uid, int | None]()
        starts, reasons = rows["prompt_length"].tolist(), rows["finish_reason"].tolist()
        names = [column.name for column in returned_columns(columns_of(stage))]
        for i, uid in enumerate(rows.uids()):
            per_token = {name: rows[name][i] for name in names}
            earlier = Response(uid, rows["tokens"][i][starts[i] :], FinishReason(reasons[i]), per_token)
            self.before[uid] = earlier
            self.budgets[uid] = budget_of(stage, earlier.versions, config, version)
        self.complete = {uid: r for uid, r in self.before.items() if r.finish_reason is not FinishReason.ABORT}
        """The responses that had ended before."""

    def rest(self, requests: Iterable[Request]) -> list[Request]:
        """Return the remaining requests of unfinished rows, within their budgets."""
        for request in requests:
            rest, budget = remaining_request(request, self.before[request.uid]), self.budgets[request.uid]
            if rest is not None:
                most = min(rest.sampling.max_tokens, budget or rest.sampling.max_tokens)
                self.requests[request.uid] = replace(rest, sampling=replace(rest.sampling, max_tokens=most))
        return list(self.requests.values())

    def joined(self, drawn: Response, max_sequence_tokens: int) -> Response:
        """Return the response appended to its earlier part; it is suspended if its budget is spent, unless it is
        complete or repeats a phrase.
        """
        request, response = self.requests[drawn.uid], joined([self.before[drawn.uid], drawn])
        spent = drawn.finish_reason is FinishReason.LENGTH and len(drawn.tokens) == self.budgets[drawn.uid]
        room = max_sequence_tokens - len(request.prompt) - len(drawn.tokens)
        if not spent or room < 1 or len(response.tokens) >= self.config.rollout.max_response_tokens:
            return response
        window = self.config.rollout.repeated_tokens
        repeats = window is not None and repeats_itself(response.tokens, window)
        return replace(response, finish_reason=FinishReason.REPEAT if repeats else FinishReason.ABORT)
