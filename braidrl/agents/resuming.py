"""Episodes that are suspended, in partial rollout, and resume in a later iteration.

iteration k     context ─▶ turn ─▶ observation ─▶ turn, budget spent ──▶ suspended: the row's columns
iteration k+1   a new environment ◀─ recorded turns, one after the other; then engine ─▶ the remaining turn ─▶ ...

A suspended episode consists only of its columns: it resumes on any rank, and after a checkpoint. Its environment is
played again with the recorded actions, and must answer as before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.agents.turns import EnvironmentFailed
from braidrl.data.rows import FinishReason, Uid
from braidrl.engines.engine import Engine
from braidrl.engines.requests import Request, Response, joined, remaining_request, row_of


@dataclass
class Recorded:
    """A row's recorded actions, and the number of tokens that it may draw now."""

    actions: Tensor
    """(T,) int64, of all turns."""
    per_token: Mapping[str, Tensor]
    """The actions' values of the columns that the engine returns."""
    sequence: Tensor
    """(S,) int64, the last sequence of tokens; empty before the first turn."""
    budget: int | None
    """None without a limit."""
    drawn: int = field(default=0, init=False)


class ResumingEpisodes:
    """An engine that answers with recorded actions first, and suspends rows whose budget is spent.

    Without `suspends` such an episode fails.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Mapping[Uid, Recorded],
        tokenizer: PreTrainedTokenizerBase,
        end_ids: tuple[int, ...],
        max_sequence_tokens: int,
        suspends: bool,
    ) -> None:
        self.engine, self.rows, self.max_sequence_tokens = engine, rows, max_sequence_tokens
        self._tokenizer, self._end_ids, self._suspends = tokenizer, end_ids, suspends

    async def submit(self, request: Request) -> Response:
        """Return a turn: recorded, generated, or both. Raises EnvironmentFailed if its context has changed."""
        recorded = self.rows[request.uid]
        row = row_of(request, self._tokenizer, self._end_ids, self.max_sequence_tokens)
        tokens, count, is_complete = recorded.actions[request.first_draw :], 0, False
        while count < len(tokens) and not is_complete:
            is_complete = row.record_token(int(tokens[count]))
            count += 1
        replayed = slice(request.first_draw, request.first_draw + count)
        columns = {name: values[replayed] for name, values in recorded.per_token.items()}
        before = row.finished(aborted=not is_complete, drawn=(tokens[:count], columns))
        before = replace(before, per_token={**before.per_token, **columns})
        if is_complete:
            return before
        if len(recorded.actions) and not recorded.drawn:
            context = torch.cat([request.prompt, tokens])
            if not torch.equal(context, recorded.sequence):
                raise EnvironmentFailed(
                    "replay",
                    "a new environment answered the recorded actions otherwise; write rollout.environment.resume=end",
                )
        rest = remaining_request(request, before)
        assert rest is not None, "a turn with room is not complete"
        left = row.limit - count if recorded.budget is None else recorded.budget - recorded.drawn
        if left < 1:
            return self._suspended(before)
        most = min(rest.sampling.max_tokens, left)
        drawn = await self.engine.submit(replace(rest, sampling=replace(rest.sampling, max_tokens=most)))
        recorded.drawn += len(drawn.tokens)
        response = joined([before, drawn]) if count else drawn
        is_cut = drawn.finish_reason is FinishReason.LENGTH and len(drawn.tokens) == left < row.limit - count
        return self._suspended(response) if is_cut and recorded.budget is not None else response

    async def abort(self, uid: Uid) -> None:
        await self.engine.abort(uid)

    def _suspended(self, turn: Response) -> Response:
        if not self._suspends:
            raise EnvironmentFailed("suspended", "its budget of rollout.tokens_per_iteration was spent")
        return replace(turn, finish_reason=FinishReason.ABORT)
