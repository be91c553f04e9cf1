"""Models with synthetic inputs, for the benchmarks and `jointtrace report`; every forward returns a scalar loss."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jointtrace.demo.model import Llama, LlamaConfig


@dataclass(frozen=True)
class Sizes:
    """How large the models and their inputs are; the defaults are those that the project's figures are stated for."""

    width: int = 256
    heads: int = 8
    vocabulary: int = 2048
    context: int = 256
    batch: int = 4
    image: int = 64
    patch: int = 8
    classes: int = 100
    mlp_batch: int = 1024
    mlp_hidden: int = 1024


REFERENCE = Sizes()
TINY = Sizes(64, 4, 256, 32, 2, 16, 8, 10, 32, 128)
LARGE = Sizes(1024, 16, 8192, 1024, 8, 224, 16, 1000, 8192, 4096)
Workload = tuple[nn.Module, tuple[Tensor, ...]]


class Attention(nn.Module):
    """Multi-head attention with one projection for query, key and value, and biases."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.projection = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        split = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.projection(x_BTD).chunk(3, -1))
        q_BHTE, k_BHTE, v_BHTE = split
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=self.causal)
        return self.output(y_BHTE.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Transformer block with LayerNorm and GELU, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.feed_forward_norm(x_BTD))))


class GPT2(nn.Module):
    """Causal language model with learned positions."""

    def __init__(self, layers: int, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position_TD = nn.Parameter(0.02 * torch.randn(sizes.context, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT) + self.position_TD
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.reshape(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1))


class ViT(nn.Module):
    """Image classifier: patches, a transformer encoder, the mean over positions."""

    def __init__(self, layers: int, sizes: Sizes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.width, sizes.patch, stride=sizes.patch)
        self.position_TD = nn.Parameter(0.02 * torch.randn((sizes.image // sizes.patch) ** 2, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.classes)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        x_BTD = self.patches(images_BCHW).flatten(2).transpose(1, 2) + self.position_TD
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.cross_entropy(self.head(self.norm(x_BTD).mean(1)), labels_B)


class MLP(nn.Module):
    """Classifier of `layers` Linear and GELU pairs."""

    def __init__(self, layers: int, sizes: Sizes) -> None:
        super().__init__()
        widths = [sizes.width, *[sizes.mlp_hidden] * layers]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], sizes.classes)

    def forward(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        for linear in self.hidden:
            x_BD = F.gelu(linear(x_BD))
        return F.cross_entropy(self.head(x_BD), labels_B)


def llama(layers: int, sizes: Sizes) -> Workload:
    """Return the Llama and (tokens, targets)."""
    config = LlamaConfig(
        sizes.vocabulary, sizes.width, layers, sizes.heads, sizes.heads // 2, sizes.width * 43 // 16, sizes.context
    )
    return Llama(config), tokens_and_targets(sizes)


def gpt2(layers: int, sizes: Sizes) -> Workload:
    """Return a small GPT-2 and (tokens, targets)."""
    return GPT2(layers, sizes), tokens_and_targets(sizes)


def vit(layers: int, sizes: Sizes) -> Workload:
    """Return a small ViT and (images, labels)."""
    images_BCHW = torch.randn(sizes.batch, 3, sizes.image, sizes.image)
    return ViT(layers, sizes), (images_BCHW, torch.randint(sizes.classes, (sizes.batch,)))


def mlp(layers: int, sizes: Sizes) -> Workload:
    """Return an MLP and (vectors, labels)."""
    x_BD = torch.randn(sizes.mlp_batch, sizes.width)
    return MLP(layers, sizes), (x_BD, torch.randint(sizes.classes, (sizes.mlp_batch,)))


def tokens_and_targets(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return random int64 (tokens, targets) of shape (batch, context)."""
    sample_BT = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1))
    return sample_BT[:, :-1].contiguous(), sample_BT[:, 1:].contiguous()


MODELS: dict[str, Callable[[int, Sizes], Workload]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "mlp": mlp}


def build(name: str, layers: int, dtype: torch.dtype, seed: int = 0, sizes: Sizes = REFERENCE) -> Workload:
    """Return the model `name` and its inputs in `dtype`; integer inputs stay integers."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name](layers, sizes)
    return model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
