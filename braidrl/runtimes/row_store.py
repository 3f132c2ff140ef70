"""Sources and files of rows, the same under every runtime, in the process that holds the rows.

training data, held-out sets, recordings, checkpoints ──make──▶ rows ──record, save──▶ parquet, surplus of a checkpoint

If several processes hold a run's rows, each reads and writes its share.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from braidrl.agents.trajectory import response_columns, unplayed_columns
from braidrl.data.chat import end_ids_of
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.curricula import Curriculum
from braidrl.data.loader import PromptLoader, as_rows, eval_rows, join_texts
from braidrl.data.messages import Message
from braidrl.data.packing import equal_share
from braidrl.data.rows import FinishReason, Rows
from braidrl.data.token_columns import returned_columns
from braidrl.data.vision import moved
from braidrl.engines.requests import Response
from braidrl.flow import Kind
from braidrl.flow.signatures import columns_of
from braidrl.observe.episodes import segment_tokens
from braidrl.observe.recorded_rows import check_rows, read_rollouts, write_rollouts
from braidrl.observe.rollouts import parts_of
from braidrl.rewards.verify import decoded, responses
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.training.pretrained import model_settings

TEXT_COLUMNS = frozenset(("prompt", "tokens", "action_mask"))
"""The columns needed for the texts of a row."""
TURN_LENGTHS = "turn_lengths"
SEGMENTED = ("tokens", "action_mask", "sequence_lengths", TURN_LENGTHS)
"""The columns of an episode that say where its turns and observations are."""


class RowText(NamedTuple):
    """A row's prompt and response as text."""

    prompt: str
    response: str
    """Without special tokens; empty before generation."""


class Admission(Message):
    """The prompts with these admission numbers."""

    numbers: Sequence[int]
    examples: Sequence[tuple[int, int]] = ()
    """Source and index of each prompt, if a curriculum has drawn them."""


class HeldOut(Message):
    """An evaluation set by name."""

    name: str
    prompts: int | None = None
    """Limit of prompts; by default `evaluation.max_prompts`."""


class Recording(Message):
    """Recorded rows in parquet as they were sampled, without the columns of later stages."""

    path: Path


class Surplus(Message):
    """Rows that a checkpoint keeps for the next batch: a file, or a folder of files."""

    path: Path


Origin = Admission | HeldOut | Recording | Surplus


class RowStore:
    """Makes rows from their origin, and writes rows to files."""

    def __init__(self, prepared: Prepared, curriculum: Curriculum | None = None) -> None:
        """Store the sources; only the process that admits prompts has a curriculum."""
        config, sources, texts, self.flow = prepared.config, prepared.sources, prepared.texts, prepared.flow
        self.config, self.tokenizer, self.eval_sources = config, prepared.tokenizer, prepared.eval_sources
        self.vision = prepared.vision
        # The embedding may have more rows than the tokenizer has tokens.
        self.vocabulary = max(len(self.tokenizer), int(model_settings(config.model).get("vocab_size") or 0))
        self.ends = end_ids_of(config.model.expanduser(), self.tokenizer)
        self.loader = PromptLoader(sources, config.seed, config.data.shuffle, curriculum) if sources else None
        self.texts = PromptLoader([texts], config.seed, config.data.shuffle) if texts else None

    def make(self, origin: Origin, rank: int = 0, ranks: int = 1) -> Rows:
        """Return the rows of `origin`, or the share of one of several ranks, which may be empty.

        Raises UserError if a file is missing.
        """
        match origin:
            case Admission(numbers, examples):
                assert self.loader is not None, "no training data was loaded"
                ranks = min(ranks, len(numbers))
                if rank >= ranks:
                    return Rows({})
                share, samples = equal_share(len(numbers), rank, ranks), self.config.rollout.samples_per_prompt
                local_rows = slice(share.start, share.stop)
                rows = as_rows(self.loader.peek(numbers[local_rows], examples[local_rows]), samples)
                if self.config.rollout.tokens_per_iteration is not None:
                    # Partial rollout resumes from the columns of empty responses; log-probs have the engine's data
                    # type.
                    dtype = self.config.rollout.dtype or self.config.dtype
                    engine_dtype = torch.float64 if dtype == "float64" else torch.float32
                    stages = [stage for stage in self.flow.stages if stage.kind is Kind.GENERATE]
                    names = list(dict.fromkeys(name for stage in stages for name in columns_of(stage)))
                    values = {column.name: column.empty(engine_dtype) for column in returned_columns(names)}
                    nothing = torch.empty(0, dtype=torch.int64)
                    empty = [Response(uid, nothing, FinishReason.ABORT, values) for uid in rows.uids()]
                    reflections = torch.zeros(len(rows), dtype=torch.int64)
                    columns = response_columns(rows, empty, names)
                    if any("environment" in stage.params for stage in stages):
                        columns = unplayed_columns(rows, names, values)
                    rows = rows.with_columns({**columns, "reflections": reflections})
                return join_texts(rows, self.texts, samples) if self.texts else rows
            case HeldOut(name, prompts):
                settings = self.config.evaluation
                most = settings.max_prompts if prompts is None else prompts
                # Evaluation sets are numbered after the training sources.
                number = len(self.config.data.train) + list(self.eval_sources).index(name)
                return eval_rows(self.eval_sources[name], settings.samples, most, number, rank, ranks)
            case Recording(path):
                count = self.flow.recorded_stages
                sampled = {name for stage in self.flow.stages[:count] for name in stage.writes}
                later = {name for stage in self.flow.stages[count:] for name in stage.writes}
                rows = read_rollouts(path, rank, ranks).without(later - sampled)
                check_rows(path, rows, self.vocabulary)
                return rows
            case Surplus(path):
                files = parts_of(path)
                if len(files) < ranks:
                    rows = Rows.cat([unpack_rows(file.read_bytes()) for file in files])
                    return rows.take(equal_share(len(rows), rank, ranks))
                share = equal_share(len(files), rank, ranks)
                return Rows.cat([unpack_rows(file.read_bytes()) for file in files[share.start : share.stop]])

    def row_texts(self, rows: Rows) -> list[RowText]:
        """Return each row's prompt and response as text."""
        # The rows of a group have the same prompt.
        prompt_ids, vision = rows["prompt"].tolist(), self.vision
        if vision is not None and "images" in rows:
            # One placeholder for each image is more readable than its tokens.
            pairs = zip(prompt_ids, rows["images"], strict=True)
            spans_of_prompts = [
                (prompt, [s for s in moved(spans, 0) if s.start < len(prompt)]) for prompt, spans in pairs
            ]
            prompt_ids = [vision.collapse(prompt, spans) for prompt, spans in spans_of_prompts]
        ids = list(map(tuple, prompt_ids))
        distinct = list(dict.fromkeys(ids))
        texts = dict(zip(distinct, decoded(self.tokenizer, distinct, False), strict=True))
        prompts = [texts[tokens] for tokens in ids]
        skips = self.config.reward.skip_special_tokens
        texts_of_responses = responses(rows, self.tokenizer, self.ends, skips) if "tokens" in rows else [""] * len(rows)
        return [RowText(*texts) for texts in zip(prompts, texts_of_responses, strict=True)]

    def record(self, path: Path, rows: Rows, later: Rows | None = None) -> None:
        """Write rows with their texts and later stages' columns, for readers; a replay ignores those columns."""
        added = {} if later is None else {name: column for name, column in later.items() if name not in rows}
        rows = rows.with_columns(added)
        prompts, responses = zip(*self.row_texts(rows), strict=True) if len(rows) else ((), ())
        if TURN_LENGTHS in rows and len(rows):
            responses = self.episode_texts(rows)
        write_rollouts(path, rows, list(prompts), list(responses))

    def episode_texts(self, rows: Rows) -> tuple[str, ...]:
        """Return the text of each episode after its prompt: turns and observations, each below a mark with its kind."""
        spans_of_rows = rows.get("images") or [[]] * len(rows)
        columns = {name: rows[name].tolist() for name in SEGMENTED if name in rows}
        hidden = {*self.ends, getattr(self.tokenizer, "pad_token_id", None)}
        marks, ids = list[list[str]](), list[list[int]]()
        for row, spans in enumerate(spans_of_rows):
            marks.append([])
            for kind, turn, _, tokens, _, begin in segment_tokens({name: c[row] for name, c in columns.items()}):
                if begin == 0:  # the prompt
                    continue
                marks[row].append(f"[{kind}]" if turn is None else f"[turn {turn + 1}]")
                inside = [s for s in moved(spans, -begin) if 0 <= s.start < len(tokens)]
                tokens = self.vision.collapse(tokens, inside) if self.vision is not None and inside else tokens
                ids.append(tokens if turn is None else [token for token in tokens if token not in hidden])
        texts = iter(decoded(self.tokenizer, ids, self.config.reward.skip_special_tokens))
        return tuple("\n".join(f"{mark}\n{next(texts)}" for mark in of_row) for of_row in marks)

    def save(self, path: Path, rows: Rows) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack_rows(rows))
