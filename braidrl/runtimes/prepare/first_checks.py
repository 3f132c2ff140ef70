"""Checks of a configuration that need no model: files, names, the flow, and the first record of each source.

A command makes them before it imports what a run needs, which takes seconds. A run checks the same again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Any

from braidrl.config import Config, SourceConfig, VerifierConfig
from braidrl.config.paths import check_paths, is_hub_name, models_of
from braidrl.data.records import place
from braidrl.data.sources import Reading
from braidrl.data.vision import has_image_processor
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow
from braidrl.rewards.verifier import resolve
from braidrl.runtimes.prepare.names import check_names
from braidrl.runtimes.prepare.run_flow import check_best, evaluation_flow, with_samples_of_data, written_flow
from braidrl.training.model_settings import check_tokenizer, checked_settings

JSON_BYTES = 16 << 20
"""Maximum size of a .json file that is read for its first record: such a file is parsed whole."""


def check_first(config: Config, trained: bool = True, evaluated: bool = True, check: Callable[..., Any] = call) -> None:
    """Raise UserError for a mistake that neither torch nor a model is needed to see.

    `trained` and `evaluated` say which data the command reads; `check` runs each check, by default until the first
    error.
    """
    check_paths(config, trained, evaluated, check)
    check(lambda: check_names(config))
    for model in dict.fromkeys(path for path in models_of(config) if path.expanduser().is_dir()):
        check(partial(checked_settings, model))
        # A plan needs no tokenizer.
        if trained or evaluated:
            check(partial(check_tokenizer, model))
    flow = check(lambda: written_flow(with_samples_of_data(config)))
    # The images of a model that sees are read with its processor.
    if flow is None or is_hub_name(config.model) or has_image_processor(config.model):
        return
    for source in config.data.training_sources if trained else ():
        check(partial(check_first_record, config, source, flow, flow.trains_on_pairs))
    evaluation = evaluation_flow(config, flow)
    if trained:
        check(partial(check_best, config, evaluation))
    for source in config.data.evaluation_sources.values() if evaluated else ():
        check(partial(check_first_record, config, source, evaluation, flow.trains_on_pairs))


def check_sets(config: Config) -> None:
    """Raise UserError if there is no set to evaluate on."""
    if not config.data.evaluation_sources:
        raise UserError("data.eval names no set; give it one, as in data.eval.test=test.jsonl")


def check_first_record(config: Config, source: SourceConfig, flow: Flow, pairs: bool) -> None:
    """Raise UserError if the first record of a local file has not the fields that a flow reads, with responses of
    `pairs` if it reads any.
    """
    path = source.path
    if is_hub_name(path) or path.is_dir() or (path.suffix == ".json" and path.stat().st_size > JSON_BYTES):
        return
    responses = "response" in flow.needs_from_data()
    example = Reading(source, responses=responses, pairs=responses and pairs).first_example()
    if example is None or not any(stage.type == "verify" for stage in flow.stages):
        return
    verifiers = config.reward.verify if source.verify is None else source.verify
    check_answer(source, verifiers, example.answer, example.metadata, example.line)
    if example.answer is None:
        check_answered(source, verifiers, example.line, list(example.metadata))


def check_answer(
    source: SourceConfig, verifiers: Sequence[VerifierConfig], answer: Any, metadata: dict[str, Any], line: int
) -> None:
    """Raise UserError for a reference answer that a verifier cannot use."""
    for verifier in (resolve(named.name, named.params) for named in verifiers):
        if why := verifier.unusable(answer, metadata):
            raise UserError(
                f"{place(source.path, line)}: the verifier {verifier.label!r} cannot use the answer: {why}; leave the "
                "example out, or fix it"
            )


def check_answered(source: SourceConfig, verifiers: Sequence[VerifierConfig], line: int, fields: Sequence[str]) -> None:
    """Raise UserError if a verifier compares with the answer that an example, with other `fields`, lacks."""
    for verifier in (resolve(named.name, named.params) for named in verifiers):
        if verifier.needs_answer:
            hint = suggest(source.answer_field, fields) if fields else "There is no other field."
            raise UserError(
                f"{place(source.path, line)}: no field {source.answer_field!r} for the answer, which the verifier "
                f"{verifier.label!r} compares with. {hint} Set answer_field of this source."
            )
