"""Plans: the memory and traffic that a run needs, whether machines have it, and settings that fit or are fastest.

storage of a rank   setup.py (facts of a run), forecast.py (bytes by phase), estimate.py (of a model that is not built)
before allocating   check.py, limits.py (what a machine has)
activations         activations.py (of any module), long_sequences.py (of a transformer by its dimensions; remedies)
models and meshes   sizes.py, transformer.py, meshes.py, pipelines.py, tensor_sizes.py
between nodes       traffic.py, comm_options.py
``lt-zero tune``    search_space.py, search.py, trial.py (inside a run of the script), tune_cli.py
``lt-zero estimate`` is estimate_cli.py.

The check before allocating belongs to every run, with setup.py, forecast.py and limits.py. All else is a tool: a run
asks it for advice if its check has failed, and for a trial if ``lt-zero tune`` has started it.
"""
