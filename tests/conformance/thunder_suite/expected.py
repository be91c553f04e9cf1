"""expected: tests of thunder's that pass without jointtrace's option and fail with it, each with its reason.

Strict: an entry that is no longer a regression is an error.
"""
from __future__ import annotations

CONSTANTS = ('cache="symbolic values", for development only in thunder, is compiled as "constant values": gradients of '
             "symbolic sizes are wrong for other sizes. ")

NAMED = ("The test looks for the id that thunder gives a custom function; ours is one operator with an id of its own, "
         "and the same gradient.")

EXPECTED: dict[str, str] = {
    "test_check_trace.py::test_debug_option":
        "The last of its three programs is broken by a transform of the test, and expected to fail when it runs; we "
        "report the operation and the value that is missing when it is compiled.",
    **{f"test_dynamo.py::test_splitter_autograd_function_DynamoThunder_cpu_None[{dynamic}]": NAMED
       for dynamic in ("auto", "dynamic", "static")},
    "test_grad.py::test_grad_transform_saved_for_backward_proxy":
        CONSTANTS + "The test looks for a number among the saved values.",
    "test_jit_general.py::test_cache_symbolic_values_basic": CONSTANTS + "The test counts compilations.",
    "test_jit_general.py::test_cache_symbolic_values_dynamic_shape": CONSTANTS + "The test counts compilations.",
    "test_jit_general.py::test_cache_symbolic_values_reshape": CONSTANTS + "The test counts compilations.",
    "test_jit_general.py::test_matmul_nd_times_2d_runs_2d_gemm[cpu]":
        "The test looks into the subsymbols of the matmul that runs; those of ours have none, as they are renamed ops.",
    "test_transforms.py::test_cache_symbolic_values_grad_matmul": CONSTANTS + "The test counts compilations.",
    "test_transforms.py::test_dce_duplicate_number_proxies": CONSTANTS + "The test counts shape queries in the trace.",
}
