# SPDX-License-Identifier: Apache-2.0
"""Make a small model with random weights and a tokenizer, once, and say where it lies.

    python -m tools.tiny_model [--name demo]

The folder lies beside the engine environments (``tools/vllm_env.py``) under a name that holds a fingerprint of the
shape and the maker; it is built beside its place and renamed when complete. Weights come from a seed, so two machines
have the same model. torch and transformers are needed only where it is made: the maker runs in the engine environment.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["SHAPES", "Shape", "main", "model"]

LINES: Final = ("the quick brown fox jumps over the lazy dog", "a cache keeps what was computed once", "hello world")
SPECIAL: Final = ("<s>", "</s>", "<pad>")
TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama of this shape."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int = 2048
    longest: int = 8192
    seed: int = 7


SHAPES: Final = {
    # 53 million parameters: large enough that computing a long prompt on a CPU takes a second.
    "demo": Shape(layers=8, hidden=768, heads=12, kv_heads=4, inner=2048),
    # For tests of function: starts and computes fast.
    "tiny": Shape(layers=4, hidden=256, heads=8, kv_heads=4, inner=512),
}


def model(python: Path, name: str = "demo") -> Path:
    """Return the folder of the model called *name*, made first where it is missing.

    Args:
        python: interpreter of the engine environment.
        name: one of ``SHAPES``.

    Raises:
        SystemExit: making it failed; what was said is on standard error.
    """
    vllm_env = importlib.import_module("tools.vllm_env")
    target: Path = vllm_env.cache_folder() / f"model-{name}-{_fingerprint(name)}"
    if target.exists():
        return target
    with vllm_env.locked(target.with_name(target.name + ".lock")):
        if not target.exists():  # another process may have made it while this one waited
            partial = target.with_name(target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            command = [str(python), str(Path(__file__).resolve()), "--name", name, "--make", str(partial)]
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                raise SystemExit("the model could not be made; see above")
            partial.rename(target)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the folder goes to standard output."""
    parser = argparse.ArgumentParser(description="Make a small model and print its folder.", allow_abbrev=False)
    parser.add_argument("--name", default="demo", choices=sorted(SHAPES), help="its shape (default: %(default)s)")
    parser.add_argument("--make", type=Path, metavar="DIR", help="make it there, with this interpreter's torch")
    options = parser.parse_args(arguments)
    if options.make:
        _make(SHAPES[options.name], options.make)
    else:
        vllm_env = importlib.import_module("tools.vllm_env")
        print(model(vllm_env.environment(), options.name))
    return 0


def _fingerprint(name: str) -> str:
    parts = (Path(__file__).read_text(), json.dumps(dataclasses.asdict(SHAPES[name]), sort_keys=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _make(shape: Shape, folder: Path) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(shape.seed)
    config = transformers.LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.longest,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    _make_tokenizer(folder, transformers)


def _make_tokenizer(folder: Path, transformers: Any) -> None:
    """A byte-level one whose special tokens have the ids that the configuration names."""
    tokenizers: Any = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(main())
