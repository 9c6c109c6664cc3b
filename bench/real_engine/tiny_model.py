"""A small Llama with random weights, and a LoRA adapter for it, made here: nothing is downloaded.

Run by the engine's Python, which has torch and transformers: `tiny_model.py FOLDER WINDOW HIDDEN
LAYERS`. The tokenizer has a token for each byte, so lengths are known. Answers are nonsense, but
the engine computes, batches and caches as with any other model.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

HEAD: Final = 32
RANK: Final = 8
SPECIAL: Final = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m['role'] if m['role'] != 'developer' else 'system' }}|>"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(folder: Path, window: int, hidden: int, layers: int) -> None:
    """Write the model and its tokenizer to FOLDER, an adapter that changes answers to `lora`."""
    # Nothing but the engine's own environment has these.
    import torch  # type: ignore[import-not-found,unused-ignore]
    from safetensors.torch import save_file  # type: ignore[import-not-found,unused-ignore]
    from tokenizers import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )
    from transformers import (  # type: ignore[import-not-found,unused-ignore]
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        convert_slow_tokenizer,
    )

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD // 2,
        head_dim=HEAD,
        max_position_embeddings=window,
        vocab_size=256 + len(SPECIAL),
        rms_norm_eps=1e-5,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=hidden**-0.5,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Only printable ASCII is ever answered: each token is one whole character, and no answer
        # ends by itself. All other tokens have the logit 0, far below the largest.
        head = model.lm_head.weight
        head[32:127] *= 20
        head[:32] = head[127:] = 0
    model.save_pretrained(folder)

    tokenizer = Tokenizer(
        models.BPE({c: byte for byte, c in convert_slow_tokenizer.bytes_to_unicode().items()}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(folder)

    adapter = folder / "lora"
    adapter.mkdir(exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(described), "utf-8")
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        for name, out in (("q_proj", hidden), ("v_proj", hidden // 2)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, hidden) * hidden**-0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, RANK) * RANK**-0.5
    save_file(tensors, adapter / "adapter_model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
