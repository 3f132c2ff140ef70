"""The decode batch: puts prompts into slots, runs a step for all of them, and removes finished rows.

    expect ──▶ begin ──▶ slots ──step──▶ slots whose rows ended ──take──▶ Response

All slots take part in every step, idle ones without effect, so a row's results do not depend on the batch composition. When fewer rows
than slots remain, the step shrinks in multiples of 16 rows: from 16 rows on, a CPU's matrix products give each row the same bits for any
number of rows.

Shapes: B slots in the step.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from braidrl.engines.embedded.graphs import StepGraphs
from braidrl.engines.embedded.native_decoder import NativeDecoder
from braidrl.engines.embedded.sharded_decoding import PipelineRanks
from braidrl.engines.embedded.shared_prefill import ROW_MULTIPLE, Prompts, prompt_key
from braidrl.engines.embedded.states import SlotStates
from braidrl.engines.requests import Response
from braidrl.engines.row_request import EngineRow
from braidrl.engines.sampling import sample
from braidrl.training.compute.slots import SlotCache, SlotStep, round_up
from braidrl.training.decoders.body import plan_of_model, run_body
from braidrl.training.decoders.cohorts import Cohorts
from braidrl.training.decoders.head import logits_of


class SlotBatch:
    """Rows in `slots` slots (a multiple of 16) of one model; with `shrink` a step computes as few rows as possible."""

    def __init__(
        self, model: PreTrainedModel, slots: int, seed: int, shrink: bool, native: NativeDecoder | None = None,
        graphs: StepGraphs | None = None, pipeline: PipelineRanks | None = None,
    ) -> None:  # fmt: skip
        """Start empty. `native` computes steps instead of the model's own forward; `graphs` record and replay that forward.

        With `pipeline`, the last rank draws.
        """
        self._pipeline = pipeline
        self._model, self.slots, self._seed, self._shrink = model, slots, seed, shrink
        self._native, self._graphs = native, graphs
        self._cache = SlotCache(slots, model.dtype, model.device)
        self.prompts = Prompts()
        self._cohorts = Cohorts(model) if plan_of_model(model).by_rows else None
        self.log_prob_dtype = torch.promote_types(model.dtype, torch.float32)
        self._states = SlotStates.idle(slots, 1, 1, self.log_prob_dtype, model.device)
        self.rows: dict[int, EngineRow] = {}
        self.clear()

    def clear(self, release: bool = True) -> None:
        """Drop every row and free the keys and values; without `release`, memory that recorded steps use stays."""
        self.rows.clear()
        if self._cohorts is not None:
            self._cohorts.clear()
        self._positions, self._response_tokens, self._stop_tokens = 0, 1, 1
        if release or self._graphs is None:
            self._cache.release()
            self._states = SlotStates.idle(self.slots, 1, 1, self.log_prob_dtype, self._model.device)
        else:
            self._states.end(self._index(range(self.slots)))
        self._steps = 0
        self._changed()

    def expect(self, row: EngineRow) -> None:
        """Reserve room for a row and keep its prompt."""
        self._positions = max(self._positions, len(row.request.prompt) + row.limit - 1)
        self._response_tokens = max(self._response_tokens, row.limit)
        self._stop_tokens = max(self._stop_tokens, len(row.stop_token_ids))
        self.prompts.expect(row.request.prompt)

    def begin(self, new: Mapping[int, EngineRow], version: int) -> None:
        """Put expected rows into free slots, and compute the prompts that are missing."""
        self._cache.reserve(self._positions)
        if self._native is not None:
            self._native.refresh()
        self._states = self._states.with_room(self._response_tokens, self._stop_tokens)
        if self._graphs is not None:
            states = (self._states.current, self._states.position, *self._cache.tensors())
            self._graphs.invalidate_if_moved((*states, *self._model.parameters(), *self._model.buffers()))
        if self._cohorts is not None:
            self._cohorts.begin({slot: row.request.prompt for slot, row in new.items()})
            for row in new.values():
                self.prompts.forget(row.request.prompt)
        else:
            self.prompts.compute(self._model, (row.request.prompt for row in new.values()))
            # Copy each prompt's keys and values into the slots of all rows that begin with it.
            by_prompt: dict[bytes, list[int]] = {}
            for slot, row in new.items():
                by_prompt.setdefault(prompt_key(row.request.prompt), []).append(slot)
            for slots in by_prompt.values():
                prompt = new[slots[0]].request.prompt
                self._cache.fill(self._index(slots), self.prompts.prefix(prompt))
                for _ in slots:
                    self.prompts.forget(prompt)
        for row in new.values():
            row.begun = self._steps
            row.versions.append((0, version))
        self.rows |= new
        self._states.begin(self._index(new), list(new.values()), self._seed)
        self._changed()

    def version_changed(self, version: int) -> None:
        """Continue all rows with new weights, and discard cached prompts."""
        self.prompts.discard()
        for slot, row in self.rows.items():
            row.versions.append((int(self._states.drawn[slot]), version))

    def step(self) -> list[int]:
        """Draw one token for every row, and return the slots of rows that ended."""
        # Move rows down into free slots where that makes the step smaller.
        target = round_up(len(self.rows), ROW_MULTIPLE)
        if self._shrink and target < len(self._active.current):
            free = (slot for slot in range(target) if slot not in self.rows)
            for source in [slot for slot in self.rows if slot >= target]:
                slot = next(free)
                row = self.rows[slot] = self.rows.pop(source)
                self._cache.move(source, slot, row.length(self._steps))
                self._states.move(source, slot)
                if self._cohorts is not None:
                    self._cohorts.move(source, slot)
            self._changed()
        tokens, ended = self._decode()
        slots = set(ended.nonzero().flatten().tolist())
        if self._watched:
            ids = tokens.tolist()
            slots.update(slot for slot, row in self._watched.items() if row.record_token(ids[slot]))
        return sorted(slots)

    def take(self, slots: Sequence[int], aborted: bool = False) -> list[Response]:
        """Return the responses in these slots, which become idle."""
        if not slots:
            return []
        index = self._index(slots)
        tokens, log_probs = self._states.tokens[index].cpu(), self._states.log_probs[index].cpu()
        drawn = self._states.drawn[index].tolist()
        self._states.end(index)
        if self._cohorts is not None:
            self._cohorts.end(slots)
        rows = [self.rows.pop(slot) for slot in slots]
        self._changed()
        return [
            row.finished(tokens[number, :count].clone(), log_probs[number, :count].clone(), aborted)
            for number, (row, count) in enumerate(zip(rows, drawn, strict=True))
        ]

    def _decode(self) -> tuple[Tensor, Tensor]:
        """Draw one token for each slot of the step, (B,), and mark rows that reached a stop token or their limit, (B,)."""
        states, longest = self._active, self._longest + self._steps
        native, uniforms = self._native, states.uniforms()
        if native:
            logits = native.logits(states.current, states.position, self._cache)
        elif self._graphs is not None:
            logits = self._graphs.logits(len(states.current), longest, self._logits)
        else:
            logits = self._logits(longest)
        if self._pipeline is not None and not self._pipeline.is_last:
            tokens = torch.empty_like(states.current)
            log_probs = logits.new_empty(len(logits), dtype=self.log_prob_dtype)
        elif native and self._sampling.top_k is None and self._sampling.top_p is None:
            tokens, log_probs = native.kernels.draw(logits, states.temperature, states.greedy, uniforms)
        else:
            tokens, log_probs = sample(logits, self._sampling, uniforms)
        if self._pipeline is not None:
            for values in (tokens, log_probs):
                dist.broadcast(values, group=self._pipeline.group, group_src=self._pipeline.size - 1)
        self._steps += 1
        return tokens, states.advance(tokens, log_probs)

    def _logits(self, longest: int) -> Tensor:
        """Run the model's own forward, (B, V); `longest` is the length of the longest row."""
        states = self._active
        if self._cohorts is not None:
            return logits_of(self._model, self._cohorts.hidden(states.current, states.position))
        context = SlotStep(self._cache, states.position, longest)
        hidden = run_body(self._model, states.current[:, None], states.position[:, None], context)
        return logits_of(self._model, hidden[:, 0])

    def _changed(self) -> None:
        top = round_up(max(self.rows, default=0) + 1, ROW_MULTIPLE) if self._shrink else self.slots
        self._active = self._states.first(top)
        self._sampling = self._active.batch_sampling([row.request.sampling for row in self.rows.values()])
        self._longest = max((row.length(self._steps) for row in self.rows.values()), default=0) - self._steps
        self._watched = {
            # Stop texts and `on_token` need each token as soon as it is drawn.
            slot: row
            for slot, row in self.rows.items()
            if row.stop_texts is not None or row.request.on_token is not None
        }

    def _index(self, slots: Iterable[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.int64, device=self._states.current.device)
