"""The decoders that Braid trains. `body` finds a decoder's parts by structure, `mixers` runs what mixes tokens outside of the attention
interface, `head` computes its logits, `shrink` makes a tiny model of the same structure, and `proof` shows on it what may be trained.
"""
