"""Study of staleness: cost and gain of generating with older weights, in five ways.

Seeds run one after the other, each in every way; the page is rewritten after each seed. A JSON file beside the page
keeps the results, so that a seed can be added after the runs of earlier ones are deleted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from pages import Curve, curve, seconds, table
from study import SCORE, Numbers, Study, Tree
from study_runtimes import LATE_LEARNING_RATE

from braidrl.observe.metrics import read_metrics

ENGINES = 2
SLOTS = 8
"""Slots per engine. Rows take turns in them, as on a real machine, so that an engine is busy when weights arrive."""
TOKENS_PER_ITERATION = 20
WAYS: dict[str, Tree] = {
    "synchronous": {"runtime": "streaming"},
    "one-step": {"runtime": "streaming", "streaming": {"weights": "delayed"}},
    "half-step": {"runtime": "streaming", "streaming": {"weights": "rolling"}},
    "interrupt": {"runtime": "streaming", "streaming": {"weights": "interrupt"}},
    "partial": {"runtime": "streaming"},
}


@dataclass(frozen=True)
class Result:
    """Results of a way with one seed, or with several; in the latter case seconds and curve are means."""

    way: str
    seeds: Sequence[int]
    scores: Sequence[float]
    """The last held-out score of each seed."""
    steps: Sequence[int]
    seconds: float
    curve: Curve


def staleness(study: Study) -> Numbers:
    """Train DAPO without staleness and with one version of it, over the seeds."""
    file = study.pages / "staleness.json"
    results = [Result(**kept) for kept in json.loads(file.read_text())] if file.is_file() and not study.quick else []
    for seed in study.seeds:
        for way in WAYS:
            if not any(result.way == way and seed in result.seeds for result in results):
                results.append(found(study, way, seed))
                file.write_text(json.dumps([asdict(result) for result in results]) + "\n")
        write_page(study, results)
    return {way: over(results, way).curve[-1][1] for way in WAYS}


def found(study: Study, way: str, seed: int) -> Result:
    """Return the results of this seed's run; the run is made if it is missing."""
    lines = read_metrics(study.run(f"staleness-{way}-{seed}", under(study, way, seed)))
    points = curve(lines, SCORE)
    return Result(way, [seed], [points[-1][1]], [lines[-1]["step"]], seconds(lines), points)


def over(results: Sequence[Result], way: str) -> Result:
    """Return the results of a way over all seeds; seconds and the curve are means."""
    own = [result for result in results if result.way == way]
    each = [result for result in own for _ in result.seeds]
    points = zip(*(result.curve for result in each), strict=True)
    return Result(
        way,
        [seed for result in own for seed in result.seeds],
        [score for result in own for score in result.scores],
        [steps for result in own for steps in result.steps],
        fmean(result.seconds for result in each),
        [(at[0][0], fmean(score for _, score in at)) for at in points],
    )


def write_page(study: Study, results: Sequence[Result]) -> None:
    """Write the page: a row and a curve for each way, over the seeds."""
    ways = [over(results, way) for way in WAYS]
    rows = [
        [
            way.way,
            f"{way.curve[-1][1]:.3f}",
            " ".join(f"{score:.2f}" for score in way.scores),
            " ".join(map(str, way.steps)),
            f"{way.seconds:.0f}",
        ]
        for way in ways
    ]
    text = (
        f"DAPO, 32 prompts with 8 responses per step, {ENGINES} generating processes with {SLOTS} slots each. "
        f"Seeds: {', '.join(map(str, ways[0].seeds))}. All ways except the first train on rows of the previous "
        "version. They use half the "
        "learning rate: with gradients that arrive a step late, the full rate overshoots.\n\n"
        + table(["way", "held-out avg@4, mean of seeds", "each seed", "steps", "seconds"], rows)
        + "\n"
        + study.curves("staleness", "Held-out avg@4, mean of the seeds", {way.way: way.curve for way in ways})
        + f"\nPartial rollout suspends a response after {TOKENS_PER_ITERATION} tokens per batch, and starts rows "
        "without "
        "staleness. Other "
        "load on the machine raises the seconds. `staleness.json` keeps the results; a seed in it is not run again.\n"
    )
    study.page("staleness", "The cost of staleness on sums", text)


def under(study: Study, name: str, seed: int) -> Tree:
    """Return the configuration of DAPO with one of the ways to take new weights.

    Processes that share two cores have one thread each.
    """
    tree = study.policy("dapo", {"overlong_cache": 8}, seed, threads=1, **WAYS[name])
    tree["streaming"] = {**tree.get("streaming", {}), "workers": {"actor.generate": ENGINES}}
    tree["rollout"] |= {"slots": SLOTS}
    if name != "synchronous":
        tree["trainer"] |= {"max_staleness": 1, "surplus": "keep", "learning_rate": LATE_LEARNING_RATE}
    if name == "partial":
        tree["rollout"] |= {"tokens_per_iteration": TOKENS_PER_ITERATION}
    return tree
