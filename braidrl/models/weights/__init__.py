"""Weights on their way between layouts: `weight_index` says which rank has which blocks, `plan` which block goes where, `rounds` cuts the
moves, in pure functions; `transfer` sends them. `mirror` keeps a second model up to date: an inference copy, an engine's, or a role that
follows another; in `phases` the weights of training and generation take turns.
"""
