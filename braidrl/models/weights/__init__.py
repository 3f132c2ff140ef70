"""Weights on their way between layouts: `plan` is pure and says which block goes where, `transfer` sends them in rounds of bounded
bytes, `mirror` keeps a copy in another layout, `following` lets one role follow another."""
