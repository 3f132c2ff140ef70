"""vLLM draws several tokens at once, by a draft model or by the model's own MTP layer: log-probs are the trainer's,
also after updates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from braidrl.data.rows import FinishReason
from braidrl.engines.engine_contract import all_of
from braidrl.engines.requests import Request, SamplingParams
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.loading import load_decoder
from braidrl.weights.publisher import ModelWeights
from tests.engines.served import CONFIG, Served, write_served_model
from tests.engines.tiny import make_tokenizer, training_log_probs
from tests.training.decoders.families import write_family
from tests.training.decoders.test_families import ON_VLLM

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]


def draft_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a model, and one of its first layer alone that drafts for it."""
    config = deepcopy(CONFIG)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "draft")
    make_tokenizer().save_pretrained(folder / "draft")
    drafts = {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": 3}
    return write_served_model(folder / "model"), drafts


def mtp_layer(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a DeepSeek V3 with a layer that predicts the token after the next, a copy of its last one."""
    model = write_family(folder / "model", "deepseek_v3", **ON_VLLM["deepseek_v3"])
    settings, file = json.loads((model / "config.json").read_text()), model / "model.safetensors"
    tensors, count, width = load_file(file), settings["num_hidden_layers"], settings["hidden_size"]
    last, own = f"model.layers.{count - 1}.", f"model.layers.{count}."
    tensors |= {own + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)}
    tensors |= {f"{own}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {
        f"{own}eh_proj.weight": 0.1 * torch.randn(width, 2 * width),
        f"{own}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{own}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, file, {"format": "pt"})
    settings |= {"num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    (model / "config.json").write_text(json.dumps(settings))
    return model, {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize("write", [draft_model, mtp_layer])
def test_tokens_that_were_drafted_have_the_trainers_log_probs_after_each_update(
    tmp_path: Path, write: Callable[[Path], tuple[Path, dict[str, Any]]]
) -> None:
    model, drafts = write(tmp_path)
    engine = Served(
        "vllm", model, limit_s=500.0, reproducible=False, logprobs_mode="processed_logprobs", speculative_config=drafts
    )
    trained, generator = load_decoder(str(model), torch.float32, "cpu").requires_grad_(False).eval(), torch.Generator()
    sampling, prompts = SamplingParams(temperature=0.7, max_tokens=24, ends=False), torch.randint(0, 10, (16, 6))
    submitted = [Request((0, n, 0), prompt, sampling) for n, prompt in enumerate(prompts)]
    submitted += [
        replace(request, uid=(1, *request.uid[1:]), sampling=replace(sampling, temperature=0.0))
        for request in submitted
    ]
    gap = surprise = variance = 0.0
    try:
        for version in range(3):
            if version:
                for parameter in trained.parameters():
                    parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
                engine.run(engine.engine.update_weights(version, ModelWeights(trained)))
            finished = engine.run(all_of(engine.engine, submitted))
            assert all(len(row.tokens) == 24 and row.finish_reason is FinishReason.LENGTH for row in finished)
            for request, row, own in zip(
                submitted, finished, training_log_probs(trained, submitted, finished), strict=True
            ):
                gap = max(gap, float((row.log_probs - own).abs().max()))
                if not request.sampling.takes_likeliest:
                    ids = torch.cat([request.prompt, row.tokens])[None]
                    whole = PackedSequences.of([ids.shape[1]])
                    hidden = trained.base_model(
                        input_ids=ids, position_ids=whole.position_ids(), use_cache=False, sequences=whole
                    ).last_hidden_state[0, len(request.prompt) - 1 : -1]
                    every = (trained.get_output_embeddings()(hidden).double() / 0.7).log_softmax(-1)
                    entropy, square = -(every.exp() * every).sum(-1), (every.exp() * every.square()).sum(-1)
                    surprise += float((own.double() + entropy).sum())
                    variance += float((square - entropy.square()).sum())
    finally:
        engine.close()
    deviations = surprise / variance**0.5
    print(f"{drafts['method']}: largest gap {gap:.1e} nats; mean log-prob {deviations:+.1f} standard deviations off")
    assert gap < 1e-4
    # Tokens that the policy draws have minus its entropy as their mean log-prob; a draft's own would not.
    assert abs(deviations) < 4


def lookup(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a model, whose next tokens are guessed from those that the row has."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    return write_served_model(folder / "model"), drafts


@pytest.mark.parametrize("write", [lookup, draft_model, mtp_layer])
def test_tokens_drawn_by_rows_random_numbers_are_those_without_drafts(
    tmp_path: Path, write: Callable[[Path], tuple[Path, dict[str, Any]]]
) -> None:
    model, drafts = write(tmp_path)
    trained = load_decoder(str(model), torch.float32, "cpu").requires_grad_(False).eval()
    settings = [{"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}]
    prompts = torch.randint(0, 10, (32, 6))
    submitted = [
        Request((0, n, 0), prompt, SamplingParams(max_tokens=5 + n, ends=False, **settings[n % 4]))
        for n, prompt in enumerate(prompts)
    ]
    plain, drafting = (
        Served("vllm", model, limit_s=500.0, **({"speculative_config": drafts} if drafted else {}))
        for drafted in (False, True)
    )
    try:
        for version in range(2):
            if version:
                for parameter in trained.parameters():
                    parameter.mul_(1.05)
                for engine in (plain, drafting):
                    engine.run(engine.engine.update_weights(version, ModelWeights(trained)))
            expected, drawn = (engine.run(all_of(engine.engine, submitted)) for engine in (plain, drafting))
            gaps = [
                float((row.log_probs - of_policy).abs().max())
                for row, of_policy in zip(drawn, training_log_probs(trained, submitted, drawn), strict=True)
            ]
            same = sum(torch.equal(a.tokens, b.tokens) for a, b in zip(expected, drawn, strict=True))
            print(f"{drafts['method']}: {same} of {len(drawn)} rows equal, largest gap {max(gaps):.1e} nats")
            assert [len(row.tokens) for row in drawn] == [request.sampling.max_tokens for request in submitted]
            assert max(gaps) < 1e-4 and same >= len(drawn) - 1
    finally:
        for engine in (plain, drafting):
            engine.close()
