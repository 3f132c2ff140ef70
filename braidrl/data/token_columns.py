"""Values per token that an engine returns beside its tokens: a registry of columns.

request names columns ──▶ engine: function of (logits, drawn tokens) ──▶ Response.per_token ──▶ columns of the table

Engines, trajectories, packing, the queue and checkpoints carry what is registered here. A column of your own is one
function, and an engine computes it if a stage reads it:

    @token_column(dtype=torch.float32)
    def entropy(logits: Tensor, tokens: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

Shapes: B rows in a step of an engine, V vocabulary, P tokens of a request's prompt, T drawn tokens.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from braidrl.deferred import Tensor, torch
from braidrl.errors import UserError, suggest, users_errors
from braidrl.importing import import_function

Alignment = Literal["actions", "tokens"]
ColumnFunction = Callable[[Tensor, Tensor], Tensor]
LOG_PROBS = "rollout_log_probs"
VERSIONS = "rollout_versions"
ROUTED_EXPERTS = "routed_experts"
"""The experts of a mixture that each token was given, (layers with experts, experts of a token): uint8 up to 256
experts, else int16.
"""


@dataclass(frozen=True)
class TokenColumn:
    """A column with one value, of any shape, for each token.

    alignment "actions": an entry for each drawn token; a response has (T, ...).
    alignment "tokens": an entry for each token that the model has read: all of the prompt and the response but the
    last drawn one, (P + T - 1, ...). Entries of tokens that a later turn or a resumed row reads again stay as they
    were first. A row of several sequences has entries of 0 for the tokens of a sequence that no action follows, but
    none at its end.
    """

    name: str
    dtype_name: str | None = None
    """As in `int64`; None for the dtype in which the engine computes log-probs."""
    shape: tuple[int, ...] | None = ()
    """Shape of one entry; None where it depends on the model."""
    alignment: Alignment = "actions"
    function: ColumnFunction | None = None
    """Function of logits (B, V), divided by the row's temperature, and drawn tokens (B,); None where each engine
    records the values by its own means.
    """
    is_always_returned: bool = False
    """True for a column of every response, False for one that a stage must read."""

    @property
    def dtype(self) -> "torch.dtype | None":
        return None if self.dtype_name is None else getattr(torch, self.dtype_name)

    def empty(self, dtype: "torch.dtype | None" = None) -> Tensor:
        """Return the values of no tokens; `dtype` is that of the engine's log-probs, by default float32."""
        return torch.empty((0, *(self.shape or ())), dtype=self.dtype or dtype or torch.float32)

    def compute(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the values of B drawn tokens, (B, ...), from the distributions that drew them.

        Raises UserError for another shape.
        """
        assert self.function is not None and self.shape is not None
        with users_errors(self.name, self.function):
            values = self.function(logits, tokens)
        expected = (len(tokens), *self.shape)
        if not isinstance(values, Tensor) or values.shape != expected:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(f"the column {self.name} returned {got} for {len(tokens)} tokens; return {expected}")
        return values.to(self.dtype or logits.dtype)

    def entries(self, prompt: int, drawn: int) -> int:
        """Return the number of entries of a response of `drawn` tokens to a prompt of `prompt` tokens."""
        if self.alignment == "actions":
            return drawn
        return prompt + drawn - 1 if drawn else 0

    def extended(self, earlier: Tensor, later: Tensor) -> Tensor:
        """Join the values of a row's part with the values of its continuation."""
        if not len(earlier):
            return later
        return torch.cat([earlier, later[len(earlier) :] if self.alignment == "tokens" else later])


token_columns: dict[str, TokenColumn] = {
    column.name: column
    for column in (
        TokenColumn(LOG_PROBS, is_always_returned=True),
        TokenColumn(VERSIONS, "int64", is_always_returned=True),
        TokenColumn(ROUTED_EXPERTS, "uint8", None, "tokens"),
    )
}
"""The registered columns by name."""


def token_column(
    name: str | None = None, *, dtype: "torch.dtype | None" = None, shape: Sequence[int] = ()
) -> Callable[[ColumnFunction], ColumnFunction]:
    """Return a decorator that registers a function of logits (B, V) and drawn tokens (B,) as a column, by default under
    its own name.

    It must give each row the same values for any other rows. Raises ValueError if another function has the name.
    """

    def add(function: ColumnFunction) -> ColumnFunction:
        title = name or function.__name__
        registered = token_columns.get(title)
        if registered is not None and getattr(registered.function, "__module__", None) != function.__module__:
            raise ValueError(f"a column {title!r} is registered already; choose another name")
        dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")
        token_columns[title] = TokenColumn(title, dtype_name, tuple(shape), function=function)
        return function

    return add


def column_of(name: str) -> TokenColumn:
    """Return a registered column, or that of the function `module:function` or `file.py:function`.

    Raises UserError if there is none.
    """
    if ":" not in name:
        if name not in token_columns:
            raise UserError(f"no column per token is called {name!r}. {suggest(name, token_columns)}")
        return token_columns[name]
    function = import_function(name)
    for column in token_columns.values():
        if column.function is function:
            return column
    raise UserError(f"{name} is no column per token; put @token_column() above the function")


def returned_columns(names: Sequence[str] = ()) -> tuple[TokenColumn, ...]:
    """Return the columns of a response whose request names these."""
    always = (column for column in token_columns.values() if column.is_always_returned)
    return tuple(dict.fromkeys((*always, *map(column_of, names))))


def padded(values: Tensor, length: int) -> Tensor:
    """Return values (T, ...) as `length` entries; the last ones are 0."""
    return torch.cat([values, values.new_zeros((length - len(values), *values.shape[1:]))])


def of_all_tokens() -> tuple[str, ...]:
    """Return the names of the columns with an entry for each token of a row."""
    return tuple(column.name for column in token_columns.values() if column.alignment == "tokens")


def computed_columns(columns: Sequence[TokenColumn], logits: Tensor, tokens: Tensor) -> Mapping[str, Tensor]:
    """Return the values (B, ...) of the columns that are functions of logits and tokens."""
    return {column.name: column.compute(logits, tokens) for column in columns if column.function is not None}


def to_text(values: Tensor) -> str:
    """Return values (T, ...) as text for JSON: a file of NumPy's in base64, which has no bfloat16."""
    content = io.BytesIO()
    np.save(content, (values.float() if values.dtype is torch.bfloat16 else values).cpu().numpy(), allow_pickle=False)
    return base64.b64encode(content.getbuffer()).decode()


def from_text(text: str, column: TokenColumn) -> Tensor:
    """Invert `to_text` for a column. Raises ValueError for another text, or entries of another shape."""
    values = torch.from_numpy(np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False))
    if values.dim() < 1 or column.shape not in (None, tuple(values.shape[1:])):
        raise ValueError(f"{column.name} has entries of the shape {tuple(values.shape[1:])}, not {column.shape}")
    # The dtype of routes depends on the number of experts.
    return values if column.shape is None or column.dtype is None else values.to(column.dtype)
