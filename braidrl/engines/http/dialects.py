"""The APIs of generation servers (vLLM, SGLang): each is a value, with plain JSON in and out.

request ──▶ Dialect.generate ──JSON──▶ server ──JSON──▶ Dialect.read ──▶ token ids
            Dialect.generate_seeing, for a prompt with images      └──▶ Dialect.column ──▶ values per token
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from braidrl.data.token_columns import LOG_PROBS, ROUTED_EXPERTS, TokenColumn, from_text
from braidrl.deferred import Tensor
from braidrl.engines.requests import EngineRow, SamplingParams, draw_arguments
from braidrl.errors import UserError

Json = Mapping[str, Any]
ServerCall = tuple[str, Json]
"""A path, and the JSON that is posted there."""
ColumnCall = Callable[[str, Sequence[str]], ServerCall]
"""Asks for a row's columns, by its name, and has those of other rows forgotten, whose answers did not arrive."""


class ColumnReader(NamedTuple):
    """The way in which servers of one kind return a column per token."""

    read: Callable[[Json, str], "Sequence[float] | Tensor | None"]
    """Returns the values of a row, by its name, from an answer; None for a row without values."""
    call: ColumnCall | None = None
    """The call whose answer is read, made when the row has ended; None for the answer with the row's tokens."""


@dataclass(frozen=True)
class ServerNeeds:
    """The requirements of a run on a server that was started before it."""

    tokens: int
    """Length of the longest row in tokens, including the prompt."""
    reproducible: bool = True
    """True if a row's random numbers must draw its tokens."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """The sampling settings of the tokens to train on."""
    tensor: int = 1
    """Tensor-parallel ranks; 1 leaves them to the server, as for `pipeline`."""
    pipeline: int = 1
    receives: bool = False
    """Weights are sent over the network, not stored in a folder."""
    columns: tuple[str, ...] = ()
    """The columns per token that rows have beside those of every response, by names as in `column_of`."""


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt with images for a server that expands placeholders by itself."""

    ids: Sequence[int]
    """The prompt's ids, with one placeholder for each image."""
    images: Sequence[tuple[str, str]]
    """Name and `data:` URI of each image, in order."""


@dataclass(frozen=True)
class Dialect:
    """The API of servers of one kind."""

    generate: Callable[[EngineRow, int, str, bool], ServerCall]
    """Makes the request for a row.

    Its arguments are the row, the run's seed, the label of the server's weights, to which caching is restricted, and
    whether the row's random numbers draw its tokens; otherwise the server samples.
    """
    read: Callable[[Json], Sequence[int]]
    """Returns the ids of the tokens that a server drew. Raises UserError for an answer without them."""
    column: Callable[[TokenColumn], ColumnReader | None]
    """Returns how servers return a registered column; None for a column that they do not return."""
    abort: Callable[[str], ServerCall]
    """Ends a request by name; the server answers with the tokens drawn so far."""
    load_weights: Callable[[str, str], Sequence[ServerCall]]
    """Calls, in order, that load the weights in a folder and label them."""
    label: tuple[str, str]
    """The path that returns the label of the server's weights, and the field of its answer."""
    settings: str
    """The path that returns the options of a server's start."""
    missing: Callable[[Json, ServerNeeds], str | None]
    """The option with which a server with these settings must be restarted, if any."""
    start: str
    """The option that makes a server return its settings."""
    workers: tuple[str, str] = ("", "")
    """The path that returns the number of workers, and the field of its answer."""
    receive: Callable[[Json, str], Sequence[ServerCall]] | None = None
    """Calls that make the workers receive the weights of a notice over the network, and label them.

    The first is made while the weights are sent. None if the server can only read weights from a folder.
    """
    generate_seeing: Callable[[EngineRow, int, str, bool, SeenPrompt], ServerCall] | None = None
    """Asks for a row whose prompt has images, as `generate`. The answer's `prompt_token_ids` are the expanded prompt.
    None if servers of this kind do not return it.
    """
    seeing_start: str = ""
    """The option with which a server takes the call of `generate_seeing`."""
    prepare: Callable[[Sequence[str]], ServerCall] | None = None
    """The call before the first row that makes workers compute these columns, by names as in `column_of`. Its answer
    has as `results` what each of them could not do, or null.
    """


RECEIVES = "braidrl.engines.vllm.vllm_worker.TakesWeights"
"""The extension of vLLM's workers that receives weights over the network."""


def vllm_generate(row: EngineRow, seed: int, weights: str, reproducible: bool) -> ServerCall:
    """Request tokens from vLLM.

    If `DrawByRow` draws them in the server, vLLM's sampling settings are neutral.
    """
    return "/v1/completions", {
        "request_id": row.name,
        "prompt": row.request.prompt.tolist(),
        "cache_salt": weights,
        "return_token_ids": True,
        **vllm_sampling(row, seed, reproducible, "vllm_xargs"),
    }


def vllm_generate_seeing(row: EngineRow, seed: int, weights: str, reproducible: bool, prompt: SeenPrompt) -> ServerCall:
    """Ask vLLM for tokens after images, which its own processor expands."""
    # Images that were encoded with other weights have other names.
    parts = [{"type": "image_url", "url": uri, "uuid": f"{weights}-{name}"} for name, uri in prompt.images]
    return "/inference/v1/generate", {
        "request_id": row.name,
        "token_ids": list(prompt.ids),
        "content_parts": parts,
        "cache_salt": weights,
        "return_token_ids": True,
        "sampling_params": vllm_sampling(row, seed, reproducible, "extra_args"),
    }


def vllm_sampling(row: EngineRow, seed: int, reproducible: bool, arguments: str) -> dict[str, Any]:
    """Return vLLM's sampling settings for a row. They are neutral where `DrawByRow` draws in the server, by the field
    `arguments`.
    """
    sampling = row.request.sampling
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    if reproducible:
        drawn[arguments] = draw_arguments(row, seed)
    elif sampling.takes_likeliest:
        drawn["temperature"] = 0.0
    else:
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return {
        "max_tokens": row.limit,
        "stop_token_ids": list(row.stop_token_ids),
        "ignore_eos": True,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        **drawn,
    }


def vllm_read(answer: Json) -> Sequence[int]:
    (choice,) = answer["choices"]
    tokens: Sequence[int] | None = choice.get("token_ids")
    if tokens is None:
        raise UserError("gives no token ids; use vLLM 0.11 or later")
    return tokens


def vllm_log_probs(answer: Json, row: str) -> Sequence[float]:
    (choice,) = answer["choices"]
    given = choice["logprobs"] or {"token_logprobs": []}
    if "content" in given:  # of the API for prompts with images
        return [each["logprob"] for each in given["content"] or ()]
    log_probs: Sequence[float] = given["token_logprobs"]
    return log_probs


def vllm_values(column: TokenColumn, answer: Json, row: str) -> Tensor | None:
    """Return the values that one of the workers has computed."""
    texts = (columns.get(row, {}).get(column.name) for columns in answer["results"])
    return next((from_text(text, column) for text in texts if text is not None), None)


def vllm_column(column: TokenColumn) -> ColumnReader | None:
    """Return the log-probs of vLLM's answer, and from Braid's extension of its workers the columns that are computed
    where Braid draws, and routes. Of vLLM's own routes, by runner V2 on CUDA, Braid reads none.
    """
    if column.name == LOG_PROBS:
        return ColumnReader(vllm_log_probs)
    if column.function is None and column.name != ROUTED_EXPERTS:
        return None
    return ColumnReader(partial(vllm_values, column), vllm_take)


def vllm_take(row: str, unread: Sequence[str]) -> ServerCall:
    return "/collective_rpc", {"method": "take_texts", "kwargs": {"row": row, "unread": list(unread)}}


def vllm_log_prob_modes(sampling: SamplingParams) -> tuple[str, ...]:
    """Return vLLM's modes whose log-probs are log-softmax(logits / temperature) over all tokens when vLLM draws."""
    if sampling.top_p < 1 or sampling.top_k:
        # One mode renormalizes over the kept tokens, the other omits the temperature.
        return ("raw_logprobs",) if sampling.log_prob_temperature == 1 else ()
    return ("processed_logprobs", *(("raw_logprobs",) if sampling.log_prob_temperature == 1 else ()))


def vllm_missing(info: Json, needs: ServerNeeds) -> str | None:
    model, scheduler = info["vllm_config"]["model_config"], info["vllm_config"]["scheduler_config"]
    parallel = info["vllm_config"].get("parallel_config", {})
    draws_by_row = any("DrawByRow" in str(name) for name in model["logits_processors"] or ())
    if needs.reproducible and not draws_by_row:
        return "--logits-processors braidrl.engines.vllm.logits_processor:DrawByRow"
    if draws_by_row and not needs.reproducible:
        return "no --logits-processors, or write rollout.reproducible=true"
    modes = ("processed_logits",) if needs.reproducible else vllm_log_prob_modes(needs.sampling)
    if model["logprobs_mode"] not in modes:
        return f"--logprobs-mode {modes[0]}"
    if needs.reproducible and scheduler["async_scheduling"]:
        return "--no-async-scheduling"
    for axis, ranks in (("tensor", needs.tensor), ("pipeline", needs.pipeline)):
        if ranks > 1 and parallel[f"{axis}_parallel_size"] != ranks:
            return f"--{axis}-parallel-size {ranks}"
    if model["max_model_len"] < needs.tokens:
        return f"--max-model-len {needs.tokens}"
    if (needs.receives or needs.columns) and parallel.get("worker_extension_cls") != RECEIVES:
        return f"--worker-extension-cls {RECEIVES}"
    return "--enforce-eager" if ROUTED_EXPERTS in needs.columns and not model.get("enforce_eager") else None


VLLM = Dialect(
    generate=vllm_generate,
    generate_seeing=vllm_generate_seeing,
    seeing_start="--enable-scale-out, of vLLM 0.32 or later",
    read=vllm_read,
    column=vllm_column,
    prepare=lambda names: ("/collective_rpc", {"method": "prepare_columns", "kwargs": {"names": list(names)}}),
    # vLLM adds a prefix to the request's name, and the prompt's number as a suffix.
    abort=lambda name: ("/abort_requests", {"request_ids": [f"cmpl-{name}-0", f"generate-tokens-{name}"]}),
    load_weights=lambda folder, label: (
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
        ("/update_weight_version", {"new_version": label}),
    ),
    label=("/weight_info", "weight_version"),
    settings="/server_info?config_format=json",
    missing=vllm_missing,
    start="VLLM_SERVER_DEV_MODE=1",
    workers=("/get_world_size", "world_size"),
    receive=lambda notice, label: (
        ("/collective_rpc", {"method": "receive_weights", "kwargs": {"notice": notice}}),
        ("/update_weight_version", {"new_version": label}),
    ),
)


def sglang_generate(row: EngineRow, seed: int, weights: str, reproducible: bool) -> ServerCall:
    """Request tokens from SGLang.

    If the server supports it, draws depend on the row's seed and the token's position.
    """
    sampling = row.request.sampling
    return "/generate", {
        "rid": row.name,
        "input_ids": row.request.prompt.tolist(),
        "return_logprob": True,
        "sampling_params": {
            "temperature": 0.0 if sampling.takes_likeliest else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "max_new_tokens": row.limit,
            "stop_token_ids": list(row.stop_token_ids),
            "ignore_eos": True,
            "stop": list(sampling.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": row.request.key(seed) & 0x7FFFFFFF,
        },
    }


def sglang_drawn(answer: Json) -> Sequence[Sequence[Any]]:
    """Return for each drawn token its log-prob and its id."""
    drawn: Sequence[Sequence[Any]] | None = answer["meta_info"].get("output_token_logprobs")
    if drawn is None:
        raise UserError("gives no log-probs of its tokens")
    return drawn


def sglang_read(answer: Json) -> Sequence[int]:
    return [token for _, token, *_ in sglang_drawn(answer)]


def sglang_column(column: TokenColumn) -> ColumnReader | None:
    if column.name != LOG_PROBS:
        return None
    return ColumnReader(lambda answer, row: [log_prob for log_prob, *_ in sglang_drawn(answer)])


def sglang_missing(info: Json, needs: ServerNeeds) -> str | None:
    if needs.reproducible and not info.get("enable_deterministic_inference"):
        return "--enable-deterministic-inference"
    for key, option, ranks in (("tp_size", "--tp-size", needs.tensor), ("pp_size", "--pp-size", needs.pipeline)):
        if ranks > 1 and info.get(key) != ranks:
            return f"{option} {ranks}"
    room = info.get("context_length")
    return f"--context-length {needs.tokens}" if room is not None and room < needs.tokens else None


SGLANG = Dialect(
    generate=sglang_generate,
    read=sglang_read,
    column=sglang_column,
    abort=lambda name: ("/abort_request", {"rid": name}),
    load_weights=lambda folder, label: (
        ("/update_weights_from_disk", {"model_path": folder, "flush_cache": True, "weight_version": label}),
    ),
    label=("/get_model_info", "weight_version"),
    settings="/get_server_info",
    missing=sglang_missing,
    start="python -m sglang.launch_server",
)

DIALECTS = {"vllm": VLLM, "sglang": SGLANG}
