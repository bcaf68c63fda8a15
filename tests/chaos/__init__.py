"""Chaos: random runs of random tools with random faults, while every process they need is killed, frozen and cut off.

    python -m tests.chaos --seed 7 --operations 300 --kills 12

Everything random follows from the seed: the graphs, the decisions, the faults of the processes, and, for each call of
each operation, the fault of the tool. What the machine does with its time does not follow from it, so that a seed gives
the same chaos rather than the same history.

`graphs.py` makes the runs and their catalog, `tool.py` is the server of the tools, `proxy.py` stands before each
server, `schedule.py` says what is done to the processes and `faults.py` does it to those of `cluster.py`. `driver.py`
starts the runs and tampers with some, `operator.py` decides dead letters. In the end `collect.py` asks what became of
everything, and `checker.py`, which knows nothing of the product, compares that with what the tools have done.
"""
