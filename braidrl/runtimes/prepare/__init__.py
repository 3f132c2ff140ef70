"""What happens before the first step: `flow` makes every default of the flow explicit, `setup` loads tokenizer, data and verifiers,
`checks` and `data` refuse what could not run; `fetching` gets what a configuration names on a hub."""
