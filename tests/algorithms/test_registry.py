"""Registered functions have complete descriptions, and wrong settings are refused before a model loads."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import Tensor

import braidrl.algorithms.library
from braidrl.algorithms import registry
from braidrl.algorithms.registry import Needs, Registry, advantages, aggregations, corrections, divergences, losses
from tests.algorithms.batches import built_in

# Every row of the published table must be registered.
TABLE = {
    "advantages": "gae group_normalized group_centered leave_one_out reinforce_plus_plus remax optimal_baseline "
    "pass_at_k maxrl distillation decoupled_gae safe_rlhf",
    "losses": "clip gspo gmpo cispo sapo reinforce clip_cov kl_cov dppo_tv decoupled value ptx sft dpo bradley_terry",
    "corrections": "truncated masked sequence_rejection",
    "divergences": "k1 k2 k3 abs k1+ k2+ k3+ abs+",
    "aggregations": "token-mean seq-mean-token-mean seq-mean-token-sum token-sum-norm prompt-mean",
    "shapes": "overlong_filter overlong_penalty kl_penalty",
    "selections": "informative_groups informative_rewards",
    "responses": "join_response",
}


@pytest.mark.parametrize("family", TABLE)
def test_every_algorithm_of_the_table_is_registered_by_its_name(family: str) -> None:
    assert braidrl.algorithms.library and set(TABLE[family].split()) <= set(getattr(registry, family))


@pytest.mark.parametrize("family", TABLE)
def test_every_registered_function_has_a_description(family: str) -> None:
    for entry in built_in(getattr(registry, family)).values():
        if family != "divergences":
            assert entry.function.__doc__, entry.name


@pytest.mark.parametrize(
    ("entry", "given", "message"),
    [
        (advantages["gae"], {"lam": 1.5}, r"gae: lam .*0 and 1,.* 1.5"),
        (losses["clip"], {"low": -0.1}, r"clip: low .*0 and 1,.* -0.1"),
        (losses["clip"], {"dual": 0.5}, "clip: dual .* 1 and"),
        (losses["clip"], {"hihg": 0.28}, "clip .* 'hihg'.* mean 'high'"),
        (losses["decoupled"], {"over_cap": "masks"}, "over_cap .* 'masks'.* mean 'mask'"),
        (
            losses["kl_cov"],
            {"estimator": "k4"},
            "kl_cov: estimator .* 'k4'.* mean 'k",
        ),
        (corrections["truncated"], {"level": "seq"}, "level .* 'seq'.* mean 'sequence'"),
        (aggregations["token-sum-norm"], {}, "token-sum-norm needs the setting 'max_tokens'"),
        (aggregations["token-sum-norm"], {"max_tokens": None}, "token-sum-norm needs the setting 'max_tokens'"),
        (registry.shapes["highest_covariance"], {"fraction": 0.1, "low": "x"}, "low must .* number, got 'x'"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    entry: registry.Entry, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        entry.check(given)


@pytest.mark.parametrize("entry", [e for r in (advantages, losses, corrections) for e in built_in(r).values()])
def test_defaults_are_within_their_own_limits(entry: registry.Entry) -> None:
    entry.check({**entry.settings, **dict.fromkeys(entry.required, 1)})


def test_a_decorator_registers_a_users_function_by_name() -> None:
    own = Registry("advantage")

    @own.register(writes=["advantage"], scope="group", needs=Needs({"scale": (0, 10)}, group_size=3))
    def halved(reward: Tensor, group: Tensor, mask: Tensor | None = None, *, scale: float = 0.5) -> Tensor:
        """Return half of the reward."""
        return scale * reward

    entry = own["halved"]
    assert (entry.reads, entry.optional, entry.settings) == (("reward", "group"), ("mask",), {"scale": 0.5})
    with pytest.raises(ValueError, match=r"scale must .* 0 and 10"):
        entry.check({"scale": 11})
    with pytest.raises(KeyError, match="Did you mean 'halved'"):
        own["halve"]


def test_a_users_divergence_is_a_valid_estimator_name() -> None:
    @divergences.register("twice_k1")
    def twice(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        return 2 * (log_probs - ref_log_probs)

    registry.shapes["kl_penalty"].check({"coef": 0.1, "estimator": "twice_k1"})
    del divergences["twice_k1"]
    with pytest.raises(ValueError, match="estimator cannot be 'twice_k1'"):
        registry.shapes["kl_penalty"].check({"coef": 0.1, "estimator": "twice_k1"})


def test_registering_a_batch_function_without_sums_is_refused() -> None:
    own = registry.Registry("advantage")
    with pytest.raises(ValueError, match=r"`sums`.* same columns"):

        @own.register(writes=["advantage"], scope="batch")
        def batch_centered(reward: Tensor, *, totals: dict[str, Tensor]) -> Tensor:
            return reward - totals["sum"] / totals["rows"]


def test_the_docstrings_batch_function_subtracts_the_batch_mean() -> None:
    example = re.search(r"given their sums:\n\n(.*)", inspect.getdoc(registry) or "", re.DOTALL)
    assert example is not None
    own = registry.Registry("advantage")
    exec(inspect.cleandoc(example[1]), {"Tensor": Tensor, "torch": torch, "advantages": own})
    entry, parts = own["batch_centered"], (torch.tensor([1.0, 2.0]), torch.tensor([6.0]))
    assert entry.sums is not None
    sums = [entry.sums(part) for part in parts]
    totals = {name: sum(result[name] for result in sums) for name in sums[0]}
    assert [entry.function(part, totals=totals).tolist() for part in parts] == [[-2.0, -1.0], [3.0]]
