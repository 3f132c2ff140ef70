"""The embedded engine, which decodes many rows at once with the trainer's own module and needs only torch.

add ──▶ waiting ──free slot──▶ slots ──step──▶ a token for each ──stop, limit──▶ Response
           |                     ▲                                                  |
           └── prompt, computed ─┘                                    its slot is filled in the next step
               once for all rows that share it

All slots take part in every step, idle ones without effect, so a row's results do not depend on the batch composition. When fewer rows
than slots remain, the step shrinks in multiples of 16 rows: from 16 rows on, a CPU's matrix products give each row the same bits for any
number of rows.

Shapes: B slots in the step, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.algorithms.random import uniform
from braidrl.data.chat import end_of_sequence_ids
from braidrl.data.rows import Uid
from braidrl.engines.embedded.graphs import CudaRecorder, StepGraphs
from braidrl.engines.embedded.native_decoder import native_decoder
from braidrl.engines.embedded.states import ROW_MULTIPLE, Prompts, SlotStates
from braidrl.engines.engine import EngineError, EngineMemory
from braidrl.engines.requests import Response
from braidrl.engines.row_request import EngineRow
from braidrl.engines.sampling import batch_sampling, sample
from braidrl.engines.stepping import SpmdEngine, SteppingEngine
from braidrl.training.compute.slots import SlotCache, SlotStep, round_up
from braidrl.training.decoders.body import PACKED, body_of, plan_of_model, run_body
from braidrl.training.decoders.cohorts import Cohorts
from braidrl.training.decoders.head import logits_of
from braidrl.training.memory.footprint import cache_bytes
from braidrl.training.parallel.pipeline import local_layers
from braidrl.weights.boxes import Slices
from braidrl.weights.collective import TransferError
from braidrl.weights.in_place import EngineWeights
from braidrl.weights.publisher import WeightSource
from braidrl.weights.shards import WeightPart, weight_parts


class EmbeddedEngine(SteppingEngine):
    """An engine that generates with `model`, the trainer's own module.

    `slots` rows are decoded at once, rounded up to a multiple of 16. `max_sequence_tokens` limits prompt and response together.
    With a `dtype` other than the model's, the engine has a copy of the weights, refreshed by `publish`. `shrink` makes steps smaller when
    few rows are left; it is the default on the CPU, where results stay bitwise equal. `compile` is `rollout.compile`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, slots: int, max_sequence_tokens: int,
        seed: int = 0, dtype: torch.dtype | None = None, shrink: bool | None = None, compile: bool = True,
        slices: Slices | None = None, pipeline: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """Make the engine. With `slices` the model is one rank's shard, and all ranks execute the same calls in the same order.

        With `pipeline`, the group of ranks with other layers, it has some of the layers, and the last rank draws.
        """
        super().__init__(
            tokenizer, end_of_sequence_ids(tokenizer, model.generation_config, model.config), max_sequence_tokens, seed
        )
        size = model.config.get_text_config().vocab_size
        self.vocabulary = size if size < len(tokenizer) else None
        self._weights = EngineWeights(model, dtype, slices)
        self.model = model = self._weights.model
        """The model that decodes: the trainer's module, or a copy."""
        self.slots, self._pipeline = round_up(slots, ROW_MULTIPLE), pipeline
        self._shrink = model.device.type == "cpu" if shrink is None else shrink
        self._native = native_decoder(model) if compile else None
        plan = plan_of_model(model)
        # States of mixers and caches of cohorts need not stay where a recorded step has found them.
        recorded = compile and slices is None and model.device.type == "cuda" and plan == PACKED
        self._graphs = StepGraphs(CudaRecorder) if recorded else None
        self._cohorts = Cohorts(model) if plan.by_rows else None
        self._cache, self._prompts = SlotCache(self.slots, model.dtype, model.device), Prompts()
        self._log_prob_dtype = torch.promote_types(model.dtype, torch.float32)
        self._rows: dict[int, EngineRow] = {}
        """The row in each slot that has one."""
        self._states = SlotStates.idle(self.slots, self._log_prob_dtype, model.device)
        self._positions, self._response_tokens, self._stop_tokens, self._steps = 0, 1, 1, 0
        self._changed()

    def parts(self) -> Mapping[str, WeightPart]:
        return weight_parts(self.model, self._weights.slices)

    @property
    def memory(self) -> EngineMemory | None:
        """Return the engine's model and the size of its keys and values."""
        model = self.model
        layers, of_all = len(local_layers(model)), len(body_of(model).layers)
        every = cache_bytes(model.config, model.dtype.itemsize, self.slots, self.max_sequence_tokens)
        return EngineMemory(model, every * layers // of_all)

    @property
    def in_flight(self) -> int:
        return len(self._rows)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        try:
            self._load(version, source)
        except TransferError as error:
            raise EngineError(str(error)) from error

    def _load(self, version: int, source: WeightSource | None) -> None:
        """Load weights, with which all rows continue, and discard computed prompts."""
        self._weights.refresh(source)
        self._prompts.prefixes.clear()
        for slot, row in self._rows.items():
            row.versions.append((int(self._states.drawn[slot]), version))
        self.version = version

    def _accept(self, row: EngineRow) -> None:
        super()._accept(row)
        # The memory that the rows need, of those that wait too.
        self._positions = max(self._positions, len(row.request.prompt) + row.limit - 1)
        self._response_tokens = max(self._response_tokens, row.limit)
        self._stop_tokens = max(self._stop_tokens, len(row.stop_token_ids))
        self._prompts.expect(row.request.prompt)

    def step(self) -> list[Response]:
        """Fill free slots, then draw a token for each row."""
        with self._decoding():
            free = [slot for slot in range(self.slots) if slot not in self._rows] if self._waiting else []
            if free:
                self._begin({slot: self._waiting.popleft() for slot in free[: self.waiting]})
            if not self._rows:
                return []
            # Move rows down into free slots where that makes the step smaller.
            target = round_up(len(self._rows), ROW_MULTIPLE)
            if self._shrink and target < len(self._active.current):
                below = (slot for slot in range(target) if slot not in self._rows)
                for source in [slot for slot in self._rows if slot >= target]:
                    slot = next(below)
                    row = self._rows[slot] = self._rows.pop(source)
                    self._cache.move(source, slot, len(row.request.prompt) + self._steps - row.begun)
                    self._states.move(source, slot)
                    if self._cohorts is not None:
                        self._cohorts.move(source, slot)
                self._changed()
            self.tokens_generated += len(self._rows)
            tokens, ended = self._decode()
            slots = set(ended.nonzero().flatten().tolist())
            if self._watched:
                ids = tokens.tolist()
                slots.update(slot for slot, row in self._watched.items() if row.record_token(ids[slot]))
            return self._take(sorted(slots))

    def _begin(self, new: Mapping[int, EngineRow]) -> None:
        """Put rows into free slots, and compute the prompts that are missing."""
        self._cache.reserve(self._positions)
        if self._native is not None:
            self._native.refresh()
        by_prompt: dict[bytes, list[int]] = {}
        for slot, row in new.items():
            by_prompt.setdefault(row.request.prompt.numpy().tobytes(), []).append(slot)
        if self._graphs is not None:
            states = (self._states.current, self._states.position, *self._cache.tensors())
            touched = (*states, *self.model.parameters(), *self.model.buffers())
            self._graphs.addresses = tuple(tensor.data_ptr() for tensor in touched)
        if self._cohorts is not None:
            self._cohorts.begin({slot: row.request.prompt for slot, row in new.items()})
        else:
            self._prompts.compute(self.model, {name: new[own[0]].request.prompt for name, own in by_prompt.items()})
        for name, slots in by_prompt.items():
            if self._cohorts is None:
                # Copy the prompt's keys and values into the slots of all rows that begin with it.
                places = torch.tensor(slots, dtype=torch.int64, device=self.model.device)
                self._cache.fill(places, self._prompts.prefixes.get(name))
            self._prompts.expect(new[slots[0]].request.prompt, -len(slots))
        for row in new.values():
            row.begun = self._steps
            row.versions.append((0, self.version))
        self._rows |= new
        self._states.begin(new, self.seed, self._response_tokens, self._stop_tokens)
        self._changed()

    def _decode(self) -> tuple[Tensor, Tensor]:
        """Draw one token for each slot of the step, (B,), and mark rows that reached a stop token or their limit, (B,)."""
        states, longest = self._active, self._longest + self._steps
        native, uniforms = self._native, uniform(states.key, states.first_draw + states.drawn)
        if native:
            logits = native.logits(states.current, states.position, self._cache)
        elif self._graphs is not None:
            logits = self._graphs.logits(len(states.current), longest, self._logits)
        else:
            logits = self._logits(longest)
        pipeline = self._pipeline
        last = 0 if pipeline is None else pipeline.size() - 1
        if pipeline is not None and pipeline.rank() < last:
            tokens = torch.empty_like(states.current)
            log_probs = logits.new_empty(len(logits), dtype=self._log_prob_dtype)
        elif native and self._sampling.top_k is None and self._sampling.top_p is None:
            tokens, log_probs = native.kernels.draw(logits, states.temperature, states.greedy, uniforms)
        else:
            tokens, log_probs = sample(logits, self._sampling, uniforms)
        if pipeline is not None:
            for values in (tokens, log_probs):
                dist.broadcast(values, group=pipeline, group_src=last)
        self._steps += 1
        return tokens, states.advance(tokens, log_probs)

    def _logits(self, longest: int) -> Tensor:
        """Run the model's own forward, (B, V); `longest` is the length of the longest row."""
        states = self._active
        if self._cohorts is not None:
            return logits_of(self.model, self._cohorts.hidden(states.current, states.position))
        context = SlotStep(self._cache, states.position, longest)
        hidden = run_body(self.model, states.current[:, None], states.position[:, None], context)
        return logits_of(self.model, hidden[:, 0])

    def _take(self, slots: Sequence[int], aborted: bool = False) -> list[Response]:
        """Return the responses in these slots, which become idle."""
        if not slots:
            return []
        index = torch.tensor(slots, device=self._states.current.device)
        tokens, log_probs = self._states.tokens[index].cpu(), self._states.log_probs[index].cpu()
        drawn = self._states.drawn[index].tolist()
        self._states.end(slots)
        if self._cohorts is not None:
            self._cohorts.end(slots)
        rows = [self._rows.pop(slot) for slot in slots]
        self._changed()
        return self._done(
            [
                row.finished(tokens[number, :count].clone(), log_probs[number, :count].clone(), aborted)
                for number, (row, count) in enumerate(zip(rows, drawn, strict=True))
            ]
        )

    def _changed(self) -> None:
        """Look at the rows in slots after some have come, gone or moved."""
        rows = self._rows
        count = round_up(max(rows, default=0) + 1, ROW_MULTIPLE) if self._shrink else self.slots
        self._active = states = SlotStates(**{name: state[:count] for name, state in vars(self._states).items()})
        """Views of the slots of the next step."""
        asked = [row.request.sampling for row in rows.values()]
        self._sampling = batch_sampling(asked, states.temperature, states.greedy, states.top_k, states.top_p)
        # The length of the longest row, less the steps so far: the number does not change while the rows grow.
        self._longest = max((len(row.request.prompt) - row.begun for row in rows.values()), default=-self._steps)
        # Stop texts and `on_token` need each token as soon as it is drawn.
        self._watched = {
            slot: row for slot, row in rows.items() if row.tokenizer is not None or row.request.on_token is not None
        }

    def abort(self, uid: Uid) -> Response:
        for slot, row in self._rows.items():
            if row.request.uid == uid:
                return self._take([slot], aborted=True)[0]
        for row in self._waiting:
            if row.request.uid == uid:
                self._waiting.remove(row)
                self._prompts.expect(row.request.prompt, -1)
                nothing = torch.empty(0, dtype=torch.int64)
                return self._done([row.finished(nothing, nothing.to(self._log_prob_dtype), aborted=True)])[0]
        raise KeyError(f"row {uid} is not under way")

    def clear(self, release: bool = True) -> None:
        """Drop every row and free the keys and values; without `release`, memory that recorded steps use stays."""
        self._under_way.clear()
        self._waiting.clear()
        self._rows.clear()
        self._prompts.waiting.clear()
        self._prompts.prefixes.clear()
        if self._cohorts is not None:
            self._cohorts.clear()
        self._positions, self._response_tokens, self._stop_tokens, self._steps = 0, 1, 1, 0
        if release or self._graphs is None:
            self._cache.release()
            self._states = SlotStates.idle(self.slots, self._log_prob_dtype, self.model.device)
        else:
            self._states.end(range(self.slots))
        self._changed()

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Disable gradients and activation checkpointing, and restore the module's mode afterwards."""
        training = [module for module in self.model.modules() if module.training]
        if training:
            self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True


class ShardedEmbeddedEngine(SpmdEngine, EmbeddedEngine):
    """The embedded engine on one rank of several, which holds `slices` of the model; other settings are the same on all ranks."""
