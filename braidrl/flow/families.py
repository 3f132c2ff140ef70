"""Stages without a role and values of an update, by the names of what is registered: `advantage.gae(gamma=1.0)`, `loss.clip(low=0.2)`.

`families.pyi` beside this file tells editors and type checkers their signatures; `docs/write_families.py` writes it from the registries.
"""

from inspect import Parameter

from braidrl.algorithms import registry
from braidrl.flow.stages import stage_family, value_family

advantage = stage_family("advantage")
shape = stage_family("shape")
select = stage_family("select")
data = stage_family("data")
loss = value_family(registry.losses)
kl = value_family(registry.divergences, [Parameter("coef", Parameter.KEYWORD_ONLY, annotation=float)])
correction = value_family(registry.corrections)
