"""Sixteen models of transformers: tiny, with random weights, and with the structure of the real ones.

Each has at least two layers, and what its family has: grouped-query attention, experts behind a top-k router, tied
embeddings, sliding windows, padding masks. Dropout is 0: two runs draw the same only where both draw in one order.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

Batch = dict[str, Any]
VOCABULARY, LENGTH, ROWS = 99, 12, 2


@dataclass(frozen=True)
class Model:
    """A model, and what it is fed.

    Args:
        make: returns it with new weights, drawn from torch's generator.
        batch: returns arguments of a training step; the result has a `loss`.
    """

    name: str
    make: Callable[[], Any]
    batch: Callable[[], Batch]


def _tokens(*, padded: bool = False) -> Batch:
    """Return text with its labels; padded: the last row ends early, and its padding has no labels."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[-1, LENGTH - 4:] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return batch


def _masked_words() -> Batch:
    batch = _tokens(padded=True)
    kept = torch.rand(ROWS, LENGTH) < 0.5
    return batch | {"labels": batch["labels"].masked_fill(kept, -100)}


def _translation() -> Batch:
    return _tokens(padded=True) | {"labels": torch.randint(3, VOCABULARY, (ROWS, LENGTH - 5))}


def _pictures() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(0, 5, (ROWS,))}


def _captions() -> Batch:
    text = _tokens(padded=True)
    return {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"],
            "pixel_values": torch.randn(ROWS, 3, 16, 16), "return_loss": True}


def _speech() -> Batch:
    return {"input_features": torch.randn(ROWS, 8, 2 * LENGTH), "labels": torch.randint(3, VOCABULARY, (ROWS, LENGTH))}


def _decoder(**more: Any) -> dict[str, Any]:
    """Return a decoder's sizes: two layers, four heads on two groups of keys and values."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, **more,
    }


def _encoder(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **more,
    }


def _called_once(model: Any) -> Any:
    """Return `model` after a call: in the first one transformers hooks the routers, behind a lock Dynamo refuses."""
    with torch.no_grad():
        model(**_tokens())
    return model


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_decoder()))


def _qwen3() -> Any:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_decoder(
        head_dim=8, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1)))


def _mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**_decoder(sliding_window=5)))


def _gemma2() -> Any:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**_decoder(head_dim=8, sliding_window=5)))


def _phi3() -> Any:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**_decoder(sliding_window=5)))


def _gpt2() -> Any:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
        use_cache=False, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))
    model.loss_type = "ForCausalLM"  # the class name alone does not tell transformers which loss
    return model


def _gpt_neox() -> Any:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_decoder(hidden_dropout=0.0, attention_dropout=0.0)))


def _mixtral() -> Any:
    return _called_once(hf.MixtralForCausalLM(hf.MixtralConfig(**_decoder(
        sliding_window=5, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True))))


def _qwen3_moe() -> Any:
    return _called_once(hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_decoder(
        head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
        output_router_logits=True))))


def _bert() -> Any:
    return hf.BertForMaskedLM(hf.BertConfig(**_encoder(
        vocab_size=VOCABULARY, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        use_cache=False)))


def _t5() -> Any:
    return hf.T5ForConditionalGeneration(hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False, tie_word_embeddings=True))


# Without `problem_type` an image model sets it in its first call: it is compiled twice then, and thunder refuses it.

def _vit() -> Any:
    return hf.ViTForImageClassification(hf.ViTConfig(**_encoder(
        image_size=16, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
        problem_type="single_label_classification")))


def _clip() -> Any:
    text = _encoder(vocab_size=VOCABULARY, max_position_embeddings=64, projection_dim=16, eos_token_id=2)
    vision = _encoder(image_size=16, patch_size=4, projection_dim=16)
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _whisper() -> Any:
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=LENGTH, max_target_positions=64, dropout=0.0, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None))


def _resnet() -> Any:
    return hf.ResNetForImageClassification(hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck", num_labels=5,
        problem_type="single_label_classification"))


def _mamba2() -> Any:
    return hf.Mamba2ForCausalLM(hf.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_heads=8, head_dim=8, n_groups=2, expand=2,
        num_hidden_layers=2, chunk_size=5, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2))


MODELS = (
    Model("Llama", _llama, _tokens),
    Model("Qwen3", _qwen3, _tokens),
    Model("Mistral", _mistral, _tokens),
    Model("Gemma2", _gemma2, _tokens),
    Model("Phi3", _phi3, _tokens),
    Model("GPT-2", _gpt2, _tokens),
    Model("GPTNeoX", _gpt_neox, _tokens),
    Model("Mixtral", _mixtral, _tokens),
    Model("Qwen3-MoE", _qwen3_moe, _tokens),
    Model("Bert", _bert, _masked_words),
    Model("T5", _t5, _translation),
    Model("ViT", _vit, _pictures),
    Model("CLIP", _clip, _captions),
    Model("Whisper", _whisper, _speech),
    Model("ResNet", _resnet, _pictures),
    Model("Mamba2", _mamba2, _tokens),
)
THROUGH_THUNDER = ("Llama", "GPT-2", "Bert", "ViT")
