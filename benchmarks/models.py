"""The models that the step benchmark runs, each with synthetic inputs; every forward returns a scalar loss."""
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jointtrace.demo.model import Llama, LlamaConfig

WIDTH = 256
HEADS = 8
VOCABULARY = 2048
CONTEXT = 256
BATCH = 4
IMAGE = 64
PATCH = 8
CLASSES = 100
MLP_BATCH = 1024
MLP_HIDDEN = 1024

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

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_TD = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT) + self.position_TD
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.reshape(-1, VOCABULARY), targets_BT.reshape(-1))


class ViT(nn.Module):
    """Image classifier: patches, a transformer encoder, the mean over positions."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.position_TD = nn.Parameter(0.02 * torch.randn((IMAGE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        x_BTD = self.patches(images_BCHW).flatten(2).transpose(1, 2) + self.position_TD
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.cross_entropy(self.head(self.norm(x_BTD).mean(1)), labels_B)


class MLP(nn.Module):
    """Classifier of `layers` Linear and GELU pairs."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        widths = [WIDTH, *[MLP_HIDDEN] * layers]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        for linear in self.hidden:
            x_BD = F.gelu(linear(x_BD))
        return F.cross_entropy(self.head(x_BD), labels_B)


def llama(layers: int) -> Workload:
    """Return the reference Llama and (tokens, targets)."""
    return Llama(LlamaConfig(vocabulary=VOCABULARY, layers=layers)), tokens_and_targets()


def gpt2(layers: int) -> Workload:
    """Return a small GPT-2 and (tokens, targets)."""
    return GPT2(layers), tokens_and_targets()


def vit(layers: int) -> Workload:
    """Return a small ViT and (images, labels)."""
    return ViT(layers), (torch.randn(BATCH, 3, IMAGE, IMAGE), torch.randint(CLASSES, (BATCH,)))


def mlp(layers: int) -> Workload:
    """Return an MLP and (vectors, labels)."""
    return MLP(layers), (torch.randn(MLP_BATCH, WIDTH), torch.randint(CLASSES, (MLP_BATCH,)))


def tokens_and_targets() -> tuple[Tensor, Tensor]:
    """Return random int64 (tokens, targets) of shape (BATCH, CONTEXT)."""
    sample_BT = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    return sample_BT[:, :-1].contiguous(), sample_BT[:, 1:].contiguous()


MODELS: dict[str, Callable[[int], Workload]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "mlp": mlp}


def build(name: str, layers: int, dtype: torch.dtype, seed: int = 0) -> Workload:
    """Return the model `name` and its inputs in `dtype`; integer inputs stay integers."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name](layers)
    return model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
