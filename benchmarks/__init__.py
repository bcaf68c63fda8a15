"""What Redrive costs: measured beside the same work done with bare Temporal, and with other engines.

``make bench`` runs everything; ``python -m benchmarks --help`` says how to run a part of it.
"""
