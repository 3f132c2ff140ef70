"""Registered functions as attributes: `advantage.gae(gamma=1.0)` makes a stage, `loss.clip(low=0.2)` a parameter of an update.

`families.pyi` beside this file has their signatures for editors and type checkers; `docs/write_families.py` writes it from the registries.
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
