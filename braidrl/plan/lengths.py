"""Lengths of rows for a plan: from the data, from a recorded run, or as given.

--lengths RUN        prompts and responses that the run recorded      --lengths 300            this length for every response
--lengths 300:2000   log-normal, with this median and longest         nothing                  prompts of the data, the longest responses
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from braidrl.config import Config
from braidrl.data.prompts import RESPONSES, LoadedSource
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.observe.rollouts import read_rollouts, recorded_steps, rollout_path
from braidrl.plan.work import IntArray, Lengths


def batch_lengths(config: Config, given: str | None = None, sources: Sequence[LoadedSource] = ()) -> Lengths:
    """Return the lengths of one batch's rows. Raises UserError if they cannot be parsed, or the run recorded none."""
    rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    if given is not None and Path(given).is_dir():
        run = Path(given)
        steps = recorded_steps(run)
        if not steps:
            raise UserError(f"--lengths {run}: the run recorded no rollouts")
        # Use the last half: response lengths change during training.
        parts = [step_lengths(run, step) for step in steps[len(steps) // 2 :]]
        prompts, responses = (np.concatenate(one) for one in zip(*parts, strict=True))
        picked = spread(responses, rows)
        lines, trained = read_metrics(run), len(parts[0][0])
        generated = np.mean([line.get("rows/generated", trained) for line in lines]) / trained if lines else 1.0
        return Lengths(prompts[picked], responses[picked], max(1.0, float(generated)))
    names = ("prompt", *RESPONSES)
    known = {name: [one.numpy() for s in sources if (one := s.lengths(name)) is not None] for name in names}
    prompts = np.concatenate(known["prompt"] or [np.array([config.data.max_prompt_tokens])]).astype(np.int64)
    if given is not None:
        responses = given_lengths(given, rows)
    else:
        said = [lengths for name in RESPONSES for lengths in known[name]]
        responses = np.concatenate(said or [np.array([config.rollout.max_response_tokens])]).astype(np.int64)
    # Shuffle: lengths of prompts and responses are taken as independent.
    shuffled = np.random.default_rng(0).permutation(prompts[spread(prompts, rows)])
    return Lengths(shuffled, responses[spread(responses, rows)], config.trainer.over_sampling)


def given_lengths(given: str, rows: int) -> IntArray:
    """Return the response lengths of `--lengths TOKENS` or `MEDIAN:LONGEST`, in ascending order."""
    median, _, longest = given.partition(":")
    if not median.isdigit() or (longest and (not longest.isdigit() or int(longest) < int(median))):
        raise UserError(
            f"--lengths: {given!r} is no run folder and not TOKENS or MEDIAN:LONGEST, as in --lengths 300:2000"
        )
    if not longest or longest == median:
        return np.array([int(median)])
    sigma = math.log(int(longest) / int(median)) / NormalDist().inv_cdf(1 - 1 / max(rows, 3))
    quantiles = [NormalDist().inv_cdf((i + 0.5) / rows) for i in range(rows)]
    drawn = [min(int(longest), int(int(median) * math.exp(sigma * q))) for q in quantiles]
    return np.array([max(1, tokens) for tokens in drawn])


def step_lengths(run: Path, step: int) -> tuple[IntArray, IntArray]:
    """Return the lengths of a recorded step's prompts and responses."""
    rows = read_rollouts(rollout_path(run, step))
    prompts = np.asarray(rows["prompt_length"]).astype(np.int64)
    return prompts, np.asarray(rows["length"]).astype(np.int64) - prompts


def spread(lengths: IntArray, rows: int) -> IntArray:
    """Return the places of `rows` lengths with the same distribution, in ascending order of length.

    These are midpoints of equal parts, as not every batch has the longest row.
    """
    midpoints = ((np.arange(rows) + 0.5) * len(lengths) / rows).astype(np.int64)
    places: IntArray = np.argsort(lengths, kind="stable")[midpoints]
    return places
