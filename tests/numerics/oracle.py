"""Compare a compiled function with eager PyTorch, both run on copies of the same arguments.

Compared are outputs, what requires a gradient, gradients (None where eager has None), what the arguments,
parameters and buffers hold afterwards, and which outputs are, or share memory with, arguments and other outputs.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

Loss = Callable[[Any], torch.Tensor]


def jit(fn: Callable[..., Any], *executors: str, **options: Any) -> Any:
    """Compile `fn` through the thunder front end; eagerly run regions unless other executors are named."""
    return thunder.jit(fn, delay_trace_split=True, jointtrace={"executors": executors or ("eager",)}, **options)


def compile_below_aot(fn: Callable[..., Any], *executors: str, disable: Sequence[str] = (), **options: Any) -> Any:
    """Compile `fn` through the torch.compile front end; eagerly run regions unless other executors are named."""
    given = {"executors": executors or ("eager",), "disable": tuple(disable)}
    return torch.compile(fn, backend="jointtrace", options=given, **options)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a new argument that requires a gradient."""
    return torch.randn(shape, dtype=dtype).requires_grad_()


def weighted_sum(outputs: Any) -> torch.Tensor:
    """Return a scalar whose gradient differs for every element of every output that requires one."""
    total = torch.zeros((), dtype=torch.float64)
    for i, out in enumerate(tensors(outputs), start=1):
        if out.requires_grad:
            weights = torch.arange(1.0, out.numel() + 1).cos().reshape(out.shape)
            total = total + i * (out * weights).sum()
    return total


def plain_sum(outputs: Any) -> torch.Tensor:
    """Return the sum of the first output: its cotangent has stride 0."""
    return next(tensors(outputs)).sum()


def assert_like_eager(
    fn: Callable[..., Any], *args: Any, loss: Loss = weighted_sum, calls: int = 1, compiled: Any = None,
    compile_fn: Callable[[Callable[..., Any]], Any] = jit, rtol: float = 1e-4, atol: float = 1e-5, **kwargs: Any,
) -> Any:
    """Run `fn` compiled and in eager PyTorch, and assert that they agree; return the compiled function.

    Args:
        fn: a function or a module.
        args, kwargs: its arguments.
        loss: what is differentiated; nothing is where no output requires a gradient.
        calls: how often the function is called before the comparison, each time with new gradients.
        compiled: `fn` already compiled; else `compile_fn` is called.
        compile_fn: how to compile `fn`.
        rtol, atol: how close floating-point results must be.
    """
    def story(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs: Any = None
        for _ in range(calls):
            forget_gradients(fn, *args, *kwargs.values())
            outputs = fn(*args, **kwargs)
            if any(out.requires_grad for out in tensors(outputs)):
                loss(outputs).backward()
        return outputs

    return assert_same_story(
        story, fn, *args, compiled=compiled, compile_fn=compile_fn, rtol=rtol, atol=atol, **kwargs)


def assert_same_story(
    story: Callable[..., Any], fn: Callable[..., Any], *args: Any, compiled: Any = None,
    compile_fn: Callable[[Callable[..., Any]], Any] = jit, rtol: float = 1e-4, atol: float = 1e-5, **kwargs: Any,
) -> Any:
    """Run `story(fn, *args, **kwargs)` with `fn` compiled and in eager PyTorch, and assert that they agree.

    The story calls the function it is given, and runs backwards, as it likes; compared are what it returns and what
    arguments, parameters and buffers hold in the end, gradients included. Returns the compiled function.
    """
    if isinstance(fn, torch.nn.Module):
        assert compiled is None, "a compiled module shares its parameters with the eager one"
    twin = copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn
    theirs, ours = _copied((args, kwargs)), _copied((args, kwargs))
    compiled = compile_fn(fn) if compiled is None else compiled
    expected = _run(story, twin, *theirs)
    found = _run(story, compiled, *ours)
    assert len(found.rows) == len(expected.rows), "another number of outputs"
    for (name, _, *mine), (_, _, *eager) in zip(found.rows, expected.rows, strict=True):
        assert mine == eager, f"{name}: {mine}, in eager {eager}"
    for (name, mine, *_), (_, eager, *_) in zip(found.rows, expected.rows, strict=True):
        torch.testing.assert_close(
            mine, eager, rtol=rtol, atol=atol, equal_nan=True, check_stride=False,
            msg=lambda m, name=name: f"{name}: {m}")
    return compiled


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree in order."""
    return (item for item in tree_leaves(tree) if isinstance(item, torch.Tensor))


@dataclass(frozen=True)
class _Outcome:
    """Rows of (name, value or None, what else must be equal)."""

    rows: list[tuple[Any, ...]]


def forget_gradients(*trees: Any) -> None:
    """Set the gradients of modules and of leaves among tensors to None."""
    for module in trees:
        for parameter in module.parameters() if isinstance(module, torch.nn.Module) else ():
            parameter.grad = None
    for tensor in tensors(trees):
        if tensor.is_leaf:
            tensor.grad = None


def _run(story: Any, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Outcome:
    owned = fn if isinstance(fn, torch.nn.Module) else torch.nn.Module()
    given = [*tensors((args, kwargs))]
    torch.manual_seed(0)
    outputs = story(fn, *args, **kwargs)
    rows: list[tuple[Any, ...]] = [("outputs", None, *_shape_of(outputs))]
    for i, out in enumerate(tensors(outputs)):
        rows.append((f"output {i}", out.detach(), out.requires_grad, out.is_leaf, out.dtype, out.shape))
    rows.append(("what is what", None, *_identities([*given, *owned.parameters(), *owned.buffers()], outputs)))
    for i, arg in enumerate(given):
        rows.append((f"argument {i} after the call", arg.detach(), arg.requires_grad))
        rows.append(_gradient(f"gradient of argument {i}", arg))
    for name, parameter in owned.named_parameters():
        rows.append((name, parameter.detach()))
        rows.append(_gradient(f"gradient of {name}", parameter))
    rows += [(name, buffer.detach(), buffer.requires_grad) for name, buffer in owned.named_buffers()]
    return _Outcome(rows)


def _identities(known: list[torch.Tensor], outputs: Any) -> tuple[list[int], list[int]]:
    """Return for each output the first tensor that it is, and the first one that it shares memory with."""
    known = [*known, *tensors(outputs)]
    objects = [id(t) for t in known]
    memory = [t.untyped_storage().data_ptr() or id(t) for t in known]
    count = len([*tensors(outputs)])
    return [objects.index(o) for o in objects[-count:]], [memory.index(m) for m in memory[-count:]]


def _gradient(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    grad = tensor.grad if tensor.is_leaf else None
    return (name, grad, None if grad is None else (grad.dtype, grad.shape))


def _shape_of(outputs: Any) -> tuple[Any, ...]:
    """Return containers, and constants, of an output tree."""
    return (tree_map_only(torch.Tensor, lambda _: "tensor", outputs), type(outputs))


def _copied(tree: Any) -> Any:
    """Return a copy of an argument tree; tensors that share memory, or are one tensor, still do or are."""
    bases: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in bases:
                flat = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.itemsize,))
                bases[storage.data_ptr()] = flat.clone()
            base = bases[storage.data_ptr()]
            view = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            made[id(tensor)] = view.detach().requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    return tree_map_only(torch.Tensor, copy_of, tree)


