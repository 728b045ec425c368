"""A model that says what it is told to: its weights hold a few texts, of which the prompt's last token picks one.

Attention and MLP add nothing, so the last hidden state is the last token's embedding, and the head maps each token to
the one after it in its text. Every piece of every text is a token of its own, which has one successor.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, TOOL_CALLS = "<s>", "</s>", "[TOOL_CALLS]"
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris, \\"F\\"", "days": [1, 2]}}'
TIME = '{"name": "get_time", "arguments": {}}'
SCRIPTS = {
    "hello": "Hello there, this is what I always answer.",
    "think": "<think>\nTwo and two, carefully.\n</think>\n\nIt is four.",
    "call": f"<think>\nI need both.\n</think>\n\nOne moment.\n<tool_call>\n{WEATHER}\n</tool_call>\n"
    f"<tool_call>\n{TIME}\n</tool_call>",
    "mistral": f'{TOOL_CALLS}[{{"name": "get_weather", "arguments": {{"city": "Rome"}}}}]',
    "object": '{"name": "Eve", "age": 41}',
    "json": '```json\n{"name": "Ada", "age": 36}\n```\nThat was all.',
}
TEMPLATE = (
    "{# writes <think> and <tool_call> #}{{ bos_token }}{% for message in messages %}"
    "({{ message.role }}) {{ message.content }}{% for call in message.tool_calls or [] %}"
    " calls {{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}\n{% endfor %}"
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|say:{{ script | default('hello') }}|>{% endif %}"
)
HIDDEN, HEAD_DIM = 128, 32


def pieces_of(text: str, taken: set[str]) -> list[str]:
    """`text` in pieces of three characters or more, each one new."""
    found = []
    while text:
        length = 3
        while text[:length] in taken and length < len(text):
            length += 1
        piece = TOOL_CALLS if text.startswith(TOOL_CALLS) else text[:length]
        assert piece not in taken, f"{piece!r} has a successor already"
        taken.add(piece)
        found.append(piece)
        text = text[len(piece) :]
    return found


def make_scripted_model(folder: Path) -> tuple[Path, dict[str, list[str]]]:
    """The folder, and the pieces of each script."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    scripts = {name: pieces_of(text, taken) for name, text in SCRIPTS.items()}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    starts = {name: f"<|say:{name}|>" for name in SCRIPTS}
    special = [BOS, EOS, TOOL_CALLS, *starts.values()]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = [piece for pieces in scripts.values() for piece in pieces if piece != TOOL_CALLS]
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    says = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(says))
    chains = [[starts[name], *pieces, EOS] for name, pieces in scripts.items()]
    follows = {a: b for chain in chains for a, b in pairwise(chain)}
    ids = {tokenizer.token_to_id(a): tokenizer.token_to_id(b) for a, b in follows.items()}
    _save_weights(folder, tokenizer.get_vocab_size(), ids, tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS))
    return folder, scripts


def _save_weights(folder: Path, vocab_size: int, successors: dict[int, int], bos: int, eos: int) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randint(0, 2, (vocab_size, HIDDEN), generator=generator).float() * 2 - 1
    head = torch.zeros(vocab_size, HIDDEN)
    for token, successor in successors.items():
        head[successor] += embedding[token]
    layer, nothing = "model.layers.0.", torch.zeros(HIDDEN, HIDDEN)
    attention = torch.randn(HIDDEN, HIDDEN, generator=generator)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(HIDDEN),
        f"{layer}input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}self_attn.o_proj.weight": nothing,
        f"{layer}mlp.down_proj.weight": nothing.clone(),
        **{f"{layer}self_attn.{name}_proj.weight": attention.clone() for name in "qkv"},
        **{f"{layer}mlp.{name}_proj.weight": attention.clone() for name in ("gate", "up")},
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": HIDDEN // HEAD_DIM, "head_dim": HEAD_DIM, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
        "rope_theta": 10000.0, "bos_token_id": bos, "eos_token_id": eos,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
