"""The embedded engine: decodes many rows at once with the trainer's own module.

`engine` accepts requests and `stepping` runs it; `batch` holds the rows in their slots, of which `states` has the facts and `slots` the
keys and values; `prompts` computes prompts once; `native` and `graphs` make a decode step fast on CPU and CUDA.
"""
