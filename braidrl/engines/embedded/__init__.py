"""The embedded engine, which decodes many rows at once with the trainer's own module.

`embedded_engine` accepts requests, computes each prompt once and holds the rows in slots. `native_decoder` and `graphs`
make a decode step fast on CPU and CUDA. `sharded_decoding` shards one model over ranks.
"""
