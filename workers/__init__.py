"""How it is wired and started: settings, the client, workers, the embedded server."""
