"""A vLLM logits processor that draws tokens as the embedded engine does: by each row's random numbers.

logits ──sample, by (key, position)──▶ token ──▶ logits: -inf, and the token's log-prob in its place

vLLM then can only draw this token, and reports that number as the token's log-prob: log-softmax(logits / temperature)
before any top-k or top-p cut, which no mode of vLLM returns. Columns per token that are functions of the
logits are computed here and kept until the row has ended. Only vLLM's plug-in interface is used.

Where vLLM speculates it takes no plug-in: a worker replaces the sampler of its drafts.

logits of several positions of a row ──▶ a token each ──▶ those up to the first that differs from its draft

Shapes: B rows, V vocabulary, N positions whose tokens are drawn, D drafts of a row at most.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler

from braidrl.algorithms.random import uniform
from braidrl.data.token_columns import TokenColumn, column_of, computed_columns
from braidrl.engines.requests import Draws, parse_draws
from braidrl.engines.sampling import BatchSampling, batch_sampling, sample, scaled
from braidrl.errors import UserError


class Drawing(NamedTuple):
    """One row's draws, and the list of its tokens, to which vLLM appends."""

    draws: Draws
    tokens: list[int]


class DrawByRow(LogitsProcessor):
    """The logits processor; vLLM makes one per engine, and passes it the rows' positions in the batch."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for a request that Braid did not make, or with a column that has no function here: a server
        answers it with an error and continues.
        """
        try:
            for name in parse_draws(sampling_params.extra_args).columns:
                column_of(name)
        except UserError as error:
            raise ValueError(str(error)) from error

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._draws: dict[int, Drawing] = {}
        self._batch: tuple[list[Drawing], Tensor, BatchSampling] | None = None
        """The rows of a step in vLLM's order, with their keys (B,) and settings; None after a change."""
        self._columns: tuple[TokenColumn, ...] = ()
        """The columns that some row of the step has."""
        self._values: dict[str, dict[int, dict[str, Tensor]]] = {}
        """By row and index of its tokens the values of its columns."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            process_dict_updates(
                self._draws, batch_update, lambda params, _, tokens: Drawing(parse_draws(params.extra_args), tokens)
            )
            self._batch = None

    def apply(self, logits: Tensor) -> Tensor:
        """Draw tokens (B,) of the rows; overwrite `logits` (B, V)."""
        tokens, log_probs = self.draw(logits, [1] * len(logits))
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], log_probs[:, None].to(logits.dtype))

    def draw(self, logits: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens (N,) of each row's next `counts` positions, and their log-probs (N,); `logits` (N, V) are
        overwritten.
        """
        if self._batch is None:
            rows = [self._draws[index] for index in range(len(counts))]
            keys = torch.tensor([row.draws.key for row in rows], dtype=torch.int64, device=self._device)
            self._batch = rows, keys, batch_sampling([row.draws.sampling for row in rows], self._device)
            self._columns = tuple(map(column_of, dict.fromkeys(name for row in rows for name in row.draws.columns)))
        rows, keys, choice = self._batch
        drawn = [(number, len(row.tokens) + n) for number, row in enumerate(rows) for n in range(counts[number])]
        positions = torch.tensor([rows[number].draws.first + index for number, index in drawn], device=keys.device)
        if len(drawn) > len(rows):
            row_of = torch.tensor([number for number, _ in drawn], device=keys.device)
            keys, choice = keys[row_of], choice.of(row_of)
        # Drawing overwrites the logits.
        distribution = scaled(logits.clone(), choice) if self._columns else logits
        tokens, log_probs = sample(logits, choice, uniform(keys, positions))
        values = computed_columns(self._columns, distribution, tokens)
        for entry, (number, index) in enumerate(drawn if values else ()):
            if rows[number].draws.columns:
                # A row that vLLM has preempted draws no token twice; a token after a wrong draft is drawn again.
                values_of_row = self._values.setdefault(rows[number].draws.name, {})
                values_of_row[index] = {name: column[entry] for name, column in values.items()}
        return tokens, log_probs

    def take_values(self, rows: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return the columns of rows, (T, ...) on the CPU by row and column, and forget them; none without tokens."""
        by_row = {row: self._values.pop(row) for row in rows if row in self._values}
        return {
            row: {name: torch.stack([drawn[n][name] for n in sorted(drawn)]).cpu() for name in drawn[min(drawn)]}
            for row, drawn in by_row.items()
        }


class DrawsOfDrafts(RejectionSampler):
    """vLLM's sampler of rows with drafts: a draft is accepted if it is the token that the row's random number draws."""

    def __init__(self, draws: DrawByRow, replaced: RejectionSampler) -> None:
        super().__init__(replaced.sampler)
        self._draws = draws

    def forward(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, *_: Any) -> SamplerOutput:
        """Draw the tokens of all drafted positions and of the one after them, from `logits` (N, V); return the tokens
        (B, D + 1), without those after the first that differs from its draft.
        """
        counts = [drafts + 1 for drafts in metadata.num_draft_tokens]
        tokens, log_probs = self._draws.draw(logits.float(), counts)
        offsets = torch.arange(metadata.max_spec_len + 1, device=tokens.device)
        is_drawn = offsets < torch.tensor(counts, device=tokens.device)[:, None]
        is_drafted = offsets < torch.tensor(metadata.num_draft_tokens, device=tokens.device)[:, None]
        by_row = torch.full(is_drawn.shape, PLACEHOLDER_TOKEN_ID, dtype=tokens.dtype, device=tokens.device)
        drafts, log_probs_by_row = by_row.clone(), torch.zeros(is_drawn.shape, device=tokens.device)
        by_row[is_drawn], log_probs_by_row[is_drawn] = tokens, log_probs.float()
        drafts[is_drafted] = metadata.draft_token_ids.to(drafts.dtype)
        accepted = (is_drafted & (by_row == drafts)).cumprod(-1).sum(-1, keepdim=True)
        by_row.masked_fill_(offsets > accepted, PLACEHOLDER_TOKEN_ID)
        ids = by_row.clamp(min=0).flatten()
        chosen = LogprobsTensors(ids[:, None].int(), log_probs_by_row.reshape(-1, 1), torch.zeros_like(ids))
        return SamplerOutput(sampled_token_ids=by_row.int(), logprobs_tensors=chosen)
