"""Weights on their way between layouts: `plan` decides which block goes where, in pure functions, `transfer` sends the blocks in rounds of
bounded size, `mirror` keeps a second model up to date: an inference copy, an engine's, or a role that follows another.
"""
