"""Where thunder's gradient rules are silently wrong and no rule of ours stands in: raise before one is used."""
from __future__ import annotations

from thunder.core.dtypes import is_complex_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from jointtrace.errors import UnsupportedError
from jointtrace.joint.symbols import draws_again, right_for_complex, where


def check_rule(bsym: BoundSymbol) -> None:
    """Raise where the gradient rule of a bound symbol would give a wrong gradient.

    Raises:
        UnsupportedError: the backward would draw other random numbers than the forward, or forget to conjugate.
    """
    at = f"{bsym.sym.name} ({where(bsym) or 'no source known'})"
    if draws_again(bsym.sym):
        raise UnsupportedError(f"{at} draws random numbers, and no gradient rule keeps them for the backward; multiply "
                               "by a mask made with torch.rand, or use dropout")
    values = [p for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if isinstance(p, TensorProxy)]
    if any(is_complex_dtype(p.dtype) for p in values) and not right_for_complex(bsym.sym):
        raise UnsupportedError(f"the gradient of {at} for complex numbers; compute with real and imaginary parts, or "
                               "leave it out of the compiled function")
