"""vLLM as an engine: `vllm_engine` runs its steps, `logits_processor` draws tokens, `vllm_worker` loads weights."""
