"""Support for decoders of transformers. `body` finds a decoder's parts by structure and runs it, `head` computes
logits, `shrink` makes a tiny model of the same structure, `proof` verifies training and decoding on it, and keeps the
results.
"""
