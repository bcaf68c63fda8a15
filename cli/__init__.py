"""The ``redrive`` command: thin, one module per noun; all it does is call the client and print."""
