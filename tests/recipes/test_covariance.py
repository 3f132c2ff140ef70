"""Clip-Cov and KL-Cov as flows: the tokens with the highest covariance are found over the whole batch and passed to the
loss.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.restarts import train
from tests.recipes.tiny import make_config, write_data, write_decoder

FLOW = """
flow: {name}
stages:
- {{role: actor, type: generate}}
- {{role: reward, type: verify}}
- {{type: advantage.group_centered}}
- {{type: shape.covariance}}
- {{type: shape.highest_covariance, params: {{fraction: 0.2}}}}
- {{role: actor, type: update, params: {{loss: {{name: {name}}}}}}}
"""


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_tokens_of_highest_covariance_reach_the_loss(name: str, tmp_path: Path) -> None:
    write_decoder(tmp_path / "model")
    write_data(tmp_path)
    (tmp_path / "flow.yaml").write_text(FLOW.format(name=name))
    run = train(make_config(tmp_path, str(tmp_path / "flow.yaml"), trainer__steps=1))
    rows, line = read_rollouts(rollout_path(run, 1)), read_metrics(run)[0]
    chosen = rows["high_covariance"].values > 0
    assert 0 < float(chosen.float().mean()) <= 0.35
    log_probs = rows["rollout_log_probs"]
    spread = log_probs.spread(rows["advantage"])
    covariance = (log_probs.values - log_probs.values.mean()) * (spread - spread.mean())
    assert torch.allclose(covariance, rows["covariance"].values, atol=1e-4)
    assert float(covariance[chosen].min()) >= float(covariance[~chosen].max()) * 0.99
    assert line["actor/covariance_fraction"] == pytest.approx(float(chosen.float().mean()), abs=1e-6)


def test_a_recipe_with_such_a_loss_finds_its_tokens(tmp_path: Path) -> None:
    write_decoder(tmp_path / "model")
    write_data(tmp_path)
    chosen = {"loss": "kl_cov", "covariance": {"fraction": 0.2}, "kl_coef": 0.0}
    run = train(make_config(tmp_path, "grpo", trainer__steps=1, algorithm=chosen))
    assert 0 < float(read_metrics(run)[0]["actor/covariance_fraction"]) <= 0.35
    with pytest.raises(UserError, match=r"algorithm\.covariance.*remove"):
        train(make_config(tmp_path, "grpo", algorithm={"covariance": {"fraction": 0.2}}))
