"""The embedded engine, which decodes many rows at once with the trainer's own module and needs only torch.

add ──▶ waiting ──free slot──▶ slots ──step──▶ a token for each ──stop, limit──▶ Response
           |                     ▲                                                  |
           └── prompt, computed ─┘                                    its slot is filled in the next step
               once for all rows that share it
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.data.endings import end_of_sequence_ids
from braidrl.data.rows import Uid
from braidrl.engines.embedded.batch import SlotBatch
from braidrl.engines.embedded.graphs import CudaRecorder, StepGraphs
from braidrl.engines.embedded.native_decoder import native_decoder
from braidrl.engines.embedded.sharded_decoding import PipelineRanks
from braidrl.engines.embedded.shared_prefill import ROW_MULTIPLE
from braidrl.engines.engine import EngineError, EngineMemory
from braidrl.engines.requests import Response
from braidrl.engines.row_request import EngineRow
from braidrl.engines.stepping import SteppingEngine
from braidrl.training.compute.slots import round_up
from braidrl.training.decoders.body import PACKED, body_of, plan_of_model
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
        slices: Slices | None = None, pipeline: PipelineRanks | None = None,
    ) -> None:  # fmt: skip
        """Make the engine. With `slices` the model is one rank's shard, and all ranks execute the same calls in the same order.

        With `pipeline` it has some of the layers.
        """
        super().__init__(
            tokenizer, end_of_sequence_ids(tokenizer, model.generation_config, model.config), max_sequence_tokens, seed
        )
        size = model.config.get_text_config().vocab_size
        self.vocabulary = size if size < len(tokenizer) else None
        self._weights = EngineWeights(model, dtype, slices)
        shrink = model.device.type == "cpu" if shrink is None else shrink
        native = native_decoder(self._weights.model) if compile else None
        # states of mixers and caches of cohorts need not stay where a recorded step has found them
        recorded = compile and slices is None and model.device.type == "cuda" and plan_of_model(model) == PACKED
        graphs = StepGraphs(CudaRecorder) if recorded else None
        self._batch = SlotBatch(
            self._weights.model, round_up(slots, ROW_MULTIPLE), seed, shrink, native, graphs, pipeline
        )
        self._waiting: deque[EngineRow] = deque()

    @property
    def model(self) -> PreTrainedModel:
        """Return the model that decodes: the trainer's module, or a copy."""
        return self._weights.model

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
    def slots(self) -> int:
        return self._batch.slots

    @property
    def in_flight(self) -> int:
        return len(self._batch.rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        try:
            self._weights.refresh(source)
        except TransferError as error:
            raise EngineError(str(error)) from error
        self._batch.version_changed(version)
        self.version = version

    def _accept(self, row: EngineRow) -> None:
        self._batch.expect(row)
        self._waiting.append(row)

    def step(self) -> list[Response]:
        """Fill free slots, then draw a token for each row."""
        with self._decoding():
            if self._waiting:
                free = [slot for slot in range(self.slots) if slot not in self._batch.rows]
                if free:
                    slots = free[: self.waiting]
                    self._batch.begin({slot: self._waiting.popleft() for slot in slots}, self.version)
            if not self.in_flight:
                return []
            self.tokens_generated += self.in_flight
            return self._done(self._batch.take(self._batch.step()))

    def abort(self, uid: Uid) -> Response:
        for slot, row in self._batch.rows.items():
            if row.request.uid == uid:
                return self._done(self._batch.take([slot], aborted=True))[0]
        for row in self._waiting:
            if row.request.uid == uid:
                self._waiting.remove(row)
                self._batch.prompts.forget(row.request.prompt)
                nothing = torch.empty(0, dtype=torch.int64)
                log_probs = nothing.to(self._batch.log_prob_dtype)
                return self._done([row.finished(nothing, log_probs, aborted=True)])[0]
        raise KeyError(f"row {uid} is not under way")

    def clear(self, release: bool = True) -> None:
        for row in self._waiting:
            self._batch.prompts.forget(row.request.prompt)
        self._waiting.clear()
        self._under_way.clear()
        self._batch.clear(release)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Disable gradients and activation checkpointing, and restore the module's mode afterwards."""
        model = self._weights.model
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True
