"""The models that the benchmarks run: those of the package, which its command line also takes by name."""
from jointtrace.demo.models import LARGE, MODELS, REFERENCE, TINY, Sizes, Workload, build, tokens_and_targets

__all__ = ["LARGE", "MODELS", "REFERENCE", "TINY", "Sizes", "Workload", "build", "tokens_and_targets"]
