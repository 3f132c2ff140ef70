"""Each row has the rope factors that it has alone under transformers, also where they depend on its length."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, SamplingParams
from braidrl.errors import UserError
from braidrl.runtimes.prepare.setup import prepare
from braidrl.training import acceptance
from braidrl.training.compute.packed import families_of, pack
from braidrl.training.compute.rope_lengths import RopeLengths, most_positions
from braidrl.training.decoders.body import PACKED, run_body, use_plan
from braidrl.training.decoders.head import predicted_log_probs
from braidrl.training.decoders.proof import Twin, decoding_finding, packed_findings, packed_log_probs, quietly
from tests.cases import soak_but
from tests.engines.tiny import END, make_tokenizer
from tests.tiny import TOKENIZER, Workshop
from tests.training.compute.test_shared_prompts import rows_of

LENGTH = 12
"""The length from which the factors are others."""
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": END,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
FACTORS = {"short_factor": [1.0, 1.05, 1.1, 1.3], "long_factor": [1.1, 4.0, 9.0, 20.0]}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LENGTH, **FACTORS}
HALF = {"partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1], "long_factor": [1.0, 12.0]}
ROPES: dict[str, dict[str, Any]] = {
    "phi3": {"max_position_embeddings": 96, "original_max_position_embeddings": LENGTH, "rope_parameters": LONG},
    "phi3 with half of each head": {
        "max_position_embeddings": 96,
        "original_max_position_embeddings": LENGTH,
        "rope_parameters": LONG | HALF,
    },
    "phimoe": {
        "max_position_embeddings": 96,
        "num_local_experts": 4,
        "rope_parameters": LONG | {"short_mscale": 1.1, "long_mscale": 1.4},
    },
    "llama": {"max_position_embeddings": LENGTH, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    "qwen3": {
        "max_position_embeddings": LENGTH,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    },
}


def config_of(name: str) -> Any:
    with quietly():
        return AutoConfig.for_model(name.split()[0], **SIZES, **ROPES[name])


@cache
def models(name: str) -> tuple[Any, Any]:
    """Return transformers' model and Braid's, with the same weights."""
    torch.manual_seed(0)
    theirs: Any = AutoModelForCausalLM.from_config(config_of(name), attn_implementation="eager").eval()
    ours: Any = AutoModelForCausalLM.from_config(config_of(name), attn_implementation=PACKED.attention).eval()
    ours.load_state_dict(theirs.state_dict())
    use_plan(ours, PACKED)
    return theirs, ours


@torch.no_grad()
def alone(name: str, row: Tensor) -> Tensor:
    """Return log-probs (T - 1, V) of a row by transformers' model as it was loaded."""
    logits: Tensor = deepcopy(models(name)[0])(input_ids=row[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1)


def of_tokens(log_probs: Tensor, row: Tensor) -> Tensor:
    return log_probs.gather(-1, row[1:, None])[:, 0]


@pytest.mark.parametrize("name", ROPES)
def test_packed_rows_on_both_sides_of_the_length_are_those_of_rows_alone(name: str) -> None:
    lengths = (9, 40, LENGTH, LENGTH + 1, 9, 25, 33, 2)
    rows = [torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    with torch.no_grad():
        packed = packed_log_probs(models(name)[1], rows)
    for row, result in zip(rows, packed, strict=True):
        torch.testing.assert_close(result, of_tokens(alone(name, row), row), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["phi3", "llama"])
@torch.no_grad()
def test_a_prompt_is_shared_by_responses_with_its_factors_alone(name: str) -> None:
    rows, model = rows_of([(8, [2, 3, 9, 11, 9]), (3, [20, 1])]), models(name)[1]
    lengths = RopeLengths.of(model.config)
    families = families_of(rows, lengths)
    assert families is not None and len(families) == {"phi3": 4, "llama": 5}[name]
    shared, apart = (pack(rows, torch.device("cpu"), share, lengths) for share in (True, False))
    result = []
    for packed in (shared, apart):
        hidden = run_body(model, packed.input_ids[None], packed.position_ids[None], packed.attention())[0]
        result.append(predicted_log_probs(model, hidden[packed.predictors], packed.targets)[0])
    torch.testing.assert_close(*result, atol=1e-5, rtol=0)
    row = rows["tokens"][0]
    mask = rows["action_mask"][0]
    expected = of_tokens(alone(name, row), row)[mask[1:]]
    torch.testing.assert_close(result[0][: len(expected)], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", soak_but(["phi3"], ROPES))
def test_engine_draws_each_token_as_transformers_does_from_the_row_so_far(name: str) -> None:
    engine = EmbeddedEngine(models(name)[1], make_tokenizer(), Decoding(16, 96))
    sampling = SamplingParams(max_tokens=10, ends=False)
    requests = [Request((0, n, 0), torch.arange(n) + 40, sampling) for n in (1, 5, LENGTH - 1, LENGTH, LENGTH + 1, 30)]
    for request, response in zip(requests, engine.generate(requests), strict=True):
        row = torch.cat([request.prompt, response.tokens])
        for number, log_prob in enumerate(response.log_probs.tolist()):
            end = len(request.prompt) + number
            assert log_prob == pytest.approx(float(next_log_probs(name, row[:end])[row[end]]), abs=1e-5)
        # A suspended row continues with its tokens as its prompt.
        (rest,) = engine.generate(
            [Request(request.uid, row[:-5], SamplingParams(max_tokens=5, ends=False), first_draw=5)]
        )
        assert rest.tokens.tolist() == response.tokens[5:].tolist()


@torch.no_grad()
def next_log_probs(name: str, row: Tensor) -> Tensor:
    logits: Tensor = deepcopy(models(name)[0])(input_ids=row[None], use_cache=False).logits[0, -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_proof_has_rows_on_both_sides_and_sees_factors_of_the_longest_row(name: str) -> None:
    def of_the_longest(model: Any) -> None:
        for module in model.modules():
            if hasattr(type(module), "plain_forward") and hasattr(module, "rope_type"):
                module.__class__ = type(module).__mro__[1]

    with quietly():
        right, wrong = Twin(config_of(name)), Twin(config_of(name), alter=of_the_longest)
        findings = [*packed_findings(right, right.model(PACKED)), decoding_finding(right, PACKED)]
        predicted = packed_findings(wrong, wrong.model(PACKED))
    assert [finding for finding in findings if not finding.holds] == []
    assert not predicted[0].holds


def test_ranks_that_shard_the_tokens_of_rows_agree_with_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "LAYOUTS", {"sequence 2": {"sequence": 2}})
    with quietly():
        (finding,) = acceptance.layout_findings(Twin(config_of("phi3")), PACKED)
    assert finding.holds, finding


def test_longest_row_is_what_the_rope_scales_positions_to() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert most_positions({"max_position_embeddings": 32768, "rope_scaling": yarn}) == 131072
    assert most_positions({"max_position_embeddings": 131072, "rope_scaling": yarn}) == 131072
    assert most_positions({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}) == 4096
    assert most_positions({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}) == 8192
    assert most_positions({"n_positions": 1024}) is None


SCALED = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BEYOND: dict[str, dict[str, Any]] = {
    "qwen2": {"max_position_embeddings": 16, "rope_scaling": SCALED},
    "qwen3": {"max_position_embeddings": 16, "rope_scaling": {**SCALED, "rope_type": "yarn", "beta_fast": 16.0}},
    "mistral": {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **SCALED}},
    "llama": {"max_position_embeddings": 16, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
}
"""Ropes in the forms of model cards, for rows beyond the positions that the model was trained with."""


@pytest.mark.parametrize("name", BEYOND)
@torch.no_grad()
def test_rows_as_long_as_the_rope_reaches_pass_the_checks_and_equal_transformers(name: str, workshop: Workshop) -> None:
    with quietly():
        made = AutoConfig.for_model(name, **(SIZES | BEYOND[name]))
        made.save_pretrained(workshop.folder / "model")
        TOKENIZER.save_pretrained(workshop.folder / "model")
        rows = [torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 60)]
        torch.manual_seed(0)
        theirs: Any = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
        ours: Any = AutoModelForCausalLM.from_config(deepcopy(made), attn_implementation=PACKED.attention).eval()
    ours.load_state_dict(theirs.state_dict())
    use_plan(ours, PACKED)
    for row, packed in zip(rows, packed_log_probs(ours, rows), strict=True):
        logits = deepcopy(theirs)(input_ids=row[None], use_cache=False).logits[0, :-1]
        torch.testing.assert_close(packed, of_tokens(logits.log_softmax(-1), row), atol=1e-5, rtol=0)
    prompts, responses = {"max_prompt_tokens": 8}, {"max_response_tokens": 56}
    prepare(workshop.config(model=str(workshop.folder / "model"), data=prompts, rollout=responses))
    with pytest.raises(UserError, match="max_position_embeddings 64"):
        prepare(
            workshop.config(model=str(workshop.folder / "model"), data=prompts, rollout={"max_response_tokens": 99})
        )
