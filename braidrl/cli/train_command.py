"""`braid train` and `braid eval`."""

from pathlib import Path
from typing import Annotated

import typer

from braidrl.cli.arguments import ConfigFile, Overrides, split_config
from braidrl.errors import UserError


def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume this run from its latest checkpoint; key=value changes keys that may change."),
    ] = None,
    newest_whole: Annotated[
        bool,
        typer.Option(
            "--newest-whole", help="If the latest checkpoint is damaged, resume from the newest undamaged one."
        ),
    ] = False,
    replay: Annotated[Path | None, typer.Option(help="Train on the rollouts that this run recorded.")] = None,
    rollout_only: Annotated[bool, typer.Option("--rollout-only", help="Record rollouts; train nothing.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the required memory, and exit.")
    ] = False,
) -> None:
    """Train a flow. The first line of output is the run folder."""
    from braidrl.config import load_config
    from braidrl.runtimes.run import train as run_training
    from braidrl.runtimes.saving.folders import run_config
    from braidrl.runtimes.start import start_fork_server

    if resume is not None:
        file, changed = split_config(config, overrides)
        if file is not None:
            raise UserError(
                f"--resume takes its configuration from the run folder; write what changes as key=value, not {file}"
            )
        settings = run_config(resume, changed)
    else:
        settings = load_config(*split_config(config, overrides), every=dry)
    if dry:
        from braidrl.cli.dry_run import dry_run

        dry_run(settings)
        return
    if newest_whole and resume is None:
        raise UserError("--newest-whole is for --resume; a new run has no checkpoint")
    start_fork_server(settings)
    run_training(settings, resume=resume, newest_whole=newest_whole, replay=replay, rollout_only=rollout_only)


def evaluate(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Evaluate a model, or a checkpoint given as model=, on the sets in data.eval; a reward model on pairs of responses."""
    from braidrl.config import load_config
    from braidrl.config.reading import given_keys
    from braidrl.runtimes.evaluation import evaluate_model
    from braidrl.runtimes.spmd.launch import is_reporting_rank
    from braidrl.runtimes.start import start_fork_server
    from braidrl.training.loading import has_score_head

    # The training flow does not matter: a policy generates and is verified, a model with a score head scores pairs.
    file, changed = split_config(config, overrides)
    settings = load_config(file, changed, flow="grpo")
    if "flow" not in given_keys(file, changed) and has_score_head(settings.model):
        settings = load_config(file, changed, flow="reward_model")
    start_fork_server(settings)
    metrics = evaluate_model(settings)
    for name, value in metrics.items() if is_reporting_rank() else ():
        typer.echo(f"{name}\t{value:.4f}")
