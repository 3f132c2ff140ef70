"""A verifier of the tests' own, in a file that imports nothing: the reward processes load it."""


def even_length(response: str) -> float:
    """1 for an answer of an even number of characters: an untrained model's answers differ in it."""
    return float(len(response) % 2 == 0)
