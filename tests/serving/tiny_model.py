"""A model small enough for a real server on two cores: made from scratch, in a format that every engine loads.

It has learned what a tool call looks like (seconds, one thread), and little else: what it says is mostly well formed,
often wrong, and now and then neither. Its head is not tied to its embeddings, because vLLM on CPU keeps a packed copy
of a tied head when weights are loaded again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "tiny"
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
N_STEPS, N_ROWS = 240, 16
SHARE_OF_DIGITS = 0.2
"""Of the conversations: `say a3` is answered by any digit, so that the model is as unsure of it on every processor."""
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def call(command: str) -> dict[str, Any]:
    """A tool call as it stands in a conversation."""
    return {"id": "c", "type": "function", "function": {"name": "shell", "arguments": {"command": command}}}


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Two looks at a file and an answer, or any digit."""
    if rng.random() < SHARE_OF_DIGITS:
        answer = {"role": "assistant", "content": str(rng.randrange(10))}
        return [{"role": "user", "content": f"say a{rng.randrange(10)}"}, answer]
    file = f"f{rng.randrange(100):02d}"
    said: list[dict[str, Any]] = [{"role": "user", "content": f"what is in {file}?"}]
    for command in (f"ls -l {file}", f"cat {file}"):
        said.append({"role": "assistant", "content": "", "tool_calls": [call(command)]})
        said.append({"role": "tool", "content": f"{file} {rng.randrange(1000)}"})
    said.append({"role": "assistant", "content": f"it is {said[-1]['content']}"})
    return said


def make_tokenizer() -> Any:
    """A byte-level BPE; a call's two marks are one token each, as Qwen has them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    texts = [json.dumps(message) for _ in range(200) for message in conversation(rng)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[PAD, START, END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.add_tokens([AddedToken(mark, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Weights, tokenizer and template in `folder`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for ids, labels in batches(tokenizer, random.Random(seed)):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config.update(do_sample=True, top_k=20, repetition_penalty=1.1)  # as many a model's file has it
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def batches(tokenizer: Any, rng: random.Random) -> Iterator[tuple[Any, Any]]:
    """(ids, labels) of whole conversations, shape (N_ROWS, T); every token is learned, padding is not."""
    import torch

    for _ in range(N_STEPS):
        rows = [
            tokenizer.apply_chat_template(conversation(rng), tools=[TOOL], return_dict=False) for _ in range(N_ROWS)
        ]
        width = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        yield ids, ids.masked_fill(ids == tokenizer.pad_token_id, -100)


def make_adapter(folder: Path, model: Path, *, seed: int) -> Path:
    """A LoRA adapter of rank 4 that changes what the model says: random, and not small."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(seed)
    width, heads = config.hidden_size, config.num_attention_heads
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{part}.lora_{side}.weight": torch.randn(shape) * 0.4
        for layer in range(config.num_hidden_layers)
        for part, n_out in (("q_proj", width), ("v_proj", width // heads * config.num_key_value_heads))
        for side, shape in (("A", (4, width)), ("B", (n_out, 4)))
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
