"""Rollout engines: they turn prompts into responses.

Request ──▶ routing ──▶ an engine: embedded, vllm, http, each but the last also behind `engine_process` ──▶ Response

`engine` is the protocol of every engine, and `engine_contract` the checks that each must pass. `requests` holds its
values, `stepping` is the base of engines that draw token by token, `sampling` draws tokens from logits, and `factory`
makes a role's engines from the configuration. `engine_process` has the two sides of an engine in a separate process.
"""
