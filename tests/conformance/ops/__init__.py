"""Conformance of single operators; importing jointtrace first lets thunder import."""
import jointtrace  # noqa: F401
