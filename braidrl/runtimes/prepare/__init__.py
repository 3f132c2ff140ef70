"""What happens before the first step: `flow` makes every default of the flow explicit, `setup` loads tokenizer, data and verifiers,
`checks` and `data` refuse what could not run; `dry_run` and `doctor` show what a run would take and what this machine has."""
