"""An engine sharded over training ranks: each holds a slice of one model, and together they decode the rows of all ranks.

rank 0   its requests ╮                ╭─ step, step, step ... ─▶ its responses
rank 1   its requests ┴─ all-gather ───┴─ step, step, step ... ─▶ its responses        within a step they run collectives in each layer

Sampling is deterministic: ranks with the same requests in the same order draw the same tokens, so no rank has to lead.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.cluster.world import Ranks
from braidrl.config.layout import ParallelLayout
from braidrl.data.rows import Uid
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.embedded.sharded_decoding import PipelineRanks
from braidrl.engines.engine import EngineMemory
from braidrl.engines.requests import Request, Response
from braidrl.engines.stepping import SteppingEngine
from braidrl.weights.boxes import Slices
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.in_place import GenerationWeights
from braidrl.weights.publisher import WeightSource
from braidrl.weights.shards import Parts


class SpmdEngine(SteppingEngine):
    """One rank's engine, a base of engines that step alike on equal requests.

    All ranks of the group make the same calls at the same time, including ranks without requests.
    """

    is_collective = True
    phases: GenerationWeights | None = None
    """Set where generation and training weights take turns on the device."""
    _group: dist.ProcessGroup | None
    """All ranks that decode together; None if this one decodes alone."""

    @property
    def memory(self) -> EngineMemory | None:
        memory = super().memory
        return memory and replace(memory, weights=self.phases)

    def take_turns(self, trained: Parts, training: ParallelLayout, ranks: Ranks, layout: GenerationLayout) -> None:
        """Let generation and training weights take turns on the device; all ranks call this at the same time."""
        self.phases = GenerationWeights(trained, training, ranks, self.parts, layout)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Publish weights; where they take turns with training's, they are loaded with the next generation."""
        if self.phases is not None:
            self.phases.leave()
        super().publish(version, source)  # type: ignore[safe-super]

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        rows_to_end: Callable[[], Iterable[Uid]] | None = None,
    ) -> list[Response]:
        """Return this rank's responses in the order of `requests`. A row in any rank's `rows_to_end` ends in the same step on all ranks."""
        own = list(requests)
        if self._group is None:
            return super().generate(own, on_finished, rows_to_end)
        uids = {request.uid for request in own}
        asked = [replace(request, on_token=None) for request in own]
        ranks = Ranks(self._group)
        said = ranks.all_gather("requests", (rows_to_end is not None, asked), tuple[bool, list[Request]])
        gathered = [request for _, requests in said for request in requests]
        # All ranks are asked after each step, but only if some rank may end rows.
        may_end = any(can for can, _ in said)

        def ending() -> list[Uid]:
            named = ranks.all_gather("rows to end", list(rows_to_end() if rows_to_end else ()), list[Uid])
            return list(dict.fromkeys(uid for part in named for uid in part))

        def report(finished: Response) -> None:
            if on_finished is not None and finished.uid in uids:
                on_finished(finished)

        found = {finished.uid: finished for finished in super().generate(gathered, report, ending if may_end else None)}
        return [found[request.uid] for request in own]


class ShardedEmbeddedEngine(SpmdEngine, EmbeddedEngine):
    """The embedded engine on one rank of several."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, slots: int, max_sequence_tokens: int,
        seed: int, slices: Slices, group: dist.ProcessGroup, compile: bool = True, pipeline: PipelineRanks | None = None,
    ) -> None:  # fmt: skip
        """Make the engine; this rank holds `slices` of the model, and the other settings are the same on all ranks.

        `group` holds all ranks that decode together, and `pipeline` the ranks among them with other layers.
        """
        super().__init__(
            model, tokenizer, slots, max_sequence_tokens, seed, compile=compile, slices=slices, pipeline=pipeline
        )
        self._group = group
