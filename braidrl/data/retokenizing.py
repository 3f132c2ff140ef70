"""Retokenisation of rows for a role that only scores: its model reads the same texts with its own tokenizer.

prompt ──the role's own chat template──▶ ids ╮
tokens after the prompt ──decode──▶ text ──▶ ids ┴▶ sequence, action mask
"""

from dataclasses import dataclass
from typing import Any

import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.data.chat import TEMPLATE, tools_of
from braidrl.data.rows import IDENTITY, Rows
from braidrl.data.templates import PromptTemplate


@dataclass(frozen=True)
class Retokenizer:
    """Conversion of rows from the tokenizer that generated them to a role's own, with the role's own prompt template."""

    generating: Any
    template: PromptTemplate

    def rows(self, rows: Rows) -> Rows:
        """Return the same rows in the role's own token ids.

        Args:
            rows: Rows with tokens, prompt_length and metadata, which includes the example's prompt.

        Returns:
            Identity, length, tokens, action_mask and sequence_lengths. An end of sequence becomes the role's own.
        """
        prompts, answers = [], []
        for number in range(len(rows)):
            about = rows["metadata"][number]
            template = self.template.with_arguments(about.get(TEMPLATE) or {})
            prompts.append(template.encode(about["prompt"], tools_of(about.get("tools")) or []))
            answers.append(self._answer(rows["tokens"][number][int(rows["prompt_length"][number]) :].tolist()))
        pairs = list(zip(prompts, answers, strict=True))
        tokens = Ragged.from_rows([prompt + answer for prompt, answer in pairs], torch.int64)
        mask = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in pairs]
        return Rows(
            {
                **{name: rows[name] for name in IDENTITY},
                "length": tokens.lengths,
                "tokens": tokens,
                "action_mask": Ragged.from_rows(mask, torch.bool),
                "sequence_lengths": Ragged.from_lengths(tokens.lengths, torch.ones_like(tokens.lengths)),
            }
        )

    def _answer(self, ids: list[int]) -> list[int]:
        text = self.generating.decode(ids, skip_special_tokens=True)
        if ids and ids[-1] == self.generating.eos_token_id:
            return self.template.encode_responses([text])[0]
        return self.template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
