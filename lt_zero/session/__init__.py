"""One run, whichever face drives it: set-up, steps, saving and loading."""
