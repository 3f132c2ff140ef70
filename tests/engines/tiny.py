"""A tiny model, a tokenizer of bytes and requests, for the tests of the engine."""

from __future__ import annotations

from copy import deepcopy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from braidrl.data.rows import FinishReason, Uid
from braidrl.data.token_columns import LOG_PROBS, VERSIONS
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.training.compute.attention import ATTENTION, PackedSequences
from braidrl.training.decoders.body import PACKED, use_plan

END = 256
VOCABULARY = 260
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": END,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}


def make_model(name: str = "qwen3", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), dtype=dtype, attn_implementation=ATTENTION)
    use_plan(model, PACKED)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes, so that a letter such as é takes two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def make_requests(
    groups: int, samples: int, sampling: SamplingParams, shortest: int = 1, apart: int = 3
) -> list[Request]:
    """Return groups of rows with one prompt each, of `shortest`, `shortest` + `apart`, ... tokens."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for group in range(groups):
        prompt = torch.randint(0, 256, (shortest + apart * group,), generator=generator)
        requests += [Request((0, group, sample), prompt, sampling) for sample in range(samples)]
    return requests


def response_of(
    uid: Uid,
    tokens: torch.Tensor,
    reason: FinishReason,
    log_probs: torch.Tensor | None = None,
    versions: torch.Tensor | None = None,
) -> Response:
    """Return a response with the columns of every response; by default log-probs of 0 and version 0."""
    log_probs = torch.zeros(len(tokens)) if log_probs is None else log_probs
    versions = torch.zeros(len(tokens), dtype=torch.int64) if versions is None else versions
    return Response(uid, tokens, reason, {LOG_PROBS: log_probs, VERSIONS: versions})


def training_log_probs(model: PreTrainedModel, requests: list[Request], finished: list[Response]) -> list[torch.Tensor]:
    """Return the log-probs of the responses by a packed forward, as in training, each at its request's temperature."""
    rows = [torch.cat([q.prompt, f.tokens]) for q, f in zip(requests, finished, strict=True)]
    sequences = PackedSequences.of([len(row) for row in rows])
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=torch.cat(rows)[None],
            position_ids=sequences.position_ids(),
            use_cache=False,
            sequences=sequences,
        ).last_hidden_state[0]
        logits = model.get_output_embeddings()(hidden).split([len(row) for row in rows])
    result = []
    for row, request, scores in zip(rows, requests, logits, strict=True):
        log_softmax = (scores[:-1] / request.sampling.log_prob_temperature).log_softmax(-1)
        result.append(log_softmax.gather(-1, row[1:, None])[len(request.prompt) - 1 :, 0])
    return result
