"""The embedded engine, which decodes many rows at once with the trainer's own module.

`embedded_engine` accepts requests. `batch` holds the rows in slots; `states` has each slot's state and `slots` its keys and values.
`shared_prefill` computes each prompt once. `native_decoder` and `graphs` make a decode step fast on CPU and CUDA, and `sharded_decoding`
shards one model over ranks.
"""
