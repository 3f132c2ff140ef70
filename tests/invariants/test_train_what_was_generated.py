"""Invariant 3: training uses the ids that the engine consumed and produced, and the engine's log-probs match."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidrl.data.prompts import load_train
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, SamplingParams
from braidrl.training.loading import load_decoder
from tests.tiny import MODELS, TOKENIZER, Workshop, recorded

TEMPERATURE = 0.8
STEPS = 3


@pytest.fixture(scope="module", params=MODELS)
def workshop(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: dict[str, Path],
    sums_file: Path,
) -> Workshop:
    """Run three steps at a temperature other than 1, with large weight updates."""
    shop = Workshop(tmp_path_factory.mktemp("run"), tiny_models[request.param], sums_file)
    shop.run(
        flow="grpo",
        algorithm={"old": "recompute"},
        rollout={"temperature": TEMPERATURE, "top_k": 6},
        trainer={"steps": STEPS, "learning_rate": 1e-2},
    )
    return shop


def test_engine_log_probs_equal_trainer_log_probs(workshop: Workshop) -> None:
    largest = 0.0
    for step in range(1, STEPS + 1):
        rows = recorded(workshop.folder / "run", step)
        assert len(rows) == 16
        for row in range(len(rows)):
            gap = (rows["rollout_log_probs"][row] - rows["old_log_probs"][row]).abs().max()
            largest = max(largest, float(gap))
            assert gap < 1e-5, (step, rows.uids()[row])
    print(f"largest gap of a row: {largest:.1e} nats")


def test_log_probs_equal_transformers_forward_on_recorded_ids(workshop: Workshop) -> None:
    rows = recorded(workshop.folder / "run", 1)
    model = AutoModelForCausalLM.from_pretrained(workshop.model, dtype=torch.float32)
    for row in range(len(rows)):
        tokens, actions = rows["tokens"][row], rows["action_mask"][row]
        with torch.no_grad():
            scores = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected = scores.gather(-1, tokens[1:, None])[:, 0][actions[1:]]
        torch.testing.assert_close(rows["rollout_log_probs"][row], expected, rtol=0, atol=1e-5)


def test_recorded_ids_are_prompt_and_generated_tokens(workshop: Workshop) -> None:
    rows = recorded(workshop.folder / "run", 1)
    config = workshop.config()
    (source,) = load_train(config.data, TOKENIZER)
    prompts = {example.prompt: source.prompt(i) for i, example in enumerate(source)}
    engine = EmbeddedEngine(load_decoder(workshop.model), TOKENIZER, Decoding(16, 64, seed=config.seed))
    sampling = SamplingParams(temperature=TEMPERATURE, top_k=6, max_tokens=8)
    for row, uid in enumerate(rows.uids()):
        prompt = prompts[rows["metadata"][row]["prompt"]]
        (drawn,) = engine.generate([Request(uid, prompt, sampling, stage="actor.generate")])
        assert torch.equal(rows["tokens"][row], torch.cat([prompt, drawn.tokens]))
        assert torch.equal(rows["action_mask"][row], torch.arange(len(rows["tokens"][row])) >= len(prompt))
        assert rows["rollout_versions"][row].tolist() == [0] * len(drawn.tokens)
