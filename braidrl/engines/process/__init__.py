"""An engine in a process of its own: `client` is the run's side of the socket, `server` the process, `spec` what it is told to make."""
