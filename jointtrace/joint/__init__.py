"""The joint trace of the thunder front end.

thunder comes first: its import attaches the front end, which needs the modules of this package whole.
"""
import thunder  # noqa: F401
