"""monitor: watch the first call, and the first backward, of one compilation, and check what they computed.

A backward is checked for the last forward before it; in a program that runs several forwards before a backward, a
backward of another one is passed over. What is kept from a call is released with its check.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor

from jointtrace.checking.execution import execution_fault
from jointtrace.checking.interpret import copies, generator_states, has_effects, undisturbed
from jointtrace.checking.locate import Fault, Reference, first_fault
from jointtrace.checking.program import Program
from jointtrace.checking.reproducer import write_reproducer
from jointtrace.errors import CheckError
from jointtrace.ir.op import Op, Tag, Target, Var
from jointtrace.ir.text import print_op
from jointtrace.ir.trace import Trace
from jointtrace.runtime.record import Record


@dataclass
class Subject:
    """What is checked, filled in by a front end before the first call.

    Attributes:
        record: the compilation.
        programs: gives the program after each stage, once all of them are known.
        reference: what the first program must agree with.
        forward, backward: the linked halves that run; `backward` is None where there is none (yet).
        labels: what the user knows each input as.
    """

    record: Record
    programs: Callable[[], Sequence[Program]]
    reference: Reference | None = None
    forward: Trace | None = None
    backward: Trace | None = None
    labels: Sequence[str] = ()


@dataclass
class _Call:
    """One call of the forward."""

    inputs: list[Any]
    versions: list[int | None]
    restore: Callable[[], None]
    handed: dict[str, Any] = field(default_factory=dict)


class Monitor:
    """Checks one compilation; does nothing once that is done."""

    def __init__(self, subject: Subject) -> None:
        self.subject: Subject | None = subject
        self.forward_checked = False
        self.last: _Call | None = None
        self.running = threading.local()

    def before_forward(self, *inputs: Any) -> None:
        """Keep the inputs of a call: copies where the program writes."""
        if self.subject is None or any(isinstance(value, FakeTensor) for value in inputs):
            return
        traces = [t for program in self.subject.programs() for t in program.traces]
        # the caller may write to its buffers before the backward; to parameters it seldom does, and they are large
        everything = any(map(has_effects, traces))
        kept = copies([v if everything or not _is_parameter(v) else None for v in inputs])
        kept = [_detached(v) if copy is None else copy for v, copy in zip(inputs, kept, strict=True)]
        self.running.call = _Call(kept, [_version(value) for value in kept], generator_states(traces))

    def after_forward(self, *results: Any) -> None:
        """Check the results of a call: outputs, then what is handed to the backward."""
        subject, call = self.subject, self.running.__dict__.pop("call", None)
        if subject is None or call is None:
            return
        assert subject.forward is not None
        self.last = call
        count = len(subject.programs()[0].forward.outputs)
        pairs = zip(subject.forward.outputs[count:], results[count:], strict=True)
        call.handed = {leaf.name: _detached(value) for leaf, value in pairs if isinstance(leaf, Var)}
        has_backward = bool(subject.programs()[0].forward.grad_names)
        if not self.forward_checked:
            self.forward_checked = True
            self.check(subject, call, None, subject.forward, call.inputs, results, call.restore)
        if not has_backward:
            self.release()

    def before_backward(self, *args: Any) -> None:
        """Keep what a backward is given."""
        subject, call = self.subject, self.last
        if subject is None or call is None or subject.backward is None:
            return
        saved = [(name, arg) for name, arg in zip(subject.backward.inputs, args, strict=True) if name in call.handed]
        same = all(_same(arg, call.handed[name]) for name, arg in saved)
        if same and [_version(value) for value in call.inputs] == call.versions:
            given = copies(args) if has_effects(subject.backward) else [_detached(arg) for arg in args]
            self.running.given = (call, given, generator_states(()))

    def after_backward(self, *grads: Any) -> None:
        """Check the gradients."""
        subject, running = self.subject, self.running.__dict__.pop("given", None)
        if subject is None or running is None:
            return
        call, given, restore = running
        assert subject.backward is not None
        program = subject.programs()[-1]
        cotangents = dict(zip(program.cotangents, given[len(program.handed):], strict=True))
        self.check(subject, call, cotangents, subject.backward, given, grads, restore)
        self.release()

    def release(self) -> None:
        """Forget all that was kept for the check."""
        self.subject = self.last = None

    def check(
        self, subject: Subject, call: _Call, cotangents: dict[int, Any] | None, half: Trace, args: Sequence[Any],
        results: Sequence[Any], restore: Callable[[], None],
    ) -> None:
        """Compare stages with each other, then what the compiled `half` returned with what its ops compute."""
        found = subject.programs()
        traces = [t for program in found for t in program.traces]
        labels = [f"%{name}" for name in found[0].forward.inputs] if not subject.labels else list(subject.labels)
        with undisturbed(traces), subject.record.counters.paused():
            fault = first_fault(found, subject.reference, call.inputs, cotangents, labels)
            if fault is None:
                restore()
                name = _result_name(found[0], labels[-len(half.outputs):], backward=cotangents is not None)
                fault = execution_fault(half, args, results, name)
            if fault is not None:
                of_half = fault.before is None and fault.expected is None
                script = write_reproducer(fault, subject.record.folder, args if of_half else call.inputs, results)
                self.release()
                raise CheckError(_message(fault, script), stage=fault.stage, op=fault.op and print_op(fault.op),
                                 script=str(script))


def watched(half: Trace, before: Callable[..., None], after: Callable[..., None]) -> Trace:
    """Return a half that calls `before` with its inputs and `after` with its results."""
    ops = [_watcher("check_inputs", before, map(Var, half.inputs)), *half.ops]
    return half.rebuild([*ops, _watcher("check_results", after, half.outputs)], by=half.by)


def _watcher(name: str, fn: Callable[..., None], args: Iterable[Any]) -> Op:
    def call(*values: Any) -> tuple[()]:
        fn(*values)
        return ()

    return Op(Target(name, call), tuple(args), out=(), tags=frozenset({Tag.OPAQUE}), body=Trace((), (), ()))


def _message(fault: Fault, script: Any) -> str:
    lines = [f"{fault.what} differs from eager: {fault.how}", f"  first wrong after: {fault.stage}"]
    if fault.op is not None:
        where = fault.op.source
        place = f" at {where.path or where.file}:{where.line}" if where else ""
        lines.append(f"  first op that differs: {print_op(fault.op)}{place}")
    if fault.note:
        lines.append(f"  {fault.note}")
    return "\n".join([*lines, f"  reproduce with: python {script}"])


def _result_name(program: Program, labels: Sequence[str], *, backward: bool) -> Callable[[int], str]:
    def name(position: int) -> str:
        if backward:
            return f"gradient of input {labels[position]}"
        saved = position - program.num_outputs
        return f"output {position}" if saved < 0 else f"saved value {saved}"

    return name


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _same(given: Any, handed: Any) -> bool:
    if not isinstance(given, torch.Tensor) or not isinstance(handed, torch.Tensor):
        return given == handed
    if given.shape != handed.shape or given.dtype != handed.dtype:
        return False
    same = given.data_ptr() == handed.data_ptr()
    return same or torch.equal(given.nan_to_num(), handed.to(given.device).nan_to_num())
