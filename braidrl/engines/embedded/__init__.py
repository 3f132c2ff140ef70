"""The embedded engine: decodes many rows at once with the trainer's own module.

`embedded_engine` accepts requests; `batch` holds the rows in their slots, of which `states` has the facts and `slots` the
keys and values; `prompts` computes prompts once; `native_decoder` and `graphs` make a decode step fast on CPU and CUDA,
and `sharded_decoding` lets ranks share one model.
"""
