"""APIs that an agent may call, each one value: plain JSON in and out of a turn of the row.

`dialect` has the form of such a value, `chat`, `completions`, `responses`, `messages` and `token_ids` have one API
each. The endpoint serves all of `DIALECTS`.
"""

from braidrl.agents.dialects.chat import CHAT
from braidrl.agents.dialects.completions import COMPLETIONS
from braidrl.agents.dialects.dialect import ChatDialect
from braidrl.agents.dialects.messages import MESSAGES
from braidrl.agents.dialects.responses import RESPONSES
from braidrl.agents.dialects.token_ids import TOKEN_IDS

__all__ = ["DIALECTS", "ChatDialect"]

DIALECTS: dict[str, ChatDialect] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "token_ids": TOKEN_IDS,
}
"""OpenAI's chat completions, completions and responses, Anthropic's messages, and vLLM's tokens in and out."""
