"""How rows get from stage to stage: leases, protocols, buffers and queues."""
