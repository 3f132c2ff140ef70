"""Registered functions as attributes: `advantage.gae(gamma=1.0)` makes a stage, `loss.clip(low=0.2)` a parameter of an
update.

`families.pyi` in this folder has their signatures for editors and type checkers; `docs/write_families.py` writes it
from the registries.
"""

from inspect import Parameter

from braidrl.algorithms import registry
from braidrl.flow.signatures import FAMILIES
from braidrl.flow.stages import RegisteredNames

advantage = RegisteredNames(FAMILIES["advantage"], "advantage")
shape = RegisteredNames(FAMILIES["shape"], "shape")
select = RegisteredNames(FAMILIES["select"], "select")
data = RegisteredNames(FAMILIES["data"], "data")
loss = RegisteredNames(registry.losses)
kl = RegisteredNames(registry.divergences, also=[Parameter("coef", Parameter.KEYWORD_ONLY, annotation=float)])
correction = RegisteredNames(registry.corrections)
