"""The tokenizer of the tiny policy as the files of a Hugging Face folder, for every engine and trainer that reads one.

The chat template gives the ids of `ChatTemplate.prompt_ids`, with two exceptions. It knows no sampled ids: those of an
answer are the encoding of its text. And a role mark in a message's text is a role mark there, where
`ChatTemplate.encode` reads it as text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentloop.policies.chat import CLOSE, END, OPEN, PAD, ROLES, ChatTemplate

TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message.role not in {list(ROLES)} %}}"
    "{{ raise_exception('no role ' + message.role + '; use " + ", ".join(ROLES) + "') }}"
    "{% endif %}"
    "{{ '<|' + message.role + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    f"{{{{ '{OPEN}{{\"name\": ' + call.function.name | tojson(ensure_ascii=true) + ', \"arguments\": ' }}}}"
    "{% set arguments = call.function.arguments %}"
    # Engines parse the JSON text of arguments before they render; a client of the tokenizer does not.
    "{{ arguments if arguments is string else arguments | tojson }}"
    f"{{{{ '}}{CLOSE}' }}}}"
    "{% endfor %}"
    f"{{{{ '{END}' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ROLES['assistant']}' }}}}{{% endif %}}"
)


def save_chat(chat: ChatTemplate, folder: Path, *, context: int) -> None:
    """Write tokenizer, chat template and end mark into `folder`. context: the model's length in tokens."""
    chat.tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": PAD,  # never used; a token of another name would get an id that the model does not have
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", tokenizer)
    _write(folder / "generation_config.json", {"eos_token_id": chat.end, "pad_token_id": chat.pad})


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
