"""Runtime: from a finished trace to Python functions, and their place in torch's autograd."""
