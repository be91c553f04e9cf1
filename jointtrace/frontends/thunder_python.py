"""Python as thunder's interpreter should run it: what it does otherwise changes the branch a program takes, silently.

Each patch falls through to thunder's own where the compile option is absent. Holds for lightning-thunder 0.2.6.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import thunder
import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.dtypes import dtype as ThunderDtype
from thunder.core.dtypes import to_torch_dtype
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    default_lookaside,
    get_interpreterruntimectx,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.jit_ext import is_created_during_tracing
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.trace import get_tracectx

from jointtrace.compat.patching import Patch
from jointtrace.errors import UnsupportedError
from jointtrace.frontends.thunder_requires_grad import requires_grad
from jointtrace.joint.symbols import where

OPTION = "delay_trace_split"
THUNDER, TORCH = (os.path.dirname(module.__file__) + os.sep for module in (thunder, torch))
LIBRARIES = (THUNDER, TORCH, "<")  # "<...>": what a program made, such as a dataclass's methods


def _active() -> bool:
    data = get_compile_data()
    return data is not None and OPTION in data.compile_options


def _in_thunder() -> bool:
    """Whether the line that thunder's interpreter runs is one of thunder itself."""
    frame: Any = get_interpreterruntimectx().peek_frame_stack()
    return frame is not None and frame.code.co_filename.startswith(THUNDER)


def _getattr(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder gives a tensor's dtype as its own, which equals no torch dtype: `x.dtype == torch.float32` is False.

    It does the same with the class, and does not know of results whether they require a gradient. Its own code, such as
    its backend for einops, goes on to get what it expects.
    """

    @functools.wraps(original)
    def getattr_lookaside(obj: Any, name: Any, *default: Any) -> Any:
        value = original(obj, name, *default)
        if isinstance(unwrap(obj), TensorProxy) and _active() and not _in_thunder():
            found = unwrap(value)
            if unwrap(name) == "requires_grad":
                return wrap(requires_grad(unwrap(obj)), provenance=value.provenance)
            if unwrap(name) == "__class__":
                return _class_of(obj)
            if isinstance(found, ThunderDtype):
                return wrap(to_torch_dtype(found), provenance=value.provenance)
        return value

    return getattr_lookaside


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder says of a tensor that it is a proxy: `type(x) is torch.Tensor` is False."""

    @functools.wraps(original)
    def type_lookaside(obj: Any, *bases: Any) -> Any:
        of_tensor = not bases and isinstance(unwrap(obj), TensorProxy) and _active() and not _in_thunder()
        return _class_of(obj) if of_tensor else original(obj, *bases)

    return type_lookaside


def _class_of(tensor: WrappedValue) -> WrappedValue:
    known: Any = tensor.python_typ  # of results the proxy's
    return wrap_const(known if issubclass(known, torch.Tensor) else torch.Tensor)


def _object_setattr(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder records the first attribute written to an object, and loses the next."""

    @functools.wraps(original)
    def setattr_lookaside(obj: Any, name: Any, value: Any) -> Any:
        attributes = obj.attribute_wrappers.get("__dict__")
        if attributes is None or attributes.original_value is attributes.nothing or not _active():
            return original(obj, name, value)
        return _interpret_call(lambda d, n, v: d.__setitem__(n, v), attributes, name, value)

    return setattr_lookaside


def _dict_setitem(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder takes a module that the program makes for one that it was given, and writes its buffers back."""

    @functools.wraps(original)
    def setitem_lookaside(d: Any, key: Any, value: Any) -> Any:
        if _active() and _made_by_program(d.provenance):
            plain = default_lookaside(dict.__setitem__)
            assert plain is not None
            return plain(d, key, value)
        return original(d, key, value)

    return setitem_lookaside


def _made_by_program(provenance: ProvenanceRecord) -> bool:
    """Say whether something is, or is reached from, an object that the traced program made."""
    while provenance.inst in (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR):
        provenance = provenance.inputs[0]
    return is_created_during_tracing(provenance)


def _bool(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder takes a number that the program computes, as `x.sum().item() > 0`, for False."""

    @functools.wraps(original)
    def bool_lookaside(value: Any) -> Any:
        number = unwrap(value)
        if isinstance(number, NumberProxy) and _active() and _is_computed(number):
            trace: Any = get_tracectx()
            place = next(filter(None, map(where, reversed(trace.bound_symbols))), "no source known")
            raise UnsupportedError(f"conversion to bool is not allowed on dynamic proxy {number.name}: the program "
                                   f"branches on a number that it computes ({place}); use torch.where, or compile the "
                                   "parts before and after it")
        return original(value)

    return bool_lookaside


def _is_computed(number: NumberProxy) -> bool:
    """Say whether a number is unknown before the program runs, or is made of one that is."""
    trace: Any = get_tracectx()
    for bsym in reversed(trace.bound_symbols):
        if any(out.name == number.name for out in bsym.flat_proxy_outs):
            operands = (number, *bsym.flat_proxy_args)
            return any(isinstance(operand, NumberProxy) and operand.value is None for operand in operands)
    return number.value is None


def _source_location(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder names the innermost line, that of `torch.nn.Linear.forward`; who reads a trace looks for his own."""

    @functools.wraps(original)
    def source_location(context: Any) -> tuple[Any, Any]:
        if _active():
            for frame in reversed(context.frame_stack):
                if not frame.code.co_filename.startswith(LIBRARIES):
                    return frame.code.co_filename, frame.positions
        return original(context)

    return source_location


PATCHES = (
    Patch("thunder.core.interpreter.InterpreterRuntimeCtx", "get_current_user_source_location", _source_location),
    Patch("thunder.core.interpreter", "_default_lookaside_map", _type, item=lambda: type),
    Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _bool, item=lambda: bool),
    Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _dict_setitem, item=lambda: dict.__setitem__),
    Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _getattr, item=lambda: getattr),
    Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _object_setattr, item=lambda: object.__setattr__),
)
