"""What the data of a run must have for its verifiers, its micro-batches and its model, checked before any model loads."""

import inspect
from collections.abc import Sequence

import torch

from braidrl.config import Config, SourceConfig
from braidrl.data.prompts import LoadedSource
from braidrl.data.sources import place
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow, Kind
from braidrl.rewards.verifier import Verifier, resolve
from braidrl.runtimes.prepare.checks import model_settings


def check_answers(config: Config, sources: Sequence[LoadedSource], settings: Sequence[SourceConfig]) -> None:
    """Raise UserError, with its line, for the first example without the answer that a verifier compares with."""
    for source, own in zip(sources, settings, strict=True):
        verifiers = [resolve(v.name, v.params) for v in (config.reward.verify if own.verify is None else own.verify)]
        needy = next((verifier for verifier in verifiers if needs_answer(verifier)), None)
        missing = next((example for example in source.examples if example.answer is None), None)
        if needy is not None and missing is not None:
            hint = suggest(own.answer_field, missing.metadata) if missing.metadata else "There is no other field."
            raise UserError(
                f"{place(source.path, missing.line)}: no field {own.answer_field!r} for the answer, which the verifier "
                f"{needy.label!r} compares with. {hint} Set answer_field of this source."
            )


def needs_answer(verifier: Verifier) -> bool:
    """Return True where the verifier asks for the answer and has no default for it."""
    if "answer" not in verifier.reads:
        return False
    return inspect.signature(verifier.function).parameters["answer"].default is inspect.Parameter.empty


def check_lengths(config: Config, flow: Flow, train: Sequence[LoadedSource], held_out: Sequence[LoadedSource]) -> None:
    """Raise UserError for prompts that leave no room for a response in a micro-batch, or in the model."""
    generates = any(stage.kind is Kind.GENERATE for stage in flow.stages)
    responses = config.rollout.max_response_tokens
    trained = longest(train, responses if generates else 0)
    if any("environment" in stage.params for stage in flow.stages):
        # where none is set, generation ends a sequence at the model's own limit
        trained = max(trained, config.rollout.max_sequence_tokens or 0)
    limits = {"trainer": config.trainer.max_tokens_per_device}
    limits |= {f"roles.{r}": own.max_tokens_per_device or trained for r, own in config.roles.items()}
    for section, limit in limits.items():
        if trained > limit:
            key = f"{section}.max_tokens_per_device"
            raise UserError(
                f"rows of data.train may have {trained} tokens, prompt and response together, and {key}={limit} is the most that one "
                f"micro-batch holds; write {key}={trained}, or lower data.max_prompt_tokens or rollout.max_response_tokens"
            )
    positions: int | None = model_settings(config.model).get("max_position_embeddings")
    needed = max(trained, longest(held_out, responses))
    if positions is not None and needed > positions:
        raise UserError(
            f"rows may have {needed} tokens, prompt and response together, and {config.model} has max_position_embeddings "
            f"{positions}; lower data.max_prompt_tokens or rollout.max_response_tokens"
        )


def longest(sources: Sequence[LoadedSource], added: int) -> int:
    """Return the tokens of the longest row of prompt and given response, or where none is given of prompt and `added` sampled tokens."""
    found = 0
    for source in sources:
        # A rank that leaves the filter to another has not tokenised its prompts.
        if source.prompts is not None:
            lengths = source.prompts.lengths
            given = [known.lengths for known in (source.responses, source.rejected) if known is not None]
            found = max(found, *(int((lengths + response).max()) for response in given or [torch.tensor(added)]))
    return found
