"""A small Llama with random weights, and a LoRA adapter for it, made here: nothing is downloaded.

Its tokenizer has a token for each byte, so lengths are known. Answers are nonsense, but the
engine computes, batches and caches as with any other model.
"""

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

HEAD: Final = 32
RANK: Final = 8
SPECIAL: Final = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
VOCABULARY: Final = 256 + len(SPECIAL)
TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m['role'] if m['role'] != 'developer' else 'system' }}|>"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Tensors = dict[str, NDArray[np.float32]]


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How large a model is."""

    hidden: int
    layers: int

    @property
    def heads(self) -> int:
        """Attention heads; half as many hold keys and values."""
        return self.hidden // HEAD

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return 2 * self.hidden


TINY: Final = Size(hidden=256, layers=4)
"""Answers at once: for what engines answer."""
SMALL: Final = Size(hidden=512, layers=8)
"""Computes for longer than the rest of the engine takes for a request, as on a GPU: for times."""


def make_model(folder: Path, window: int, size: Size = TINY) -> Path:
    """Write the model; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "head_dim": HEAD,
        "max_position_embeddings": window,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"bos_token_id": 256, "eos_token_id": 257})
    _write_tokenizer(folder)
    write_safetensors(folder / "model.safetensors", _weights(np.random.default_rng(0), size))
    return folder


def make_adapter(folder: Path, seed: int = 1) -> Path:
    """Write a LoRA adapter that changes a TINY model's answers; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    _write(folder / "adapter_config.json", config)
    tensors: Tensors = {}
    for layer in range(TINY.layers):
        for name, out in (("q_proj", TINY.hidden), ("v_proj", TINY.hidden // 2)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = _normal(random, RANK, TINY.hidden)
            tensors[f"{stem}.lora_B.weight"] = _normal(random, out, RANK)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def _weights(random: np.random.Generator, size: Size) -> Tensors:
    hidden, inner = size.hidden, size.inner
    ones = np.ones(hidden, dtype=np.float32)
    found: Tensors = {
        "model.embed_tokens.weight": _normal(random, VOCABULARY, hidden),
        "model.norm.weight": ones,
        "lm_head.weight": np.zeros((VOCABULARY, hidden), dtype=np.float32),
    }
    # Only printable ASCII is ever answered: each token is one whole character, and no answer
    # ends by itself. All other tokens have the logit 0, far below the largest.
    printable = slice(32, 127)
    found["lm_head.weight"][printable] = 20 * _normal(random, VOCABULARY, hidden)[printable]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(size.layers):
        stem = f"model.layers.{layer}"
        for name, shape in shapes.items():
            found[f"{stem}.{name}.weight"] = _normal(random, *shape)
        found[f"{stem}.input_layernorm.weight"] = ones
        found[f"{stem}.post_attention_layernorm.weight"] = ones
    return found


def _normal(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = random.standard_normal((rows, columns), dtype=np.float32)
    return values * np.float32(columns**-0.5)


def write_safetensors(file: Path, tensors: Tensors) -> None:
    """The safetensors format: the length of a JSON head, the head, the values."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in tensors.items():
        head[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    described = json.dumps(head).encode()
    described += b" " * (-len(described) % 8)
    with file.open("wb") as out:
        out.write(len(described).to_bytes(8, "little") + described)
        for values in tensors.values():
            out.write(values.tobytes())


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges."""
    vocabulary = {_shown(byte): byte for byte in range(256)}
    added = [
        {
            "id": 256 + number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL)
    ]
    vocabulary |= {token: 256 + number for number, token in enumerate(SPECIAL)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False},
    }
    _write(folder / "tokenizer.json", document)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": TEMPLATE,
        },
    )


def _shown(byte: int) -> str:
    """The printable character that stands for a byte in byte-level tokenizers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def _write(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document, indent=1), encoding="utf-8")
