"""The kinds of error that jointtrace raises on its own account."""


class JointtraceError(Exception):
    """Base of all errors raised by jointtrace."""


class UnsupportedError(JointtraceError, NotImplementedError):
    """The user's program holds something we cannot compile: says which operation, where (file:line), what to do."""


class OptionError(JointtraceError, ValueError):
    """A bad argument: says the value given and the values accepted."""


class VerifyError(JointtraceError, AssertionError):
    """A fault of jointtrace itself: a trace that breaks an invariant, with the op, its position and the pass."""


class ParseError(JointtraceError, ValueError):
    """Text that is not a trace: says the line, the column and what was expected there."""


class CheckError(JointtraceError, AssertionError):
    """A compiled function computed something else than eager PyTorch does (check mode).

    Attributes:
        stage: the pass after which it differs.
        op: the first op that differs, as text.
        script: the file that shows the difference when run.
    """

    def __init__(self, message: str, stage: str, op: str | None, script: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.op = op
        self.script = script
