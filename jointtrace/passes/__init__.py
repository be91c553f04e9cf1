"""Passes: one file, one public function of the same name, `Trace -> Trace`; `pipeline.PASSES` gives their order."""
