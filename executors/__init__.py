"""Executors: who runs the ops of a trace. `base` says what one must offer, `registry` finds them by name."""
