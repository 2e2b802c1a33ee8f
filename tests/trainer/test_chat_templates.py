"""Chat templates of published models, as the package of TRL has them: answers are found in all of them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import trl
from transformers import AutoTokenizer

from tests.support.tiny_models import make_tokenizer
from trainyard_trainer.data.sources.chats.examples import WrongRow, example_of, question_of
from trainyard_trainer.data.sources.chats.tokenizer import ChatTokenizer
from trainyard_trainer.recipes.causal_lm.texts.prompts import Prompts

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MARKED = "_training"
"""The end of the names of templates that mark the assistant's words."""
NAMES = sorted(each.stem for each in TEMPLATES.glob("*.jinja") if MARKED not in each.stem)

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is 1 plus 2?"}
ANSWERED = {"role": "assistant", "content": "It is 3."}
ASKED_AGAIN = {"role": "user", "content": "And 5?"}
LAST = {"role": "assistant", "content": "It is 6."}
THOUGHT = {"role": "assistant", "content": "<think>\n1 and 2\n</think>\n\nIt is 3."}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "three"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [ASKED, ANSWERED],
    "two": [ASKED, ANSWERED, ASKED_AGAIN, LAST],
    "system": [SYSTEM, ASKED, ANSWERED, ASKED_AGAIN, LAST],
    "thoughts": [ASKED, THOUGHT, ASKED_AGAIN, THOUGHT],
    "calls": [ASKED, CALLED, RESULT, ANSWERED, ASKED_AGAIN, LAST],
    "calls at last": [ASKED, ANSWERED, ASKED_AGAIN, CALLED, RESULT, LAST],
}
BAR = "\uff5c"
"""The wide bar in the special tokens of DeepSeek."""
SENTENCE_END = f"<{BAR}end▁of▁sentence{BAR}>"
SPECIAL = re.compile(
    rf"<[|{BAR}][^<>{{}}'\" ]+?[|{BAR}]>|<(?:end_of_turn|start_of_turn|turn\||\|turn)>"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a tokenizer with a template and its special tokens, made once."""
    root = tmp_path_factory.mktemp("tokenizers")

    @cache
    def folder(name: str) -> str:
        template = (TEMPLATES / f"{name}.jinja").read_text()
        tokenizer = make_tokenizer(template=template)
        special = sorted(set(SPECIAL.findall(template)))
        tokenizer.add_special_tokens({"additional_special_tokens": special, "bos_token": "<s>"})
        tokenizer.save_pretrained(root / name)
        return str(root / name)

    return folder


def row_of(chat: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": chat, "tools": TOOLS if CALLED in chat else None}


def learnt(folder: str, chat: list[dict[str, Any]]) -> list[str]:
    """Return the pieces of a chat that are learnt."""
    pieces: list[list[int]] = [[]]
    for token, is_learnt in zip(
        *ChatTokenizer(folder, "answers").tokens_of(example_of(row_of(chat))), strict=True
    ):
        if is_learnt:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(piece) for piece in pieces if piece]


def learnt_or_reason(folder: str, chat: list[dict[str, Any]]) -> tuple[list[str], str | None]:
    try:
        return learnt(folder, chat), None
    except WrongRow as error:
        return [], str(error)


UNABLE = "the chat template fails|does not show the calls of tools|does not show the content"
"""What is said of chats that a template cannot hold."""


@pytest.mark.parametrize("name", NAMES)
def test_each_answer_of_a_chat_is_learnt_and_nothing_else(folders: Any, name: str) -> None:
    rendered = 0
    for kind, chat in CHATS.items():
        turns = [each for each in chat if each["role"] == "assistant"]
        found, reason = learnt_or_reason(folders(name), chat)
        if reason is not None:
            assert re.search(UNABLE, reason), (kind, reason)
            continue
        rendered += 1
        assert len(found) == len(turns), (kind, found)
        for turn, piece in zip(turns, found, strict=True):
            words = turn["content"].split("\n")[-1] if "content" in turn else "add"
            assert words in piece, (kind, found)
            assert not any(each in piece for each in ("What", "And", "brief", "three")), kind
    # Templates for images take lists of parts as content, and no text.
    assert rendered >= (3 if name not in ("idefics3", "llava_next", "smolvlm") else 0)


@pytest.mark.parametrize(
    ("name", "chat", "pieces"),
    [
        ("qwen3", "two", ["It is 3.<|im_end|>", "<think>\n\n</think>\n\nIt is 6.<|im_end|>"]),
        (
            "qwen3",
            "thoughts",
            ["It is 3.<|im_end|>", "<think>\n1 and 2\n</think>\n\nIt is 3.<|im_end|>"],
        ),
        (
            "qwen3",
            "calls",
            [
                '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
                "It is 3.<|im_end|>",
                "<think>\n\n</think>\n\nIt is 6.<|im_end|>",
            ],
        ),
        ("qwen3_6", "two", ["It is 3.<|im_end|>", "\n</think>\n\nIt is 6.<|im_end|>"]),
        (
            "deepseek_r1_distill",
            "two",
            [f"It is 3.{SENTENCE_END}", f"It is 6.{SENTENCE_END}"],
        ),
        (
            "gptoss",
            "two",
            [
                "<|channel|>final<|message|>It is 3.<|end|>",
                "<|channel|>final<|message|>It is 6.<|return|>",
            ],
        ),
        ("phi3", "two", ["It is 3.<|end|>", "It is 6.<|end|>\n<|im_end|>"]),
        ("llama3_1", "system", ["It is 3.<|eot_id|>", "It is 6.<|eot_id|>"]),
        (
            "llama3_1",
            "calls at last",
            [
                "It is 3.<|eot_id|>",
                '{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
                "It is 6.<|eot_id|>",
            ],
        ),
        ("gemma3", "system", ["It is 3.<end_of_turn>", "It is 6.<end_of_turn>"]),
    ],
)
def test_an_answer_ends_with_the_token_that_ends_the_turn(
    folders: Any, name: str, chat: str, pieces: list[str]
) -> None:
    assert learnt(folders(name), CHATS[chat]) == pieces


@pytest.mark.parametrize(
    "name", [name for name in NAMES if (TEMPLATES / f"{name}{MARKED}.jinja").is_file()]
)
def test_the_mask_is_that_of_the_same_template_with_marks(folders: Any, name: str) -> None:
    """TRL marks the line break behind a turn, too, and in some templates the head of the turn."""
    for kind, chat in CHATS.items():
        row = row_of(chat)
        try:
            found = ChatTokenizer(folders(name), "answers").tokens_of(example_of(row))
            wanted = ChatTokenizer(folders(f"{name}{MARKED}"), "answers").tokens_of(example_of(row))
        except WrongRow:
            continue
        if list(found.ids) != list(wanted.ids):
            continue  # it renders thoughts that the model's own template leaves out
        extra = [
            token
            for token, ours, theirs in zip(
                found.ids, found.is_learnt, wanted.is_learnt, strict=True
            )
            if theirs and not ours
        ]
        text = AutoTokenizer.from_pretrained(folders(name)).decode(extra)
        assert not re.sub(
            rf"</?think>|<\|start\|>assistant|<{BAR}(?:Assistant|tool▁outputs▁end){BAR}>|\s",
            "",
            text,
        ), (
            kind,
            text,
        )


# Calls of tools.


def with_arguments(arguments: Any) -> list[dict[str, Any]]:
    called = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [ASKED, {"role": "assistant", "tool_calls": [called]}, RESULT, ANSWERED]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "deepseekv3"])
def test_arguments_of_calls_may_be_objects_or_text(folders: Any, name: str) -> None:
    rows = [row_of(with_arguments(each)) for each in ({"a": 1}, '{"a": 1}')]
    tokenizer = ChatTokenizer(folders(name), "answers")
    of_object, of_text = (tokenizer.tokens_of(example_of({**row, "tools": TOOLS})) for row in rows)
    assert of_object == of_text
    text = AutoTokenizer.from_pretrained(folders(name)).decode(of_object.ids)
    assert '{"a": 1}' in text
    assert json.dumps('{"a": 1}') not in text


def test_a_template_that_hides_the_calls_of_tools_is_told(folders: Any) -> None:
    chat = with_arguments({"a": 1})
    with pytest.raises(WrongRow, match="does not show the calls of tools"):
        ChatTokenizer(folders("llama3"), "all").tokens_of(example_of(row_of(chat)))


def test_a_prompt_with_calls_has_the_tokens_that_were_learnt(folders: Any) -> None:
    folder, chat = folders("qwen2_5"), with_arguments('{"a": 1}')
    whole = ChatTokenizer(folder, "answers").tokens_of(
        example_of({"messages": chat, "tools": TOOLS})
    )
    asked = Prompts(folder).of_question(question_of({"messages": chat[:-1], "tools": TOOLS}))
    assert list(whole.ids)[: len(asked)] == asked
