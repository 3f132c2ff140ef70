"""The transfer queue: rows ready for each task, and locations of their columns. It knows no flows, batches or optimizer steps.

client ──take, done──▶ transport ──▶ tasks: ready rows, leases; samplers choose; table: index columns, location of payload
   └──────── payload as views ─────▶ storage: shared memory of the node, or frames from another node; owner: frees it at the end
"""
