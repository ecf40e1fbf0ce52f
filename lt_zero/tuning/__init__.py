"""``lt-zero tune``: finds the fastest configuration of a training script that fits into the memory, by short runs.

space.py   what can be tried, and what each of it needs by the memory planner
trial.py   inside a run of the script: what it is, how long its steps take; ends it
search.py  which runs are made, and which result is the best
cli.py     the command: starts the runs, prints and writes what was found
"""
