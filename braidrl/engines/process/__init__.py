"""An engine in a process of its own: `process_engine` is the run's side of the socket, `process_server` the process."""
