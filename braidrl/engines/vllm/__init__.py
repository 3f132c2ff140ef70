"""vLLM as an engine: `engine` drives its steps, `logits_processor` draws tokens by the row's own random numbers, `worker` takes weights."""
