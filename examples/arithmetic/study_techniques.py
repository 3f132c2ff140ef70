"""Study of single techniques: each in a setting where its own argument predicts an effect, with it and without it.

The ablation adds techniques one by one on one task, where some have no effect. Here each technique gets a suitable
setting: correct answers that are truncated, and responses that ramble. The ablation itself shows dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from pages import Lines, Mean, curve, table
from study import RAMBLING, SCORE, Numbers, Study, Teacher, Tree, over_seeds
from study_recipes import PLAIN

from braidrl.config import parse_config
from braidrl.runtimes.evaluation import evaluate_model
from braidrl.runtimes.saving.checkpoints import export_model

STEPS = 30
EARLY = 10
"""Steps over which lengths are compared, while responses are still long."""
ROOM = 100
"""Token limit at which nothing is truncated: more than the teachers' longest working."""
CAREFUL = Teacher("careful", rambling=0.5, rambling_mistakes=0.1)
"""This teacher makes fewer mistakes in answers that repeat their working."""

Measure = Callable[[Study, str, Tree, Sequence[Lines]], list[float]]
"""The runs of a technique for each seed, from the study, the runs' name and their configuration to their metrics."""


@dataclass(frozen=True)
class Setting:
    """A technique, the reason why it must show an effect here, and the measured quantity."""

    name: str
    argument: str
    teacher: Teacher
    response_tokens: int
    measured: str
    measure: Measure
    rises: bool
    """True if the technique is expected to raise the measured quantity, False if it is to lower it."""
    technique: Tree
    without: Tree = field(default_factory=dict)


def final_entropy(study: Study, name: str, tree: Tree, runs: Sequence[Lines]) -> list[float]:
    """Return the policy's final entropy, in nats per token."""
    return [lines[-1]["actor/entropy"] for lines in runs]


def early_mean(key: str, study: Study, name: str, tree: Tree, runs: Sequence[Lines]) -> list[float]:
    """Return the mean of a metric over the first steps."""
    return [fmean(value for step, value in curve(lines, key) if 1 <= step <= EARLY) for lines in runs]


def share_cut_off(study: Study, name: str, tree: Tree, runs: Sequence[Lines]) -> list[float]:
    """Return the share of truncated responses, the mean over all steps."""
    return [fmean(value for step, value in curve(lines, "response/truncated_fraction") if step) for lines in runs]


def score_with_room(study: Study, name: str, tree: Tree, runs: Sequence[Lines]) -> list[float]:
    """Return the share of correct held-out answers when nothing is truncated."""
    found = []
    for seed in study.seeds:
        run = study.folder / f"{name}-{seed}"
        if not (model := run / "exported").is_dir():
            export_model(run, model)
        asked = {
            **tree,
            "model": str(model),
            "seed": seed,
            "name": f"{name}-{seed}-room",
            "output": str(study.folder),
            "device": "cpu",
            "rollout": {**tree["rollout"], "max_response_tokens": ROOM},
        }
        found.append(evaluate_model(parse_config(asked))[SCORE])
    return found


SETTINGS = (
    Setting(
        "Clip-Higher",
        "the upper bound keeps unlikely tokens unlikely, the lower bound lets likely tokens stay likely, so entropy "
        "falls",
        RAMBLING,
        40,
        "entropy at the end",
        final_entropy,
        True,
        {"clip_high": 0.28},
    ),
    Setting(
        "overlong filtering",
        "a truncated response counts as wrong even if its working is good, so the policy gives up long working",
        CAREFUL,
        30,
        "share of (truncated) long working, over all steps",
        share_cut_off,
        True,
        {"overlong_filter": True},
    ),
    Setting(
        "overlong filtering",
        "here long working has fewer mistakes, which is lost when it is given up",
        CAREFUL,
        30,
        f"held-out avg@4 with {ROOM} tokens",
        score_with_room,
        True,
        {"overlong_filter": True},
    ),
    Setting(
        "soft overlong punishment",
        "if truncated responses are masked, no reward says that they are too long",
        RAMBLING,
        30,
        f"share truncated, steps 1 to {EARLY}",
        partial(early_mean, "response/truncated_fraction"),
        False,
        {"overlong_cache": 8},
        {"overlong_filter": True},
    ),
    Setting(
        "token-level loss",
        "a mean over each response gives tokens of long responses less weight, and rambling responses are long",
        RAMBLING,
        ROOM,
        f"length, steps 1 to {EARLY}",
        partial(early_mean, "response/length_mean"),
        False,
        {"aggregate": "token-mean"},
    ),
)


def techniques(study: Study) -> Numbers:
    """Run each technique in its setting, with it and without it, over the seeds."""
    rows, found = [], {}
    for setting in SETTINGS:
        runs = f"technique-{setting.name.replace(' ', '-')}".lower()
        without, with_it = (
            measured(study, setting, f"{runs}{way}", algorithm)
            for way, algorithm in (
                ("-without", {**PLAIN, **setting.without}),
                ("", {**PLAIN, **setting.technique}),
            )
        )
        change = Mean.of([after - before for before, after in zip(without, with_it, strict=True)])
        rows.append(
            [
                setting.name,
                setting.argument,
                setting.measured,
                Mean.of(without).text(".3f"),
                Mean.of(with_it).text(".3f"),
                change.text("+.3f"),
                verdict(change, setting.rises),
            ]
        )
        found[f"{setting.name}: {setting.measured}"] = change.mean
    header = ["", "argument", "measured", "without", "with", "change", "shows"]
    text = (
        f"Every run has {STEPS} steps of 32 prompts with 8 responses and four updates. *Without* is plain GRPO; for "
        "the "
        "punishment it also masks truncated responses. Changes are paired by seed; ± is half of a 95% interval of "
        "the mean "
        f"(Student's t) over {len(study.seeds)} seeds.\n\n" + table(header, rows)
    )
    study.page("techniques", "DAPO's techniques, each where its argument applies", text)
    return found


def measured(study: Study, setting: Setting, name: str, algorithm: Tree) -> list[float]:
    """Return a setting's measured quantity for each seed."""
    tree = study.policy("dapo", algorithm, 0, setting.teacher, **sizes(setting))
    runs = over_seeds(study, name, lambda seed: {**tree, "seed": seed})
    return setting.measure(study, name, tree, runs)


def sizes(setting: Setting) -> Tree:
    """Return the parts of a run's configuration that belong to its setting."""
    return {
        "rollout": {"samples_per_prompt": 8, "max_response_tokens": setting.response_tokens, "slots": 128},
        "trainer": {
            "steps": STEPS,
            "prompts_per_step": 32,
            "rows_per_update": 64,
            "learning_rate": 2e-4,
            "checkpoint_every": 30,
        },
        "evaluation": {"every": STEPS, "samples": 4, "top_p": 1.0},
    }


def verdict(change: Mean, rises: bool) -> str:
    """Return whether a change exceeds the spread of the seeds, and has the expected sign."""
    if abs(change.mean) <= change.half:
        return "no"
    return "yes" if (change.mean > 0) == rises else "the opposite"
