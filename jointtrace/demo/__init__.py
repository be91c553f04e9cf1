"""The demo: one Llama trained on real text under eager PyTorch, torch.compile, thunder, and jointtrace."""
from jointtrace.demo.compare import run

__all__ = ["run"]
