"""What thunder cannot trace is refused with the line of the program, not with an error from the depth of thunder.

An error that the program raises itself, as it would in eager PyTorch, stays what it is.
Holds for lightning-thunder 0.2.6: it shows the program's lines in tracebacks as frames of their own, or, where its
interpreter gives up, as `frame` among the variables of its own frames.
"""
from __future__ import annotations

import functools
import inspect
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from thunder.core.interpreter import InterpreterError, InterpreterFrame, unwrap
from torch._C import _autograd as autograd
from torch._C import _functorch as functorch

from jointtrace.errors import JointtraceError, UnsupportedError
from jointtrace.frontends.thunder_python import THUNDER, TORCH

OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
PYTHON = sysconfig.get_path("stdlib") + os.sep
KEPT = (ValueError, IndexError, TypeError, InterpreterError)  # of wrong arguments, as in eager; thunder's own
Place = tuple[str, int]

_ours: ContextVar[str | None] = ContextVar("jointtrace compiles", default=None)  # the program's first line


@contextmanager
def compiling(program: Any) -> Iterator[None]:
    """Let what thunder.jit makes of a function or module within the block refuse what it cannot trace."""
    function = type(program).forward if isinstance(program, torch.nn.Module) else program
    code = getattr(inspect.unwrap(function), "__code__", None)
    token = _ours.set(f"{code.co_filename}:{code.co_firstlineno}" if code else type(program).__name__)
    try:
        yield
    finally:
        _ours.reset(token)


def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap thunder's decorator of the function that compiles a program or finds it in the cache."""

    @functools.wraps(original)
    def decorate(compile_or_find: Callable[..., Any]) -> Callable[..., Any]:
        program = _ours.get()
        return original(compile_or_find if program is None else _refusing(compile_or_find, program))

    return decorate


def _refusing(compile_or_find: Callable[..., Any], program: str) -> Callable[..., Any]:
    @functools.wraps(compile_or_find)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = _torch_state()
        try:
            return compile_or_find(*args, **kwargs)
        except Exception as error:
            _leave(error, state)
            refusal = None if isinstance(error, JointtraceError) else refusal_of(error, program)
            if refusal is None:
                raise
            try:
                raise refusal.with_traceback(error.__traceback__) from error
            finally:
                del refusal  # whose traceback leads to this frame

    return call


def _torch_state() -> tuple[int, str | None, bool]:
    """Return what torch.func and torch.no_grad change: depth of transforms, saved tensor hooks, gradient mode."""
    hooks = autograd._saved_tensors_hooks_get_disabled_error_message()
    return functorch.get_dynamic_layer_stack_depth(), hooks, torch.is_grad_enabled()


def _leave(error: BaseException, state: tuple[int, str | None, bool]) -> None:
    """Leave the `with` blocks amid which thunder gave up, innermost first: its interpreter does not.

    The method that leaves a block lies on the stack of the interpreted frame. Autocast is thunder's own: never entered.
    """
    cause = _cause(error)
    frames = {id(frame): frame for frame in _interpreted(cause.__traceback__)}
    for frame in reversed(frames.values()):
        for leave in map(unwrap, reversed(frame.interpreter_stack._stack)):
            manager = getattr(leave, "__self__", None)
            if getattr(leave, "__name__", "") == "__exit__" and not isinstance(manager, torch.autocast):
                with suppress(Exception):  # one written as a generator can only be left by thunder's interpreter
                    leave(type(cause), cause, cause.__traceback__)
    depth, hooks, differentiates = state
    functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
    torch.set_grad_enabled(differentiates)
    if hooks is None:
        autograd._saved_tensors_hooks_enable()
    else:
        autograd._saved_tensors_hooks_disable(hooks)


def _cause(error: BaseException) -> BaseException:
    """Return what thunder's interpreter stopped at."""
    return error.__cause__ if isinstance(error, InterpreterError) and error.__cause__ else error


def _interpreted(traceback: TracebackType | None) -> Iterator[InterpreterFrame]:
    """Yield the frames of the interpreted program that a traceback leads through, outermost first."""
    while traceback is not None:
        if (frame := _frame_in(traceback)) is not None:
            yield frame
        traceback = traceback.tb_next


def _frame_in(traceback: TracebackType) -> InterpreterFrame | None:
    """Return the interpreted frame that a frame of thunder's interpreter runs."""
    code = traceback.tb_frame.f_code
    if "frame" not in code.co_varnames or not code.co_flags & inspect.CO_OPTIMIZED:
        return None
    names = traceback.tb_frame.f_locals
    frame = names.get("frame")
    if isinstance(names, dict):  # before Python 3.13 a copy, in which the frame would keep the program's tensors alive
        names.clear()
    return frame if isinstance(frame, InterpreterFrame) else None


def refusal_of(error: Exception, program: str) -> UnsupportedError | None:
    """Return what to raise in place of an error; None where the program itself raised it."""
    cause = _cause(error)
    if isinstance(cause, Warning):  # that the user wants as an error
        return None
    places = [*_places(cause.__traceback__)]
    last = max((i for i, place in enumerate(places) if not place[0].startswith((THUNDER, OWN, TORCH))), default=-2)
    below = places[last + 1:]  # what the program's last line called; -1 with the default: the innermost frame alone
    if places and not any(p[0].startswith((THUNDER, OWN)) for p in below) and not _speaks_of_proxies(cause):
        return None
    outside = [place for place in places if not place[0].startswith((THUNDER, OWN))]
    own = [place for place in outside if not place[0].startswith(TORCH) and not _of_python(place[0])]
    found = (own or outside)[-1:]
    where = f"{found[0][0]}:{found[0][1]}" if found else program
    told = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}".rstrip(": .")
    kind = _kind(tuple(kept for kept in KEPT if isinstance(error, kept) or isinstance(cause, kept)))
    return kind(f"lightning-thunder cannot trace this program ({where}): {told}; write it in another way, "
                'or use torch.compile(backend="jointtrace")')


def _of_python(file: str) -> bool:
    return file.startswith(PYTHON) and "site-packages" not in file


@functools.cache
def _kind(kept: tuple[type[Exception], ...]) -> type[UnsupportedError]:
    """Return the class of a refusal that `except` for any of some errors catches too."""
    return type("UnsupportedError", (UnsupportedError, *kept), {"__module__": UnsupportedError.__module__})


def _speaks_of_proxies(error: BaseException) -> bool:
    """Whether an error that the program seems to raise comes of thunder's stand-ins for its values."""
    bare = isinstance(error, AttributeError) and str(error).isidentifier()  # Python's own says more than the name
    return bare or "thunder." in str(error) or "{'type(" in str(error)  # which it forgets to fill in


def _places(traceback: TracebackType | None) -> Iterator[Place]:
    """Yield file and line of each frame, those of the interpreted program among them."""
    while traceback is not None:
        code, frame = traceback.tb_frame.f_code, _frame_in(traceback)
        if frame is not None and frame.positions is not None and frame.positions.lineno:
            yield frame.code.co_filename, frame.positions.lineno
        yield code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
