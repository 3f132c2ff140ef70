"""Cost of planning a change of layout for one rank of many: all ranks' descriptions are synthetic, and one process acts
as a rank.

Qwen2.5-32B's 771 tensors in bfloat16, from the training layout to slices for generation. Each rank is a process of its
own, so that its peak memory is that of planning: the descriptions of the other ranks, its moves and its rounds.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.turns import Turn
from braidrl.data.messages import pack_message, unpack_message
from braidrl.weights.boxes import Box, boxes_of, chunk
from braidrl.weights.reshard_plan import ShardIndex, Tensors, describe, plan_moves
from braidrl.weights.transfer import LIMIT_BYTES

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 5120, 27648, 64, 40, 8, 128, 152064
"""Qwen2.5-32B."""
TENSOR_PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "lm_head": "colwise",
    **{
        f"model.layers.*.{name}": style
        for name, style in {
            "self_attn.q_proj": "colwise",
            "self_attn.k_proj": "colwise",
            "self_attn.v_proj": "colwise",
            "self_attn.o_proj": "rowwise",
            "mlp.gate_proj": "colwise",
            "mlp.up_proj": "colwise",
            "mlp.down_proj": "rowwise",
        }.items()
    },
}


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Return the global shape of each of the 771 tensors."""
    one = {
        "self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
        "self_attn.q_proj.bias": (HEADS * HEAD,),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD, WIDTH),
        "self_attn.k_proj.bias": (KV_HEADS * HEAD,),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD, WIDTH),
        "self_attn.v_proj.bias": (KV_HEADS * HEAD,),
        "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    layers = {f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in one.items()}
    ends = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    return {**ends, **layers, "model.norm.weight": (WIDTH,)}


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis, tensor fastest; `shard` splits each rank's slices over this number of data ranks."""

    ranks: int
    pipeline: int = 1
    tensor: int = 1
    shard: int = 1

    def boxes(self, rank: int) -> dict[str, Box]:
        """Return the boxes of a rank."""
        data = self.ranks // (self.pipeline * self.tensor)
        stage, tensor_rank, shard_rank = (
            rank // (self.tensor * data),
            rank % self.tensor,
            rank // self.tensor % data % self.shard,
        )
        own = {name: shape for name, shape in shapes().items() if stage_of(name, self.pipeline) == stage}
        return {
            n: sharded(b, shard_rank, self.shard)
            for n, b in boxes_of(own, TENSOR_PLAN, tensor_rank, self.tensor).items()
        }


def stage_of(name: str, stages: int) -> int:
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) * stages // LAYERS
    return 0 if "embed" in name else stages - 1


def sharded(box: Box, rank: int, ranks: int) -> Box:
    """Return one of equal parts along the first dimension, as FSDP shards."""
    start, count = chunk(box.sizes[0], rank, ranks)
    return box.along(0, box.offsets[0] + start, box.offsets[0] + start + count)


CASES = {
    "FSDP": (Layout(1024, shard=1024), Layout(1024, tensor=8)),
    "tensor": (Layout(1024, tensor=8), Layout(1024, tensor=4)),
    "pipeline": (Layout(1024, pipeline=16), Layout(1024, tensor=8)),
    "tensor and FSDP": (Layout(1024, tensor=8, shard=128), Layout(1024, tensor=4)),
    "pipeline and tensor": (Layout(1024, pipeline=8, tensor=8), Layout(1024, tensor=4)),
    "pipeline and FSDP": (Layout(1024, pipeline=8, shard=128), Layout(1024, tensor=8)),
    "pipeline, tensor and FSDP": (Layout(1024, pipeline=4, tensor=8, shard=32), Layout(1024, tensor=4)),
}


def messages(layout: Layout) -> Iterator[bytes]:
    """Yield each rank's description of its blocks."""
    every = shapes()
    for rank in range(layout.ranks):
        about = [([name], every[name], "bfloat16", box) for name, box in layout.boxes(rank).items()]
        yield pack_message(("", describe(about)))


def prepare(case: Mapping[str, Any]) -> Turn:
    """Make the descriptions of a case's ranks; a turn plans one rank's moves and rounds."""
    said = [list(messages(layout)) for layout in CASES[case["layouts"]]]
    before = peak_bytes()

    def turn() -> Mapping[str, float]:
        started = time.perf_counter()
        # Replicas send equal messages, which are parsed once.
        read = [{m: unpack_message(m, tuple[str, list[Tensors]]) for m in dict.fromkeys(some)} for some in said]
        held, wanted = (
            ShardIndex([known[m][1] for m in some], [known[m][0] for m in some])
            for known, some in zip(read, said, strict=True)
        )
        found = plan_moves(held.groups(wanted), case["rank"], len(held.ranks), held.machines)
        count = found.rounds_needed(LIMIT_BYTES)
        for moves in (found.sends, found.receives):
            moves.first_and_last(count, len(held.tensors))
        seconds = time.perf_counter() - started
        most = max(found.sends.total, found.receives.total)
        return {
            "seconds": seconds,
            "bytes": peak_bytes() - before,
            "moves": len(found.sends.tensors) + len(found.receives.tensors),
            "sent": found.sends.total,
            "received": found.receives.total,
            "rounds": count,
            "least_rounds": -(-most // LIMIT_BYTES),
        }

    return turn


def peak_bytes() -> int:
    """Return this process's peak memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
