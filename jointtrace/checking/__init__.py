"""Check mode: compare what a compiled function computed with what the user's program computes, and find the first fault."""
