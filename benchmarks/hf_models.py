"""Small models of the transformers library with random weights and synthetic inputs; every forward returns the loss."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from models import REFERENCE, Sizes, Workload
from torch import Tensor, nn

if TYPE_CHECKING:  # transformers takes seconds to import, and only some runs need it
    from transformers import PreTrainedModel

IMAGE = 128
"""Of a ViT: with patches of 8 that is 257 positions, as many as the language models have."""


class WithLoss(nn.Module):
    """A model that takes its input under one name and `labels`, and returns their loss alone."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, given: Tensor, labels: Tensor) -> Tensor:
        return self.model(**{self.name: given}, labels=labels).loss


def gpt2(layers: int, sizes: Sizes) -> Workload:
    """Return a causal GPT-2 and (tokens, labels)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=sizes.vocabulary, n_positions=sizes.context, n_embd=sizes.width, n_layer=layers,
                        n_head=sizes.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common())
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers looks the loss up at run time, where Dynamo cannot follow
    return WithLoss(model, "input_ids"), tokens_and_labels(sizes)


def qwen3(layers: int, sizes: Sizes) -> Workload:
    """Return a Qwen3 and (tokens, labels)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=sizes.vocabulary, hidden_size=sizes.width, num_hidden_layers=layers,
                         intermediate_size=sizes.width * 43 // 16, num_attention_heads=sizes.heads,
                         num_key_value_heads=sizes.heads // 2, head_dim=sizes.width // sizes.heads,
                         max_position_embeddings=sizes.context, **common())
    return WithLoss(Qwen3ForCausalLM(config), "input_ids"), tokens_and_labels(sizes)


def bert(layers: int, sizes: Sizes) -> Workload:
    """Return a Bert that fills in masked words, and (tokens, labels)."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=sizes.vocabulary, hidden_size=sizes.width, num_hidden_layers=layers,
                        num_attention_heads=sizes.heads, intermediate_size=4 * sizes.width,
                        max_position_embeddings=sizes.context, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0, **common())
    return WithLoss(BertForMaskedLM(config), "input_ids"), tokens_and_labels(sizes)


def vit(layers: int, sizes: Sizes) -> Workload:
    """Return a ViT that classifies, and (images, labels)."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=sizes.width, num_hidden_layers=layers, num_attention_heads=sizes.heads,
                       intermediate_size=4 * sizes.width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                       image_size=IMAGE, patch_size=sizes.patch, **common())
    config.num_labels = sizes.classes
    images_BCHW = torch.randn(sizes.batch, 3, IMAGE, IMAGE)
    return WithLoss(ViTForImageClassification(config), "pixel_values"), (
        images_BCHW, torch.randint(sizes.classes, (sizes.batch,)))


def common() -> dict[str, Any]:
    """Return what every configuration has: attention by torch's operator for it."""
    return {"attn_implementation": "sdpa"}


def tokens_and_labels(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return random int64 (tokens, labels) of shape (batch, context)."""
    tokens_BT = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context))
    return tokens_BT, torch.randint(sizes.vocabulary, (sizes.batch, sizes.context))


MODELS: dict[str, Callable[[int, Sizes], Workload]] = {"GPT-2": gpt2, "ViT": vit, "Bert": bert, "Qwen3": qwen3}


def build(name: str, layers: int = 4, seed: int = 0, sizes: Sizes = REFERENCE) -> Workload:
    """Return the model `name` in training mode and its inputs, float32."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name](layers, sizes)
    return model.train(), inputs
