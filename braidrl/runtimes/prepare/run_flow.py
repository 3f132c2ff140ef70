"""Resolution of the flow that runs: a recipe's stages with every default made explicit.

Open parameters of a stage are decided here, once, before any model loads: the source of old log-probs, the correction
of rollouts, and the scores for right and wrong.
"""

from dataclasses import replace
from typing import Any

from braidrl.agents.environments import AGENTS, check_environment
from braidrl.agents.keys import endpoint_key
from braidrl.agents.spans import check_spans
from braidrl.config import Config
from braidrl.config.data import RewardConfig
from braidrl.data.vision import IMAGE_COLUMNS, has_image_processor
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.batches import check_update_size
from braidrl.flow.flow import is_optimized
from braidrl.flow.recipes import load_flow
from braidrl.flow.signatures import in_namespace, namespaces_of, needs_old
from braidrl.flow.stages import make_stage, with_params
from braidrl.training.role_settings import merges_adapters, settings_of

TRUNCATED = {"name": "truncated"}


def build_flow(config: Config) -> Flow:
    """Return the validated flow of a run. Raises UserError for a flow that cannot run, or an unknown environment."""
    flow = written_flow(config)
    return with_images(Flow(flow.name, [resolve(stage, config) for stage in flow.stages]), config)


def written_flow(config: Config) -> Flow:
    """Return the flow with its open parameters left open, which needs no torch. Raises UserError as `build_flow`."""
    rollout = config.rollout
    sizes = {"max_response_tokens": rollout.max_response_tokens, "samples_per_prompt": rollout.samples_per_prompt}
    flow = load_flow(config.flow, config.algorithm, sizes)
    environment, stages = rollout.environment, list(flow.stages)
    if environment.name is not None:
        # An environment's rewards replace verification.
        played = {s.params.get("into") for s in stages if s.type == "generate"}
        stages = [s for s in stages if s.type != "verify" or s.params.get("of") not in played]
        for position, stage in enumerate(stages):
            if stage.type == "generate":
                name = stage.params.get("environment", environment.name)
                stages[position] = with_params(stage, {"environment": name})
    for stage in stages:
        if "environment" in stage.params:
            check_environment(stage.params["environment"], environment.params, environment.python)
            if stage.params["environment"].startswith(AGENTS) and "policies" in stage.params:
                raise UserError(f"{stage.name}: an agent with its own loop has one policy; remove `policies`")
            endpoint_key(environment)
            check_spans(environment.spans)
    flow = Flow(flow.name, stages)
    samples, rows, needed = rollout.samples_per_prompt, config.trainer.rows_per_update, responses_in_data(flow)
    if needed is not None and samples != needed:
        what = "pairs of given responses" if flow.trains_on_pairs else "the response given for each prompt"
        raise UserError(f"{flow.name} trains on {what}; write rollout.samples_per_prompt={needed}")
    if needed is not None and flow.trains_on_pairs and rows is not None and rows % 2:
        raise UserError(f"trainer.rows_per_update={rows} splits pairs; write an even number")
    check_update_size(config.trainer.prompts_per_step, samples, rows)
    for stage in flow.stages:
        check_stage(stage, config)
    return flow


def evaluation_flow(config: Config, flow: Flow) -> Flow:
    """Return generation at the evaluation's settings, checked or played as in the flow, by its first generating role.

    Without a generating role it is the first trained role. A flow that trains on responses of the data is evaluated on
    held-out ones instead, depending on `evaluation.responses`.
    """
    learner = (*flow.trained_roles, *flow.roles)[0]
    is_scorer = flow.trains_on_pairs and learner in flow.scalar_roles
    if is_scorer or (responses_in_data(flow) is not None and evaluates_on_data(config, learner in flow.scalar_roles)):
        return with_images(Flow("evaluation", stages_on_data(flow, learner)), config)
    role = next((s.role for s in flow.stages if s.kind is Kind.GENERATE), learner)
    checks = next((s.params for s in flow.stages if s.type == "verify"), {})
    scores = {"correct_score": checks.get("correct_score", 1.0), "wrong_score": checks.get("wrong_score", 0.0)}
    settings = config.evaluation
    sampling = {
        "temperature": settings.temperature or 1.0,
        "greedy": settings.temperature == 0,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "purpose": "evaluation",
    }
    generating = next((stage.params for stage in flow.stages if stage.kind is Kind.GENERATE), {})
    played = {name: generating.get(name) for name in ("environment", "policies")}
    generate = make_stage("generate", role, {**sampling, **played}, id="evaluation.generate")
    stages = [generate]
    if played["environment"] is None:
        stages.append(make_stage("verify", "reward", scores, id="evaluation.verify"))
    return with_images(Flow("evaluation", stages), config)


def with_images(flow: Flow, config: Config) -> Flow:
    """Return the flow of a model that takes images: models read the columns of images, environments write them."""
    if not has_image_processor(config.model):
        return flow
    # Imported here: the flow of a model that takes no images needs no torch.
    from braidrl.training.processors import load_vision

    if load_vision(config.model, config.data.images) is None:
        return flow
    stages = []
    for stage in flow.stages:
        if stage.kind in (Kind.GENERATE, Kind.INFER) or is_optimized(stage):
            of, spaces = stage.params.get("of"), namespaces_of(stage.params) if "environment" in stage.params else ()
            optional = (*stage.optional, *IMAGE_COLUMNS, *in_namespace(of, IMAGE_COLUMNS if of else ()))
            writes = tuple(f"{into}.{name}" if into else name for into in spaces for name in IMAGE_COLUMNS)
            stage = replace(stage, optional=optional, writes=(*stage.writes, *writes))
        stages.append(stage)
    return Flow(flow.name, stages)


def metrics_of_sets(config: Config, evaluation: Flow) -> list[str]:
    """Return the names of the metrics of the evaluation sets."""
    types, samples = {stage.type for stage in evaluation.stages}, config.evaluation.samples
    if "generate" in types:
        powers = [f"pass@{2**power}" for power in range(samples.bit_length())]
        names = [f"avg@{samples}", *powers, "length_mean", "score_mean"]
    else:
        names = ["loss"] if "shape.response_log_prob" in types else ["pair_accuracy", "margin"]
    return [f"eval/{of_set}/{name}" for of_set in config.data.evaluation_sources for name in names]


def check_best(config: Config, evaluation: Flow) -> None:
    """Raise UserError if `evaluation.best` names no metric of the evaluation sets."""
    names, best = metrics_of_sets(config, evaluation), config.evaluation.best
    if names and best is not None and best not in names:
        raise UserError(f"evaluation.best: no set has the metric {best!r}; write one of {', '.join(names)}")


def evaluates_on_data(config: Config, is_scalar: bool) -> bool:
    """Return True if a flow on responses of the data is evaluated on held-out responses instead of generated ones."""
    if config.evaluation.responses != "auto":
        return config.evaluation.responses == "given"
    usual = RewardConfig.model_fields["verify"].default
    sources = config.data.evaluation_sources.values()
    return not is_scalar and config.reward.verify == usual and all(source.verify is None for source in sources)


def stages_on_data(flow: Flow, learner: str) -> list[Stage]:
    """Return the stages that evaluate responses of the data: a scoring role's scores of pairs, the implicit rewards of
    a policy and its reference for pairs, or the log-probs of responses.
    """
    joined = make_stage("data.join_response", None, id="evaluation.join_response")
    if learner in flow.scalar_roles:
        return [joined, make_stage("score", learner, id="evaluation.score")]
    log_probs = make_stage("log_probs", learner, id="evaluation.log_probs")
    if not flow.trains_on_pairs:
        return [joined, log_probs, make_stage("shape.response_log_prob", None, id="evaluation.response_log_prob")]
    reference = make_stage("log_probs", "reference", id="evaluation.reference")
    return [joined, log_probs, reference, make_stage("shape.implicit_reward", None, id="evaluation.implicit_reward")]


def responses_in_data(flow: Flow) -> int | None:
    """Return the number of responses per prompt in the data that a flow trains on; None if it generates them."""
    if "response" not in flow.needs_from_data() or any(stage.kind is Kind.GENERATE for stage in flow.stages):
        return None
    return 2 if flow.trains_on_pairs else 1


def with_samples_of_data(config: Config) -> Config:
    """Return the configuration with `samples_per_prompt` set to the number of responses in the data, unless it sets the
    number.
    """
    rollout = config.rollout
    if "samples_per_prompt" in rollout.model_fields_set:
        return config
    sizes = {"max_response_tokens": rollout.max_response_tokens, "samples_per_prompt": rollout.samples_per_prompt}
    needed = responses_in_data(load_flow(config.flow, config.algorithm, sizes))
    if needed is None:
        return config
    return config.model_copy(update={"rollout": rollout.model_copy(update={"samples_per_prompt": needed})})


def check_stage(stage: Stage, config: Config) -> None:
    """Raise UserError for a parameter of a stage that contradicts the configuration."""
    trained = config.rollout.temperature
    temperature = stage.params.get("temperature", trained)
    if stage.type == "generate" and temperature != trained and "into" not in stage.params:
        instead = f"rollout.temperature={temperature:g}" if temperature else "greedy: true"
        raise UserError(
            f"{stage.name}: temperature={temperature:g} draws the tokens, and training computes their log-probs at "
            f"rollout.temperature={trained:g}; write {instead} in its place"
        )
    reads_old = is_optimized(stage) and needs_old(str(stage.role), stage.params)
    if reads_old and stage.params.get("old") == "self" and not has_single_update(config):
        raise UserError(f"{stage.name}: old=self needs one update per batch and no staleness; write old=recompute")


def has_single_update(config: Config) -> bool:
    """Return True if each batch trains the weights that generated it, in one optimizer step."""
    rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    one_step = config.trainer.rows_per_update in (None, rows) and config.trainer.epochs == 1
    return one_step and config.trainer.max_staleness == 0


def resolve(stage: Stage, config: Config) -> Stage:
    """Return the stage with its open parameters filled in from the configuration."""
    if stage.type == "verify":
        # The configuration's scores, otherwise the recipe's, otherwise 1 and 0.
        right, wrong = config.reward.correct_score, config.reward.wrong_score
        scores = {
            "correct_score": stage.params.get("correct_score", 1.0) if right is None else right,
            "wrong_score": stage.params.get("wrong_score", 0.0) if wrong is None else wrong,
        }
        return with_params(stage, scores)
    if is_optimized(stage):
        single, old = has_single_update(config), stage.params.get("old")
        if not needs_old(str(stage.role), stage.params):
            # After an update, this pass's log-probs differ from those of the weights that generated the batch.
            drifts = not single and old is None and "rollout_log_probs" in (*stage.reads, *stage.optional)
            return with_params(stage, {"old": "rollout"}) if drifts else stage
        filled: dict[str, Any] = {"old": old or ("self" if single else "recompute")}
        # A correction is needed if tokens come from other weights, or from other numerics than the trainer's.
        role_config = settings_of(str(stage.role), config)
        dtype = role_config.dtype_name
        same = config.rollout.engine == "embedded" and config.rollout.dtype in (None, dtype)
        # Adapters merged into bfloat16 weights are rounded.
        exact = not merges_adapters(role_config.lora, config) or dtype != "bfloat16"
        drawn_by_trained = same and exact and config.trainer.max_staleness == 0
        # With old=rollout the ratio already compares with the policy that drew the tokens.
        if "correction" not in stage.params and filled["old"] != "rollout" and not drawn_by_trained:
            filled["correction"] = TRUNCATED
        return with_params(stage, filled)
    if stage.type == "score" and settings_of(str(stage.role), config).model != config.model:
        # It may have another tokenizer, which tokenizes the texts again.
        return replace(stage, optional=(*stage.optional, "prompt_length", "metadata"))
    return stage
