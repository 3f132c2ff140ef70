"""How answers are checked: verifiers, the processes that they run in, and the columns that come of it.

Importing this package costs nothing: the processes that check answers load neither torch nor transformers.
"""
