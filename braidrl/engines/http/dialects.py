"""The APIs of generation servers (vLLM, SGLang): each is a value, with plain JSON in and out.

request ──▶ Dialect.generate ──JSON──▶ server ──JSON──▶ Dialect.read ──▶ token ids, log-probs
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.engines.requests import Request, row_draws

Json = Mapping[str, Any]
ServerCall = tuple[str, Json]
"""A path, and the JSON that is posted there."""


@dataclass(frozen=True)
class ReplyPart:
    """A response, or the rest of one, requested from a server."""

    name: str
    """A request id that is unique on the server."""
    request: Request
    """The request; its `max_tokens` fits into the model."""
    stop_token_ids: tuple[int, ...]
    """All tokens that end the response, the model's own included."""
    seed: int
    weights: str
    """Name of the server's weights; caches of other weights are not used."""


@dataclass(frozen=True)
class ServerAnswer:
    """Tokens drawn by a server; `problem` says what is missing if the answer cannot be used."""

    tokens: list[int]
    log_probs: list[float]
    problem: str = ""


@dataclass(frozen=True)
class Network:
    """The calls by which servers of one kind receive weights over the network."""

    workers: tuple[str, str]
    """The path that returns the number of workers, and the field of its answer."""
    receive: Callable[[Json, str], Sequence[ServerCall]]
    """Calls that make its workers receive the weights of a notice, and label them. The first is made while the weights are sent.
    """
    missing: Callable[[Json], str | None]
    """The option that a server with these settings must be started with, if any."""


@dataclass(frozen=True)
class Dialect:
    """The API of servers of one kind."""

    generate: Callable[[ReplyPart], ServerCall]
    read: Callable[[Json], ServerAnswer]
    abort: Callable[[str], ServerCall]
    """Ends a request, given its name; the server answers with the tokens drawn so far."""
    load_weights: Callable[[str, str], Sequence[ServerCall]]
    """Calls, in order, that load the weights in a folder and label them."""
    label: tuple[str, str]
    """The path that returns the label of the server's weights, and the field of its answer."""
    settings: str
    """The path that returns the options of a server's start."""
    missing: Callable[[Json, int], str | None]
    """The option that a server with these settings must be started with, if any, for rows of so many tokens."""
    start: str
    """The option with which a server returns its settings."""
    network: Network | None = None
    """Calls to receive weights over the network; None if the server can only read them from a folder."""


def vllm_generate(part: ReplyPart) -> ServerCall:
    """Make the call that asks vLLM for tokens; `DrawByRow` draws them in the server, so vLLM's own sampling settings are neutral."""
    return "/v1/completions", {
        "request_id": part.name, "prompt": part.request.prompt.tolist(), "cache_salt": part.weights,
        "max_tokens": part.request.sampling.max_tokens, "stop_token_ids": list(part.stop_token_ids), "ignore_eos": True,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": list(part.request.sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False,
        "logprobs": 0, "return_token_ids": True, "vllm_xargs": row_draws(part.request, part.seed).arguments(),
    }  # fmt: skip


def vllm_read(answer: Json) -> ServerAnswer:
    (choice,) = answer["choices"]
    tokens = choice.get("token_ids")
    if tokens is None:
        return ServerAnswer([], [], "gives no token ids; use vLLM 0.11 or later")
    return ServerAnswer(tokens, (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"])


def vllm_missing(info: Json, tokens: int) -> str | None:
    model, scheduler = info["vllm_config"]["model_config"], info["vllm_config"]["scheduler_config"]
    processors = [str(name) for name in model["logits_processors"] or ()]
    if not any("DrawByRow" in name for name in processors):
        return "--logits-processors braidrl.engines.vllm.logits_processor:DrawByRow"
    if model["logprobs_mode"] != "processed_logits":
        return "--logprobs-mode processed_logits"
    if scheduler["async_scheduling"]:
        return "--no-async-scheduling"
    return f"--max-model-len {tokens}" if model["max_model_len"] < tokens else None


RECEIVES = "braidrl.engines.vllm.vllm_worker.TakesWeights"


def vllm_cannot_receive(info: Json) -> str | None:
    extension = str(info["vllm_config"]["parallel_config"].get("worker_extension_cls", ""))
    return None if extension == RECEIVES else f"--worker-extension-cls {RECEIVES}"


VLLM = Dialect(
    generate=vllm_generate,
    read=vllm_read,
    # vLLM adds a prefix to the request's name, and the prompt's number as a suffix.
    abort=lambda name: ("/abort_requests", {"request_ids": [f"cmpl-{name}-0"]}),
    load_weights=lambda folder, label: (
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
        ("/update_weight_version", {"new_version": label}),
    ),
    label=("/weight_info", "weight_version"),
    settings="/server_info?config_format=json",
    missing=vllm_missing,
    start="VLLM_SERVER_DEV_MODE=1",
    network=Network(
        workers=("/get_world_size", "world_size"),
        receive=lambda notice, label: (
            ("/collective_rpc", {"method": "receive_weights", "kwargs": {"notice": notice}}),
            ("/update_weight_version", {"new_version": label}),
        ),
        missing=vllm_cannot_receive,
    ),
)


def sglang_generate(part: ReplyPart) -> ServerCall:
    """Make the call that asks SGLang for tokens; it draws by the row's seed and the token's position in the sequence."""
    sampling = part.request.sampling
    return "/generate", {
        "rid": part.name, "input_ids": part.request.prompt.tolist(), "return_logprob": True,
        "sampling_params": {
            "temperature": 0.0 if sampling.takes_likeliest else sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": 0.0,
            "max_new_tokens": sampling.max_tokens, "stop_token_ids": list(part.stop_token_ids), "ignore_eos": True,
            "stop": list(sampling.stop), "no_stop_trim": True, "skip_special_tokens": False,
            "sampling_seed": part.request.key(part.seed) & 0x7FFFFFFF,
        },
    }  # fmt: skip


def sglang_read(answer: Json) -> ServerAnswer:
    drawn = answer["meta_info"].get("output_token_logprobs")
    if drawn is None:
        return ServerAnswer([], [], "gives no log-probs of its tokens")
    return ServerAnswer([token for _, token, *_ in drawn], [log_prob for log_prob, *_ in drawn])


def sglang_missing(info: Json, tokens: int) -> str | None:
    if not info.get("enable_deterministic_inference"):
        return "--enable-deterministic-inference"
    room = info.get("context_length")
    return f"--context-length {tokens}" if room is not None and room < tokens else None


SGLANG = Dialect(
    generate=sglang_generate,
    read=sglang_read,
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
