"""Preparation of a run before its first step, cheap checks first: flow, tokenizer, models, data."""

import importlib.util
import os
import subprocess
import sys
from operator import call
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from braidrl.cluster.devices import device_count
from braidrl.cluster.process import sleep_at_barriers
from braidrl.config import Config
from braidrl.config.paths import check_source, is_hub_name
from braidrl.data.prompts import check_train
from braidrl.engines.deployment import MODES
from braidrl.engines.deployment_checks import check_deployment
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind
from braidrl.flow.flow import serial_chain
from braidrl.runtimes.prepare import checks
from braidrl.runtimes.prepare.names import check_names
from braidrl.runtimes.prepare.run_data import Check, Prepared, with_data
from braidrl.runtimes.prepare.run_flow import build_flow, check_best, evaluation_flow, with_samples_of_data
from braidrl.training.decoders.proof import proven_plan
from braidrl.training.loading import check_model
from braidrl.training.optimizer import check_optimizer
from braidrl.training.pretrained import (
    check_scorer,
    check_tokens,
    load_tokenizer,
    read_model_config,
    separate_tokenizer,
)
from braidrl.training.role_settings import settings_of


def prepare(config: Config, train: bool = True, check: Check = call) -> Prepared:
    """Raise UserError for the first obstacle to a run; without `train` only evaluation data is read."""
    return with_data(without_data(config, train, check), check=check)


def without_data(config: Config, train: bool = True, check: Check = call) -> Prepared:
    """Do the part of `prepare` before any data is read; without `train` only the evaluation's models are checked."""
    config = with_samples_of_data(config)
    flow = build_flow(config)
    if MODES[config.runtime].chained:
        # One model is active at a time, and every rank switches at the same points.
        flow = Flow(flow.name, serial_chain(flow))
    evaluation = evaluation_flow(config, flow)
    tokenizer = load_tokenizer(config.model)
    prepared = Prepared(config, flow, evaluation, tokenizer, train)
    check(lambda: check_models(config, prepared.deployment.flow, tokenizer))
    if "ptx_tokens" not in flow.needs_from_data() and train and config.data.ptx is not None:
        raise UserError("data.ptx is set, but no stage of the flow reads it; remove it, or set the recipe's ptx_coef")
    check(lambda: check_names(config))
    check(lambda: check_best(config, evaluation))
    check(lambda: check_optimizer(config.trainer))
    check(lambda: checks.check_dtypes(config, flow))
    check(lambda: checks.check_backends(config, flow))
    check(lambda: check_deployment(prepared.deployment, flow))
    check(lambda: checks.check_adapters(config, flow))
    check(lambda: checks.check_balance(config, flow))
    check(lambda: checks.check_token_columns(config, flow))
    check(lambda: checks.check_roles(config, {*flow.roles, *evaluation.roles}, flow.name))
    return prepared


def check_files(config: Config, train: bool) -> None:
    """Raise UserError if local training or evaluation data is missing.

    No file is opened; names on the hub are checked by the download.
    """
    if train:
        check_train(config.data)
    texts = [config.data.ptx] if train and config.data.ptx else []
    for source in [*(config.data.train if train else ()), *config.data.eval.values(), *texts]:
        if not is_hub_name(source.path):
            check_source(source)


def lacking(config: Config) -> list[str]:
    """Return a line for each missing resource of this machine, if it computes; nodes of a cluster check themselves."""
    lines: list[str] = []
    if config.cluster.launcher == "ray" or config.cluster.address or "RAY_ADDRESS" in os.environ:
        return lines
    if config.device == "cuda" and not device_count(config.device):
        lines.append(
            "device=cuda: torch sees no CUDA device here; write device=auto or device=cpu, or look at what `braid "
            "doctor` says"
        )
    if config.rollout.engine == "vllm" and not has_package("vllm", config.rollout.python):
        lines.append(
            f"rollout.engine=vllm: {config.rollout.python or sys.executable} has no package vllm; name an interpreter "
            "that has it by rollout.python, or see docs/engines.md"
        )
    if MODES[config.runtime].placed and not has_package("ray"):
        lines.append("runtime=hybrid needs Ray, which is not installed; run `pip install 'braidrl[ray]'`")
    return lines


def has_package(name: str, python: Path | None = None) -> bool:
    """Return True if an interpreter, by default this one, has a package; nothing is imported.

    Raises UserError if the interpreter cannot be run.
    """
    if python is None:
        return importlib.util.find_spec(name) is not None
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    try:
        done = subprocess.run([str(python.expanduser()), "-c", program], stdin=subprocess.DEVNULL, check=False)
        return done.returncode == 0
    except OSError:
        raise UserError(f"rollout.python: {python} is no interpreter that can be run") from None


def check_models(config: Config, flow: Flow, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a role whose model lacks the needed head, or whose tokenizer differs from the others'."""
    for role in flow.roles:
        path = settings_of(role, config).model
        if settings_of(role, config).backend == "torch":
            check_model(path)
        tokenizer_of_role = separate_tokenizer(role, config, tokenizer)
        check_tokens(path, tokenizer_of_role or tokenizer)
        if config.rollout.engine == "embedded" and any(s.kind is Kind.GENERATE and s.role == role for s in flow.stages):
            proven_plan(read_model_config(path), path, decodes=True)
        if role in flow.scalar_roles:
            check_scorer(path, role in flow.trained_roles, f"roles.{role}.model")
        only_scores = role not in flow.trained_roles and all(s.type == "score" for s in flow.stages if s.role == role)
        if not only_scores and tokenizer_of_role is not None:
            raise UserError(
                f"roles.{role}.model: {path} has another tokenizer than {config.model}; roles share token ids, unless "
                "one only scores and is not trained"
            )


def set_up_torch(config: Config) -> None:
    """Set the threads, seeds and determinism of this process, and by its environment the threads of its children."""
    transformers_logging.disable_progress_bar()
    if config.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    sleep_at_barriers()
