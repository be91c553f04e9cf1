"""What is known not to pass, each with its reason; whatever is listed and passes is an error."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.ops.judge import Verdict
from conformance.ops.results import Key, Row
from conformance.ops.table import by_operator


@dataclass(frozen=True)
class Expected:
    """Operators with one verdict, through one front end, for one reason."""

    front: str
    verdict: Verdict
    reason: str
    ops: str


EXPECTED: tuple[Expected, ...] = (
    Expected("thunder", Verdict.REFUSED, "a result that requires a gradient and gives none: of empty matrices", """
        linalg.householder_product masked.norm masked.normalize
    """),
    Expected("thunder", Verdict.REFUSED, "random numbers that no gradient rule of thunder keeps for the backward", """
        nn.functional.alpha_dropout nn.functional.dropout2d nn.functional.dropout3d
        nn.functional.feature_alpha_dropout.with_train nn.functional.feature_alpha_dropout.without_train
        nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
        nn.functional.multi_head_attention_forward normal
    """),
    Expected("thunder", Verdict.REFUSED, "sizes, or checks of arguments, depend on values", """
        combinations corrcoef cov index_fill index_put linalg.lstsq linalg.lstsq.grad_oriented masked_select
        narrow nn.functional.ctc_loss nn.functional.gaussian_nll_loss repeat_interleave
    """),
    Expected("thunder", Verdict.REFUSED, "sparse tensors: thunder has none", """
        sparse.mm.reduce sparse.sampled_addmm to_sparse
    """),
    Expected("thunder", Verdict.REFUSED, "thunder itself cannot trace it", """
        H __radd__ __rmul__ float mH masked.median nn.functional.linear_cross_entropy.chunked normal.number_mean
        pca_lowrank svd_lowrank tensor_split to transpose
    """),
    Expected("thunder", Verdict.REFUSED, "views of several arguments", """
        atleast_1d atleast_2d atleast_3d
    """),
    Expected("thunder", Verdict.REFUSED, "writes to an argument where thunder has no rule for it", """
        _batch_norm_with_update _native_batch_norm_legit native_batch_norm nn.functional.instance_norm
    """),
    Expected("torch.compile", Verdict.HOST_REFUSES, "Dynamo cannot trace it", """
        linalg.lstsq linalg.lstsq.grad_oriented nn.functional.ctc_loss
        nn.functional.linear_cross_entropy.chunked nn.functional.linear_cross_entropy.chunked_none
    """),
    Expected("torch.compile", Verdict.HOST_REFUSES, "Dynamo does not take sparse tensors", """
        sparse.mm.reduce sparse.sampled_addmm to_sparse
    """),
    Expected("torch.compile", Verdict.HOST_REFUSES, "sizes, or checks of arguments, depend on values", """
        combinations corrcoef cov masked_select nn.functional.gaussian_nll_loss
    """),
    Expected("torch.compile", Verdict.HOST_WRONG, "at a tie torch's decomposition has another subgradient", """
        nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss
    """),
    Expected("torch.compile", Verdict.REFUSED, "the backward has an effect: it checks a solver's status", """
        linalg.eig linalg.eigvals
    """),
)


def verdict_of(op: str, front: str) -> Verdict:
    """Return the expected verdict on an operator."""
    return _TABLE.get((op, front), Verdict.PASS)


def surprises(rows: Mapping[Key, Row]) -> list[str]:
    """Return a line for each operator whose verdict is not the expected one."""
    return [
        f"{op}, {front}: {row['verdict']}, expected {verdict_of(op, front).value}. {row['reason']}"
        for front in dict.fromkeys(front for _, _, front in rows)
        for op, row in by_operator(rows, front).items() if row["verdict"] != verdict_of(op, front).value
    ]


_TABLE = {(op, entry.front): entry.verdict for entry in EXPECTED for op in entry.ops.split()}
