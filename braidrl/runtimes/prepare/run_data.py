"""The data of a run: loading, and checks of what was loaded.

configuration, flow, tokenizer ──with_data──▶ sources, checked: answers, lengths, images, tokens

It imports no model code, so that `braid data` starts soon.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import call
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from braidrl.cluster.devices import device_memory
from braidrl.config import Config, SourceConfig, VerifierConfig
from braidrl.data.chat import end_ids_of
from braidrl.data.prompts import LoadedSource, load_eval, load_texts, load_train
from braidrl.data.records import place as place_of
from braidrl.data.tables import LoadingRanks
from braidrl.data.vision import Vision
from braidrl.engines.deployment import Deployment
from braidrl.engines.http.dialects import DIALECTS
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind
from braidrl.rewards.verifier import READERS
from braidrl.rewards.verify import RuleRewards
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.runtimes.prepare.first_checks import check_answer, check_answered
from braidrl.training.compute.rope_lengths import RopeLengths, most_positions
from braidrl.training.pretrained import model_settings, read_model_config, separate_tokenizer
from braidrl.training.processors import load_vision, no_vision_reason
from braidrl.training.role_settings import USUAL_TOKENS, settings_of

Check = Callable[[Callable[[], Any]], Any]
"""Runs a check: at once, or collecting its UserError and continuing with the next."""
EXAMINED = 2000
"""Examples of a source whose reference answers are read before a run: some seconds; later ones fail as rows."""
SEEING_ENGINES = ("embedded", "vllm")
"""Engines that take images in prompts."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A checked configuration with everything except the models; with its data too, unless other processes read it."""

    config: Config
    flow: Flow
    evaluation: Flow
    tokenizer: PreTrainedTokenizerBase
    train: bool = True
    """False if the run only evaluates."""
    sources: list[LoadedSource] = field(default_factory=list)
    eval_sources: dict[str, LoadedSource] = field(default_factory=dict)
    texts: LoadedSource | None = None
    running: RuleRewards | None = None
    """Verifiers whose processes already run."""

    @cached_property
    def vision(self) -> Vision | None:
        """Return the image processor of the run's model; None for a text-only model."""
        return load_vision(self.config.model, self.config.data.images)

    @cached_property
    def deployment(self) -> Deployment:
        """Return the deployment of the run."""
        return deploy(self.config, self.flow, self.evaluation, self.train)

    @property
    def kept(self) -> dict[str, Any]:
        """Return the table folders of this process's data, for other processes that read the same files."""
        evaluation = {name: source.kept for name, source in self.eval_sources.items()}
        texts = self.texts.kept if self.texts else None
        return {"train": [source.kept for source in self.sources], "eval": evaluation, "texts": texts}

    def rewards(self) -> RuleRewards | None:
        """Return the run's verifiers, whose processes start at the first check; None without `verify` stages."""
        if not any(stage.type == "verify" for stage in self.deployment.stages):
            return None
        if self.running is not None:
            return self.running
        config = self.config
        # Evaluation sets are numbered after the sources.
        sources = [*config.data.training_sources, *config.data.evaluation_sources.values()]
        by_source: dict[int, list[VerifierConfig]] = {
            i: s.verify for i, s in enumerate(sources) if s.verify is not None
        }
        names = {i: source.label for i, source in enumerate(sources)}
        return RuleRewards(
            config.reward, by_source, self.tokenizer, names, end_ids_of(config.model.expanduser(), self.tokenizer)
        )


def with_data(
    prepared: Prepared,
    kept: Mapping[str, Any] | None = None,
    check: Check = call,
    ranks: LoadingRanks | None = None,
    opens: bool = False,
) -> Prepared:
    """Return a run with its data, in the table folders `kept` by another process, or tokenized together with
    `ranks`.

    With `opens`, training data may still be read when this returns; the caller then calls `settle` from time to time.
    Raises UserError for data that it cannot use.
    """
    config, flow, tables, needed = prepared.config, prepared.flow, kept or {}, prepared.flow.needs_from_data()
    shared: dict[str, Any] = {"data": config.data, "tokenizer": prepared.tokenizer, "ranks": ranks}
    with_images: dict[str, Any] = {**shared, "vision": prepared.vision}
    responses, evaluated = "response" in needed, "response" in prepared.evaluation.needs_from_data()
    sources: list[LoadedSource] = []
    if prepared.train:
        # A curriculum reads every example before the first step.
        opened: dict[str, Any] = {"kept": tables.get("train"), "opens": opens and config.data.curriculum is None}
        train_on = partial(load_train, **with_images, responses=responses, pairs=flow.trains_on_pairs, **opened)
        sources = check(train_on) or []
    held_out = (
        check(
            partial(
                load_eval,
                **with_images,
                responses=evaluated,
                pairs=evaluated and flow.trains_on_pairs,
                kept=tables.get("eval"),
            )
        )
        or {}
    )
    texts = load_texts(**shared, kept=tables.get("texts")) if prepared.train and "ptx_tokens" in needed else None
    prepared = replace(prepared, sources=sources, eval_sources=held_out, texts=texts)
    if any(source.opening is not None for source in sources) and not bounds_suffice(prepared):
        for source in sources:
            source.settle(ranks, wait=True)
    check_data(prepared, check)
    return prepared


def bounds_suffice(prepared: Prepared) -> bool:
    """Return True if upper bounds of the opened sources suffice for the run's checks and sizes."""
    config, sources = prepared.config, prepared.sources
    try:
        check_lengths(config, prepared.flow, sources, list(prepared.eval_sources.values()))
    except UserError:
        return False
    is_within = longest(sources, config.rollout.max_response_tokens) <= config.max_sequence_tokens
    return is_within and not embeddings_exceeded(config, prepared.deployment.roles, prepared.tokenizer)


def settle(prepared: Prepared, ranks: LoadingRanks | None = None) -> list[str]:
    """Adopt the tables of opened sources that are complete now, and return a log line for each; all ranks call this
    together.

    Raises UserError for data that the run cannot use.
    """
    settled = [source for source in prepared.sources if source.settle(ranks)]
    if settled:
        check_data(prepared)
    return [source.report() for source in settled]


def check_data(prepared: Prepared, check: Check = call) -> None:
    """Raise UserError for data that a run cannot use."""
    config, flow, sources = prepared.config, prepared.flow, prepared.sources
    tested, texts = list(prepared.eval_sources.values()), [prepared.texts] if prepared.texts else []
    if sources and any(stage.type == "verify" for stage in flow.stages):
        check(lambda: check_answers(config, sources, config.data.training_sources))
    if tested and any(stage.type == "verify" for stage in prepared.evaluation.stages):
        check(lambda: check_answers(config, tested, list(config.data.evaluation_sources.values())))
    check(lambda: check_lengths(config, flow, sources, tested))
    check(lambda: check_images(config, prepared.deployment, prepared.tokenizer, [*sources, *tested]))
    every = [*sources, *tested, *texts]
    check(lambda: check_vocabulary(config, prepared.deployment.roles, prepared.tokenizer, every))


def check_answers(config: Config, sources: Sequence[LoadedSource], configs: Sequence[SourceConfig]) -> None:
    """Raise UserError, with its line, for the first example without an answer for the verifier, or with an unusable one
    among the first EXAMINED.
    """
    for source, settings in zip(sources, configs, strict=True):
        verifiers = config.reward.verify if settings.verify is None else settings.verify
        for number in range(min(len(source), EXAMINED) if any(named.name in READERS for named in verifiers) else 0):
            example = source[number]
            check_answer(settings, verifiers, example.answer, example.metadata, example.line)
        if source.facts.unanswered is not None:
            check_answered(settings, verifiers, source.facts.unanswered, source.facts.unanswered_fields)


def check_images(
    config: Config, deployment: Deployment, tokenizer: PreTrainedTokenizerBase, sources: Sequence[LoadedSource]
) -> None:
    """Raise UserError for images in the data of a run that does not support them."""
    source = next((source for source in sources if set(source.facts.images) - {"0"}), None)
    if source is None:
        return
    flow = deployment.flow
    generates = any(stage.kind is Kind.GENERATE for stage in flow.stages)
    if generates and (deployment.engines.pools_ranks or deployment.engines.hosts_vllm):
        raise UserError(
            f"{source.path} has images, which engines on the ranks that train do not support where they are vLLM, or "
            "shard the model; remove rollout.tensor and rollout.pipeline, or write rollout.engines=1 for vLLM"
        )
    engine, dialect = config.rollout.engine, config.rollout.servers.dialect
    sees = engine in SEEING_ENGINES or (engine == "http" and DIALECTS[dialect].generate_seeing is not None)
    if generates and not sees:
        named = f"{engine} with servers of {dialect}" if engine == "http" else engine
        raise UserError(
            f"{source.path} has images, which rollout.engine={named} does not support; write "
            f"rollout.engine={' or '.join(SEEING_ENGINES)}"
        )
    for role in flow.roles:
        role_config = settings_of(role, config)
        if role_config.backend != "torch":
            raise UserError(
                f"{source.path} has images, which the backend {role_config.backend} of {role} does not support"
            )
        if config.trainer.train_vision and role_config.lora is not None and role in flow.trained_roles:
            raise UserError(f"trainer.train_vision: {role} trains adapters of only the text part; remove one of them")
        if separate_tokenizer(role, config, tokenizer) is not None:
            raise UserError(
                f"roles.{role}.model: {role_config.model} has another tokenizer than {config.model}, and "
                f"{source.path} has images; take a model of one family"
            )
        if reason := no_vision_reason(role_config.model, config.data.images):
            raise UserError(
                f"roles.{role}.model: {role_config.model} takes no images, and {source.path} has some: {reason}"
            )
        if role_config.layout.pipeline > 1:
            check_first_layers(role, role_config.model, role_config.layout.pipeline)


def check_first_layers(role: str, model: Path, pipeline: int) -> None:
    """Raise UserError if images enter more layers of a model than its first pipeline rank has."""
    config = read_model_config(model)
    entered = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    layers = config.get_text_config().num_hidden_layers
    if layers // pipeline < entered:
        raise UserError(
            f"the layout of {role} has pipeline={pipeline}, and images enter the first {entered} of {layers} layers, "
            f"which its first rank must have; write pipeline={max(1, layers // entered)} or less"
        )


def check_lengths(config: Config, flow: Flow, train: Sequence[LoadedSource], held_out: Sequence[LoadedSource]) -> None:
    """Raise UserError for prompts that leave no room for a response in a micro-batch, or in the model."""
    generates = any(stage.kind is Kind.GENERATE for stage in flow.stages)
    responses = config.rollout.max_response_tokens
    trained = longest(train, responses if generates else 0)
    if any("environment" in stage.params for stage in flow.stages):
        # without a limit, generation ends a sequence at the model's limit
        trained = max(trained, config.rollout.max_sequence_tokens or 0)
    # If device memory decides, no row is longer.
    decided = config.trainer.max_tokens_per_device is None and device_memory(config.device) is not None
    limits = {f"roles.{r}": role_config.max_tokens_per_device or trained for r, role_config in config.roles.items()}
    if not all((role_config := config.roles.get(role)) and role_config.max_tokens_per_device for role in flow.roles):
        # Some role has no separate limit.
        limits = {"trainer": trained if decided else (config.trainer.max_tokens_per_device or USUAL_TOKENS), **limits}
    for section, limit in limits.items():
        if trained > limit:
            key = f"{section}.max_tokens_per_device"
            raise UserError(
                f"rows of data.train may have {trained} tokens, prompt and response together, and {key}={limit} is the "
                f"most that one micro-batch holds; write {key}={trained}, or lower data.max_prompt_tokens or "
                "rollout.max_response_tokens"
            )
    positions = most_positions(model_settings(config.model))
    needed = max(trained, longest(held_out, responses))
    if positions is not None and needed > positions:
        raise UserError(
            f"rows may have {needed} tokens, prompt and response together, and {config.model} has "
            f"max_position_embeddings {positions}; lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
    if generates and config.model.expanduser().is_dir():
        warn_of_rope(config, needed)


def warn_of_rope(config: Config, longest_row: int) -> None:
    """Warn if an engine's log-probs differ from the trainer's because the rope's factors depend on the length."""
    length = RopeLengths.of(read_model_config(config.model)).shortest
    if length is None or longest_row <= length:
        return
    if config.rollout.engine == "embedded":
        logger.warning(
            "model: rows longer than %d tokens have other rope factors: each token is drawn with those of its row "
            "as it stood, and trained with those of the whole row; old=recompute corrects rows that cross this length",
            length,
        )
    else:
        logger.warning(
            "model: rows longer than %d tokens have other rope factors, and %s may compute every row with those of the "
            "longest: keep prompts and responses together within %d tokens, or write old=recompute",
            length,
            config.rollout.engine,
            length,
        )


def embeddings_exceeded(config: Config, roles: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the embedding size of each role whose model has fewer tokens than the tokenizer."""
    sizes = {}
    for role in roles:
        size = model_settings(settings_of(role, config).model).get("vocab_size")
        if size is not None and size < len(tokenizer):
            sizes[role] = int(size)
    return sizes


def check_vocabulary(
    config: Config, roles: Iterable[str], tokenizer: PreTrainedTokenizerBase, sources: Sequence[LoadedSource]
) -> None:
    """Raise UserError, with its line, for the first example with a token that a model cannot embed."""
    exceeded = embeddings_exceeded(config, roles, tokenizer)
    if not exceeded:
        return
    size, role = min((size, role) for role, size in exceeded.items())
    sizes = (
        f"the tokenizer has {len(tokenizer)} tokens and the embedding of {role}, {settings_of(role, config).model}, "
        f"has {size}"
    )
    remedy = "resize the embedding (`model.resize_token_embeddings`), or use the model's own tokenizer"
    for source in sources:
        if (unknown := source.first_beyond(size)) is not None:
            number, token = unknown
            where = place_of(source.path, source[number].line)
            word = tokenizer.convert_ids_to_tokens(token)
            raise UserError(f"{where}: {sizes}: token {token}, {word!r}, is beyond it; {remedy}")


def vocabulary_lines(prepared: Prepared) -> list[str]:
    """Return a line for each role whose model lacks tokens that later texts (environments, users) may contain."""
    sizes = embeddings_exceeded(prepared.config, prepared.deployment.roles, prepared.tokenizer)
    return [
        f"the tokenizer has {len(prepared.tokenizer)} tokens and the embedding of {role} has {size}: none beyond it is "
        "in the data, and a later text with one ends the run"
        for role, size in sizes.items()
    ]


def longest(sources: Sequence[LoadedSource], added: int) -> int:
    """Return the tokens of the longest row: prompt and response of the data, or prompt and `added` sampled tokens."""
    return max((s.facts.longest_row or s.facts.longest_prompt + added for s in sources), default=0)
