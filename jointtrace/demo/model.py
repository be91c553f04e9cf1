"""The reference Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU; the loss is part of the model.

Shape suffixes: B batch, T position, D width, H query head, K key-value head, G query heads per key-value head,
E head width, V vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; the defaults are the model that the project's figures are stated for."""

    vocabulary: int = 2048
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 688
    context: int = 256


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight."""

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x_BTD: Tensor) -> Tensor:
        mean_square = x_BTD.pow(2).mean(-1, keepdim=True)
        return self.weight * (x_BTD * torch.rsqrt(mean_square + self.epsilon))


class Attention(nn.Module):
    """Causal attention in which several query heads share one key-value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_width = config.width // config.heads
        kv_width = config.kv_heads * self.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q_BHTE = self.query(x_BTD).view(B, T, self.heads, self.head_width).transpose(1, 2)
        k_BKTE = self.key(x_BTD).view(B, T, self.kv_heads, self.head_width).transpose(1, 2)
        v_BKTE = self.value(x_BTD).view(B, T, self.kv_heads, self.head_width).transpose(1, 2)
        q_BHTE = rotate(q_BHTE, cos_TE, sin_TE)
        k_BKTE = rotate(k_BKTE, cos_TE, sin_TE)
        k_BHTE, v_BHTE = self.share(k_BKTE), self.share(v_BKTE)
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        return self.output(y_BHTE.transpose(1, 2).reshape(B, T, D))

    def share(self, x_BKTE: Tensor) -> Tensor:
        """Repeat each key-value head for the query heads that read it."""
        B, K, T, E = x_BKTE.shape
        G = self.heads // K
        return x_BKTE.unsqueeze(2).expand(B, K, G, T, E).reshape(B, self.heads, T, E)


class SwiGLU(nn.Module):
    """Gated feed-forward layer: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the residual stream after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.width)
        self.feed_forward = SwiGLU(config.width, config.hidden)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class Llama(nn.Module):
    """Language model whose forward returns the mean cross entropy of the next token."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        cos_TE, sin_TE = rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TE, self.sin_TE)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.reshape(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1))


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate each pair `(x[e], x[e + E/2])` by the angle of its position."""
    half = x_BHTE.shape[-1] // 2
    low, high = x_BHTE[..., :half], x_BHTE[..., half:]
    return x_BHTE * cos_TE + torch.cat((-high, low), -1) * sin_TE


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of `position * base ** (-2e / E)`, each of shape (T, E)."""
    frequency = ROTARY_BASE ** -(torch.arange(0, head_width, 2).float() / head_width)
    angle = torch.outer(torch.arange(context).float(), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()
