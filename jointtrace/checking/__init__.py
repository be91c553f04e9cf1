"""Check mode: compare what a compiled function computed with eager PyTorch, and find the first fault."""
