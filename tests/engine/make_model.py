# SPDX-License-Identifier: Apache-2.0
"""Make small models with random weights, tokenizers and adapters, in the engine's environment.

    python make_model.py FOLDER

A model as a library initialises it repeats one token for ever, and cannot show that its cache was wrong. With these
scales the greedy tokens of a prompt are nearly all distinct and depend on every layer.
"""

import json
import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZES = {
    # name: layers, width, query heads, key heads, inner width, vocabulary
    "small": (4, 256, 8, 4, 512, 2048),
    "large": (8, 768, 12, 4, 2048, 4096),
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = ["the quick brown fox jumps over the lazy dog", "hello the dog, where is the fox?", "0123456789 one two three"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


ADAPTERS = ("a", "b")
IMAGE_PIXELS, IMAGE_TOKENS = 56, 32


def make_model(folder: Path, size: str) -> None:
    torch.manual_seed(0)
    other = {"window": window, "state": state, "latent": latent, "image": image}
    model = other[size]() if size in other else llama(*SIZES[size])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name.lower():
                weight.normal_(0.0, scale(name, model.config))
    model.to(torch.float32).save_pretrained(folder)
    tokenizer = make_tokenizer()
    if size == "image":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        pixels = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
        Blip2Processor(BlipImageProcessorPil(size=pixels), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def scale(name: str, config: PreTrainedConfig) -> float:
    """How loud a weight is."""
    if any(part in name for part in ("vision_model", "qformer")):
        return 0.2
    if any(part in name for part in ("query_tokens", "language_projection")):
        return 1.0
    width = config.get_text_config().hidden_size
    # Where the head is the embedding itself, a loud one would only repeat the last token.
    embedding = 0.02 if config.tie_word_embeddings else 1.0
    known = {"q_proj": 2 / width**0.5, "k_proj": 2 / width**0.5, "embed_tokens": embedding, "lm_head": 0.2}
    return next((value for part, value in known.items() if part in name), 1 / width**0.5)


def llama(layers: int, width: int, heads: int, key_heads: int, inner: int, vocabulary: int) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            intermediate_size=inner,
            vocab_size=vocabulary,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            dtype="float32",
            **SPECIAL,
        )
    )


def window() -> PreTrainedModel:
    """Layers with a sliding window beside layers with full attention: three cache groups of two layers."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            sliding_window=128,
            # Heads that look at few tokens: where they look at all of them, every next token is the same.
            query_pre_attn_scalar=2,
            hidden_size=256,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            intermediate_size=512,
            vocab_size=2048,
            max_position_embeddings=8192,
            dtype="float32",
            **SPECIAL,
        )
    )


def state() -> PreTrainedModel:
    """Layers with a recurrent state beside one with full attention."""
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            hidden_size=256,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            intermediate_size=512,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            # The engine wants a layer of experts to be there.
            mlp_only_layers=[0, 1, 2],
            vocab_size=2048,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            dtype="float32",
            **SPECIAL,
        )
    )


def latent() -> PreTrainedModel:
    """Multi-head latent attention: all tensor parallel ranks hold the same cache."""
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            num_hidden_layers=2,
            first_k_dense_replace=2,
            hidden_size=256,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
            head_dim=64,
            intermediate_size=512,
            moe_intermediate_size=128,
            n_routed_experts=4,
            num_experts_per_tok=2,
            vocab_size=2048,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            dtype="float32",
            **SPECIAL,
        )
    )


def image() -> PreTrainedModel:
    """The small model behind an eye: an image becomes the first tokens of its prompt."""
    small = llama(*SIZES["small"]).config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    width = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    eye = Blip2VisionConfig(image_size=IMAGE_PIXELS, patch_size=14, **width)
    query = Blip2QFormerConfig(encoder_hidden_size=64, cross_attention_frequency=2, vocab_size=64, **width)
    config = Blip2Config(
        vision_config=eye.to_dict(),
        qformer_config=query.to_dict(),
        text_config=small,
        num_query_tokens=IMAGE_TOKENS,
        tie_word_embeddings=False,
    )
    return Blip2ForConditionalGeneration(config)


def make_adapter(folder: Path, name: str) -> None:
    """A low-rank adapter of the small model; another one for each name, loud enough to change every token."""
    layers, width, heads, key_heads, *_ = SIZES["small"]
    torch.manual_seed(zlib.crc32(name.encode()))
    weights = {}
    for layer in range(layers):
        for part, rows in (("q_proj", width), ("v_proj", width // heads * key_heads)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, width) / width**0.5
            weights[f"{place}.lora_B.weight"] = torch.randn(rows, 8)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=8192
    )
    fast.chat_template = TEMPLATE
    return fast


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    for size in (*SIZES, "window", "state", "latent", "image"):
        make_model(folder / size, size)
    for name in ADAPTERS:
        make_adapter(folder / f"adapter-{name}", f"adapter-{name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
