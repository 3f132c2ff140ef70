"""The embedded engine, which decodes many rows together with the trainer's module and needs only torch.

add ──▶ waiting ──free slot──▶ slots ──step──▶ a token for each ──stop, limit──▶ Response
           |                     ▲                                                  |
           └── prompt, computed ─┘                                    its slot is filled in the next step
               once for all rows that share it

A row's results do not depend on the batch composition. With compiled kernels a step reads only the rows' tokens, padded
to a multiple of 16 where torch multiplies: from 16 rows on, its products give each row the same bits on a CPU.
Otherwise all slots participate in every step, idle ones without effect; on a CPU the step shrinks in multiples of 16
rows.

With compiled kernels a step may also read guesses of a row's next tokens, and draws several (`speculation`).

Shapes: B slots in the step, R rows, N tokens in the step, V vocabulary, T response tokens, S stop tokens.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.algorithms.random import uniform
from braidrl.data.chat import end_of_sequence_ids
from braidrl.data.rows import Uid
from braidrl.data.token_columns import LOG_PROBS, ROUTED_EXPERTS, column_of, computed_columns, returned_columns
from braidrl.engines.embedded.adapters import PolicyAdapters
from braidrl.engines.embedded.cpu_kernels import Kernels
from braidrl.engines.embedded.graphs import CudaRecorder, StepGraphs
from braidrl.engines.embedded.native_decoder import NativeDecoder, cuda_decoder, native_decoder
from braidrl.engines.embedded.prompts import Prompts, adapted, prompt_key
from braidrl.engines.embedded.slot_states import DRAWS, ROW_MULTIPLE, SlotStates, indices_of
from braidrl.engines.embedded.speculation import Speculation
from braidrl.engines.engine import EngineError, EngineMemory, Speculated
from braidrl.engines.requests import EngineRow, Response, SamplingParams, computed_in
from braidrl.engines.sampling import BatchSampling, batch_sampling, sample, scaled
from braidrl.engines.stepping import SteppingEngine
from braidrl.errors import UserError
from braidrl.training.compute.rope_lengths import RopeLengths
from braidrl.training.compute.slots import SlotCache, SlotStep, round_up
from braidrl.training.decoders.body import PACKED, body_of, plan_of_model, prefill, run_body
from braidrl.training.decoders.cohorts import Cohorts
from braidrl.training.decoders.head import logits_of
from braidrl.training.decoders.images import ModelImages
from braidrl.training.decoders.routing import Routing, routed, routes_dtype, use_routing
from braidrl.training.memory.footprint import cache_bytes, cached_elements
from braidrl.training.parallel.pipeline import local_layers
from braidrl.weights.boxes import Slices
from braidrl.weights.collective import TransferError
from braidrl.weights.in_place import EngineWeights
from braidrl.weights.publisher import PolicyWeights, WeightSource
from braidrl.weights.shards import WeightPart, weight_parts

NEUTRAL = SamplingParams()
"""The settings of an idle slot."""


@dataclass(frozen=True)
class Decoding:
    """Settings of an embedded engine's decoding."""

    slots: int
    """Number of rows that are decoded together, rounded up to a multiple of 16."""
    max_sequence_tokens: int
    """Maximum tokens of a prompt and its response."""
    seed: int = 0
    shrink: bool | None = None
    """Make steps without compiled kernels smaller when few rows remain; by default on the CPU, where results stay
    bitwise equal.
    """
    compile: bool = True
    """`rollout.compile`."""
    speculation: Literal["auto", "off"] = "auto"
    """`rollout.speculation`."""


@dataclass(frozen=True)
class DecodingRanks:
    """The ranks that decode together: all of them execute the same calls in the same order."""

    slices: Slices | None = None
    """The slices of this rank's shard of the model."""
    pipeline: dist.ProcessGroup | None = None
    """The ranks with other layers; the last one samples."""
    group: dist.ProcessGroup | None = None
    """The ranks that each bring requests."""


ALONE = DecodingRanks()


class EmbeddedEngine(SteppingEngine):
    """An engine that generates with `model`, the trainer's module."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        decoding: Decoding,
        ranks: DecodingRanks = ALONE,
        images: ModelImages | None = None,
        adapters: PolicyAdapters | None = None,
    ) -> None:
        """Make the engine; `images` are those of a multimodal model, and `adapters` those of several policies on a
        model without adapters.
        """
        ends = end_of_sequence_ids(tokenizer, model.generation_config, model.config)
        super().__init__(tokenizer, ends, decoding.max_sequence_tokens, decoding.seed)
        size = model.config.get_text_config().vocab_size
        self.vocabulary = size if size < len(tokenizer) else None
        self.model, self._slices, self.images, self.adapters = model, ranks.slices, images, adapters
        self.slots, self._pipeline, self.group = round_up(decoding.slots, ROW_MULTIPLE), ranks.pipeline, ranks.group
        self._shrink = model.device.type == "cpu" if decoding.shrink is None else decoding.shrink
        self._native = native_decoder(model, adapters) if decoding.compile else None
        plan = plan_of_model(model)
        # States of mixers and caches of cohorts may move away from the addresses of a recorded step. Recorded steps
        # compute with the weights of one policy.
        can_record = decoding.compile and model.device.type == "cuda" and plan == PACKED
        recorded = can_record and ranks.slices is None and adapters is None
        self._graphs = StepGraphs(CudaRecorder) if recorded else None
        self._fused = cuda_decoder(model) if recorded else None
        self._rope_lengths = RopeLengths.of(model.config)
        self._by_rows, self._cohorts = plan.by_rows, Cohorts(model)
        self._cache, self._prompts = SlotCache(self.slots, model.dtype, model.device), Prompts()
        self._log_prob_dtype = torch.promote_types(model.dtype, torch.float32)
        self._rows: dict[int, EngineRow] = {}
        """The row in each slot that has one."""
        self._positions, self._steps, self._is_decoding = 0, 0, False
        # Sharded layers multiply with torch.
        self._multiple = (
            self._native.row_multiple if self._native is not None and ranks.slices is None else ROW_MULTIPLE
        )
        # With some ropes a row's length changes its earlier numbers. Ranks that decode together must make the same
        # guesses, but would measure different seconds.
        guesses = decoding.speculation == "auto" and self._native is not None and ranks == ALONE
        guesses = guesses and not self._rope_lengths
        self.speculation = Speculation(self.slots, self._multiple) if guesses else None
        self._states = SlotStates.idle(self.slots, self._log_prob_dtype, model.device, draws=guesses)
        self._look_at_rows()

    def parts(self) -> Mapping[str, WeightPart]:
        return weight_parts(self.model, self._slices)

    @property
    def memory(self) -> EngineMemory | None:
        model = self.model
        layers, of_all = len(local_layers(model)), len(body_of(model).layers)
        elements = cached_elements(model.config)
        every = cache_bytes(elements, model.dtype.itemsize, self.slots, self.max_sequence_tokens)
        packed_bytes = 0 if self._native is None else self._native.packed_bytes
        return EngineMemory(model, every * layers // of_all + packed_bytes)

    @property
    def in_flight(self) -> int:
        return len(self._rows)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        if self.phases is not None:
            self.phases.leave()
        try:
            if isinstance(source, PolicyWeights):
                assert self.adapters is not None
                self.adapters.take(source)
            else:
                EngineWeights(self.model).refresh(source)
        except TransferError as error:
            raise EngineError(str(error)) from error
        if self.adapters is not None:
            self.adapters.changes += 1
        if (decoder := self._native or self._fused) is not None:
            # Running rows continue with the new weights; otherwise weights are packed when rows start.
            decoder.release()
            if self._rows:
                decoder.refresh()
        if self.images is not None and self.images.tower_changes:
            self.images.clear()
        if self.speculation is not None:
            self.speculation.try_again()
        self._prompts.clear()
        self.version = version

    def _accept(self, row: EngineRow) -> None:
        super()._accept(row)
        # The memory that the rows need, including waiting ones.
        self._positions = max(self._positions, len(row.request.prompt) + row.limit - 1)
        self._prompts.expect(row.request)
        if row.request.images:
            prompt = row.request.prompt
            if self.images is None:
                raise UserError(
                    f"row {row.request.uid} has images, and the engine's model takes none; use one that does"
                )
            last = self.images.placed(prompt, [len(prompt)], row.request.images).positions[-1]
            row.rope_shift = int(last.max()) + 1 - len(prompt)

    def step(self) -> list[Response]:
        """Fill free slots, then draw a token for each row, or several if guesses were right."""
        with self._decoding():
            free = [slot for slot in range(self.slots) if slot not in self._rows] if self._waiting else []
            if free:
                self._begin({slot: self._waiting.popleft() for slot in free[: self.waiting]})
            if not self._rows:
                return []
            # Move rows down into free slots if that makes the step smaller.
            target = round_up(len(self._rows), ROW_MULTIPLE)
            if self._shrink and self._native is None and max(self._rows) >= target:
                below = (slot for slot in range(target) if slot not in self._rows)
                for source in [slot for slot in self._rows if slot >= target]:
                    slot = next(below)
                    row = self._rows[slot] = self._rows.pop(source)
                    self._cache.move(source, slot, len(row.request.prompt) + self._steps - row.started)
                    self._states.move(source, slot)
                    self._cohorts.move(source, slot)
                self._has_changed = True
            if self._has_changed:
                self._look_at_rows()
            if self._rope_lengths and not self._by_rows:
                self._compute_grown_rows()
            ended, drawn = self._decode()
            slots = set(ended)
            for slot, row in self._watched.items():
                for number, token in enumerate(drawn[slot], 1):
                    if row.record_token(token):
                        slots.add(slot)
                        # Tokens that a guess let the row draw after its end do not count.
                        self._states.drawn[slot] -= len(drawn[slot]) - number
                        self.tokens_generated -= len(drawn[slot]) - number
                        break
            return self._take(sorted(slots))

    def _begin(self, new: Mapping[int, EngineRow]) -> None:
        """Put rows into free slots, and compute the prompts that are missing."""
        self._cache.reserve(self._positions)
        decoder = self._native or self._fused
        if decoder is not None and not self._rows:
            # While rows run, only `publish` changes weights.
            decoder.refresh()
        with_routes = any(ROUTED_EXPERTS in row.request.columns for row in new.values())
        if with_routes:
            use_routing(self.model)
            if self._pipeline is not None:
                raise UserError("a pipeline of engines records no routes; write rollout.pipeline=1 or replay=none")
        by_prompt: dict[bytes, list[int]] = {}
        for slot, row in new.items():
            by_prompt.setdefault(prompt_key(row.request), []).append(slot)
        if self._graphs is not None:
            states = (self._states.current, self._states.position, self._states.shift, *self._cache.tensors())
            touched = (*states, *self.model.parameters(), *self.model.buffers())
            self._graphs.addresses = tuple(tensor.data_ptr() for tensor in touched)
        if self._by_rows:
            self._cohorts.begin({slot: row.request.prompt for slot, row in new.items()})
        else:
            missing = {name: new[slots[0]].request for name, slots in by_prompt.items()}
            self._prompts.compute(self.model, missing, self.images, with_routes, self.adapters)
        for name, slots in by_prompt.items():
            if not self._by_rows:
                # Copy the prompt's keys and values into the slots of all rows that start with it.
                slot_index = torch.tensor(slots, dtype=torch.int64, device=self._cache.device)
                self._cache.fill(slot_index, self._prompts.prefixes.get(name))
            if with_routes:
                # A prompt of one token has none.
                routes = self._prompts.routes.get(name, column_of(ROUTED_EXPERTS).empty())
                for slot in slots:
                    new[slot].per_token[ROUTED_EXPERTS] = routes
            self._prompts.expect(new[slots[0]].request, -len(slots))
        for slot, row in new.items():
            row.started = self._steps
            if self.speculation is not None:
                self.speculation.begin(slot, row.request)
        self._rows |= new
        self._states.begin(new, self.seed)
        self._has_changed = True

    def _compute_grown_rows(self) -> None:
        """Recompute the keys and values of rows whose next token changes the factors of their rope.

        transformers' `generate` does so too (Phi-3): a row's log-probs depend only on its tokens so far.
        """
        grown: dict[int, Tensor] = {}
        for slot, row in self._rows.items():
            drawn = self._steps - row.started
            length = len(row.request.prompt) + drawn
            if drawn and self._rope_lengths.kind(length) != self._rope_lengths.kind(length - 1):
                grown[slot] = torch.cat([row.request.prompt, self._states.tokens[slot, : drawn - 1].cpu()])
        if grown:
            ids = list(grown.values())
            spans = [self._rows[slot].request.images for slot in grown]
            placed_images = None if self.images is None else self.images.of_prompts(ids, spans)
            policies = [self._rows[slot].request.policy for slot in grown]
            with adapted(self.adapters, policies, [len(row_ids) for row_ids in ids]):
                prefixes = prefill(self.model, ids, ROW_MULTIPLE, placed_images)
            for slot, prefix in zip(grown, prefixes, strict=True):
                self._cache.fill(torch.tensor([slot], device=self._cache.device), prefix)

    def _decode(self) -> tuple[list[int], dict[int, list[int]]]:
        """Draw a token or several for each row.

        Returns the slots of rows that reached a stop token or their limit, and the tokens of watched rows.
        """
        self._steps += 1
        if self._native is not None:
            return self._decode_compiled(self._native)
        states, longest = self._active, self._longest + self._steps - 1
        uniforms = uniform(states.key, states.first_draw + states.drawn)
        routing = Routing() if self._with_routes else None
        if self._graphs is not None and routing is None:
            # Fused attention reads each row's own keys, so one graph serves rows of any length.
            read = longest if self._fused is None else 1
            logits = self._graphs.logits(len(states.current), read, self._logits)
        else:
            with routed(routing), adapted(self.adapters, self._policies, [1] * len(self._policies)):
                logits = self._logits(longest)
        tokens, values = self._drawn(logits, uniforms, self._sampling)
        if routing is not None:
            self._add_routes(values, routing, len(tokens))
            states = self._states.first(len(tokens))
        self.tokens_generated += len(self._rows)
        ended = indices_of(states.advance(tokens, values))
        ids = tokens.tolist() if self._watched else []
        return ended, {slot: [ids[slot]] for slot in self._watched}

    def _decode_compiled(self, native: NativeDecoder[Kernels]) -> tuple[list[int], dict[int, list[int]]]:
        """Decode one step with compiled kernels, which also check guesses of the next tokens."""
        # This thread's seconds: time taken by other programs is not part of a pass's cost.
        states, start, rows = self._states, time.thread_time(), len(self._in_use)
        guesses = None if self.speculation is None else self.speculation.choose(self._in_use, states)
        chosen = time.thread_time()
        read = native.kernels.lay_out(self._in_use, guesses, states, self._multiple)
        routing = Routing() if self._with_routes else None
        with routed(routing):
            policies = None if self.adapters is None else self._policy_numbers[read.rows]
            logits = native.logits(read.tokens, read.slots, read.positions, self._cache, read.shifts, policies)
        drawn, values = self._drawn(logits, read.uniforms, self._sampling.of(read.rows))
        if routing is not None:
            self._add_routes(values, routing, len(drawn))
        is_kept, count, ended = native.kernels.keep(read, drawn, values, states)
        for name in values.keys() - {LOG_PROBS, DRAWS}:
            states.per_token[name][read.slots[is_kept], read.numbers[is_kept]] = values[name][is_kept]
        checked = int(read.starts[-1])
        self.tokens_generated += count
        if self.speculation is not None:
            seconds = time.thread_time() - chosen, chosen - start
            self.speculation.observe(len(drawn), rows, checked - rows, count - rows, *seconds)
            self.speculated = (self.speculated or Speculated()) + Speculated(rows, count, checked - rows, count - rows)
        firsts = read.numbers[read.starts[:-1]].tolist() if self._watched else []
        new = {
            slot: states.tokens[slot, first : states.drawn[slot]].tolist()
            for slot, first in zip(self._in_use.tolist(), firsts, strict=False)
            if slot in self._watched
        }
        return [slot for slot, has_ended in zip(self._in_use.tolist(), ended.tolist(), strict=True) if has_ended], new

    def _drawn(self, logits: Tensor, uniforms: Tensor, sampling: BatchSampling) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw tokens (N,) from logits (N, V), which are overwritten; return them with their columns, (N, ...) each."""
        pipeline, columns, values = self._pipeline, self._computed, dict[str, Tensor]()
        names = LOG_PROBS, *(column.name for column in columns)
        if pipeline is not None and pipeline.rank() < pipeline.size() - 1:
            tokens = torch.empty_like(uniforms, dtype=torch.int64)
            held = {name: self._states.per_token[name] for name in names}
            values = {name: store.new_empty((len(tokens), *store.shape[2:])) for name, store in held.items()}
        else:
            # Drawing overwrites the logits.
            distribution = scaled(logits.clone(), sampling) if columns else logits
            if self._native and sampling.top_k is None and sampling.top_p is None:
                tokens, values = self._native.kernels.draw(logits, sampling.temperature, sampling.greedy, uniforms)
            else:
                tokens, values[LOG_PROBS] = sample(logits, sampling, uniforms)
            values |= computed_columns(columns, distribution, tokens)
        if pipeline is not None:
            for drawn in (tokens, *(values[name] for name in names)):
                dist.broadcast(drawn, group=pipeline, group_src=pipeline.size() - 1)
        return tokens, values

    def _add_routes(self, values: dict[str, Tensor], routing: Routing, count: int) -> None:
        """Add the routes of the first `count` tokens of a step to its columns; the states grow by these columns."""
        values[ROUTED_EXPERTS] = drawn = routing.recorded()[:count].to(routes_dtype(self.model))
        if ROUTED_EXPERTS not in self._states.per_token:
            room = *self._states.tokens.shape, *drawn.shape[1:]
            self._states.per_token[ROUTED_EXPERTS] = torch.zeros(room, dtype=drawn.dtype, device=drawn.device)

    def _logits(self, longest: int) -> Tensor:
        """Run the model's forward, (B, V); `longest` is the length of the longest row."""
        states = self._active
        if self._by_rows:
            return logits_of(self.model, self._cohorts.hidden(states.current, states.position))
        if self._fused is not None:
            slots = torch.arange(len(states.current), device=states.current.device)
            return self._fused.logits(states.current, slots, states.position, self._cache, states.shift)
        context = SlotStep(self._cache, states.position, longest)
        hidden = run_body(self.model, states.current[:, None], (states.position + states.shift)[:, None], context)
        return logits_of(self.model, hidden[:, 0])

    def _take(self, slots: Sequence[int], aborted: bool = False) -> list[Response]:
        """Return the responses in these slots, which become idle."""
        if not slots:
            return []
        index = torch.tensor(slots, device=self._states.current.device)
        tokens, drawn = self._states.tokens[index].cpu(), self._states.drawn[index].tolist()
        values = {name: held[index].cpu() for name, held in self._states.per_token.items()}
        rows = [self._rows.pop(slot) for slot in slots]
        if self.speculation is not None:
            requests = {slot: row.request for slot, row in zip(slots, rows, strict=True)}
            self.speculation.end(requests, self._states, aborted)
        self._states.end(slots)
        self._cohorts.end(slots)
        self._has_changed = True
        ended = []
        for number, (row, count) in enumerate(zip(rows, drawn, strict=True)):
            names = [column.name for column in returned_columns(row.request.columns) if column.name in values]
            per_token = {name: values[name][number, :count].clone() for name in names}
            if count and ROUTED_EXPERTS in per_token:
                prompt = row.per_token.pop(ROUTED_EXPERTS)
                drawn_routes = per_token[ROUTED_EXPERTS]
                per_token[ROUTED_EXPERTS] = torch.cat([prompt, drawn_routes]) if len(prompt) else drawn_routes
            ended.append(row.finished(aborted, (tokens[number, :count].clone(), per_token)))
        return self._done(ended)

    def _look_at_rows(self) -> None:
        """Update per-row settings after rows have been added, removed or moved."""
        rows, self._has_changed = self._rows, False
        slots = sorted(rows)
        if self._native is not None:
            self._in_use = torch.tensor(slots, dtype=torch.int64)
            """The slots with rows."""
        else:
            count = round_up(max(rows, default=0) + 1, ROW_MULTIPLE) if self._shrink else self.slots
            self._active = self._states.first(count)
            """Views of the slots of the next step."""
            slots = list(range(count))
        self._policies = [rows[slot].request.policy if slot in rows else None for slot in slots]
        if self.adapters is not None:
            self._policy_numbers = self.adapters.numbers_of(self._policies)
        sampling = [rows[slot].request.sampling if slot in rows else NEUTRAL for slot in slots]
        self._sampling = batch_sampling(sampling, self._cache.device)
        self._with_routes = any(ROUTED_EXPERTS in row.request.columns for row in rows.values())
        self._computed = computed_in(row.request for row in rows.values())
        """The columns that the next step computes from its logits."""
        # The length of the longest row minus the steps so far: constant while the rows grow.
        self._longest = max((len(row.request.prompt) - row.started for row in rows.values()), default=-self._steps)
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
                self._prompts.expect(row.request, -1)
                nothing = torch.empty(0, dtype=torch.int64)
                return self._done([row.finished(True, (nothing, {LOG_PROBS: nothing.to(self._log_prob_dtype)}))])[0]
        raise KeyError(f"row {uid} is not under way")

    def clear(self, release: bool = True) -> None:
        """Drop every row and free the keys and values; without `release`, memory that recorded steps use stays."""
        self._under_way.clear()
        self._waiting.clear()
        self._rows.clear()
        self._prompts.forget_rows()
        self._cohorts.clear()
        if self.speculation is not None:
            self.speculation.clear()
        self._positions = self._steps = 0
        if release or self._graphs is None:
            self._cache.release()
            if self._native is not None:
                self._native.release()
            draws = self.speculation is not None
            self._states = SlotStates.idle(self.slots, self._log_prob_dtype, self.model.device, draws)
        else:
            self._states.end(range(self.slots))
        self._look_at_rows()

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Disable gradients and activation checkpointing, and restore the module's mode afterwards."""
        if self._is_decoding:
            # Within `generate`: visiting every module takes a third of a millisecond per step.
            yield
            return
        training = [module for module in self.model.modules() if module.training]
        if training:
            self.model.eval()
        self._is_decoding = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_decoding = False
            for module in training:
                module.training = True
