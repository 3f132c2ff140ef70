"""Weights on their way between layouts: `plan` decides which block goes where, in pure functions, `transfer` sends the blocks in rounds of
bounded size, `mirror` keeps a copy in another layout, `following` updates a role from another one's weights.
"""
