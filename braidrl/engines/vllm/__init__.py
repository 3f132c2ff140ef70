"""vLLM as an engine: `vllm_engine` runs its steps, `logits_processor` draws tokens by each row's random numbers, `vllm_worker` loads weights."""
