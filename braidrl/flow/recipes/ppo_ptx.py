"""PPO-ptx, InstructGPT, arXiv 2203.02155: PPO with a language-model loss on pre-training text."""

from pydantic import Field

from braidrl.flow import Flow
from braidrl.flow.recipes.ppo import PpoParameters, ppo_stages


class PpoPtxParameters(PpoParameters):
    """Parameters of PPO-ptx."""

    ptx_coef: float = Field(27.8, gt=0)
    """γ of the paper: weight of the text's mean −log π per token, added to the policy loss. The text is `data.ptx`."""


def ppo_ptx(p: PpoPtxParameters) -> Flow:
    """Return the flow: PPO, and in the same optimizer step a language-model loss on text that is joined to the rows."""
    return Flow("ppo_ptx", ppo_stages(p, ptx_coef=p.ptx_coef))
