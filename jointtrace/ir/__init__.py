"""The joint trace: frozen data, its text form, its verifier and the facts derived from it."""
