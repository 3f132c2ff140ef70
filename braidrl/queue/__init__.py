"""The transfer queue: which rows are ready for whom, and where their columns lie. It knows no flows, batches or optimizer steps.

client ──take, done──▶ transport ──▶ tasks: what is ready, leases; samplers choose; table: index columns, location of payload
   └──────── payload as views ─────▶ storage: shared memory of the node, or frames from another node; owner: frees it in the end
"""
