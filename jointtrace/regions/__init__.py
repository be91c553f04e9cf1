"""Regions: groups of ops that an executor compiles as one."""
