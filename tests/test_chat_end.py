"""The token that ends an assistant's turn, found in the chat template; the union of all places that name end tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fake_engine import BOS, EOS, IM_END, ByteTokenizer
from gguf_reference import rewritten
from headrace import LLM, SamplingParams
from headrace.conversation.turn_end import end_token_ids
from tiny_models import write_tiny

LOOP = "{% for m in messages %}"
ANSWERS = LOOP + "{% if m.role == 'user' %}"
TEMPLATES = {  # how families write a conversation -> the end of an assistant's turn
    "chatml": (LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", {IM_END}),
    "chatml with a system prompt of its own": (
        "<|im_start|>system\nBe good.<|im_end|>\n" + LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        {IM_END},
    ),
    "bos that opens turns": (LOOP + "<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}", {EOS}),
    "instructions in brackets": (
        "<bos>" + ANSWERS + "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} <eos>{% endif %}{% endfor %}", {EOS},
    ),
    "a second end at the very end": (
        LOOP + "{{ m.role }}: {{ m.content }}<|im_end|>\n{% if loop.last %}<eos>{% endif %}{% endfor %}", {IM_END},
    ),
    "parts that are closed": (
        ANSWERS + "U{{ m.content }}<|im_end|>{% else %}A<|im_start|>{{ m.content }}<pad><|im_end|>{% endif %}{% endfor %}",
        {IM_END},
    ),
    "the next turn is always opened": (
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n", {IM_END},
    ),
    "opened and never closed": (LOOP + "<|im_start|>{{ m.content }}{% endfor %}<|im_start|>", set()),
    "opened by the role's token": (ANSWERS + "<pad>{% else %}<|im_start|>{% endif %}{{ m.content }}{% endfor %}<|im_start|>", set()),
    "text only": (LOOP + "{{ m.role }}: {{ m.content }}\n{% endfor %}", set()),
    "a newline first": (LOOP + "{{ m.content }}\n\n \n<eos>{% if not loop.last %}A{% endif %}{% endfor %}", {EOS}),
    "an end of each part of a turn": (  # as gpt-oss has it: a thought ends like an answer, and the turn goes on
        LOOP + "<|im_start|>{% if m.thinking %}{{ m.thinking }}<|im_end|><|im_start|>{% endif %}{{ m.content }}<|im_end|>"
        "{% endfor %}", set(),
    ),
    "a call ends in another way": (
        LOOP + "<|im_start|>{% if m.tool_calls %}{% if m.tool_calls[1] %}{{ raise_exception('one') }}{% endif %}"
        "{{ m.tool_calls[0].function.arguments | tojson }}<pad>{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
        {IM_END, BOS + 4},
    ),
    "only the first call, by its name": (
        LOOP + "<|im_start|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments | tojson }}<pad>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
        {IM_END, BOS + 4},
    ),
    "an end of each call": (
        LOOP + "<|im_start|>{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}<pad>{% endfor %}"
        "{{ m.content }}{% if not m.tool_calls %}<|im_end|>{% endif %}{% endfor %}", {IM_END},
    ),
    "parts only": (LOOP + "{{ m.role }}{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n{% endfor %}", {IM_END}),
    "refuses everything": ("{{ raise_exception('no') }}", set()),
    "fails": ("{{ messages[7].x.y }}", set()),
    "no template": ("{% if %}", set()),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_behind_an_answer(name: str):
    template, ends = TEMPLATES[name]
    assert end_token_ids(ByteTokenizer(template)) == ends
    assert end_token_ids(ByteTokenizer(), template) == ends
    assert end_token_ids(ByteTokenizer(), {"default": TEMPLATES["text only"][0], "tool_use": template}) <= ends


def test_a_template_without_an_end_costs_a_bounded_time(monkeypatch):
    monkeypatch.setattr("headrace.conversation.turn_end.SECONDS", 0.1)
    loop = "{% for i in range(100000) %}{% for k in range(100000) %}{% endfor %}{% endfor %}"
    began = time.thread_time()
    assert end_token_ids(ByteTokenizer(loop)) == set()
    assert time.thread_time() - began < 2


def ends_of(path: Path | str, **options) -> set[int]:
    with LLM(str(path), device="cpu", max_model_len=64, **options) as llm:
        return set(llm.inputs.eos_token_ids)


def test_every_file_may_name_end_tokens(tmp_path: Path):
    path = write_tiny("llama", tmp_path, eos_token_id=7)
    tokenizer, template = tmp_path / "tokenizer_config.json", "{% for m in messages %}<|user|>{{ m.content }}<|assistant|>A{% endfor %}"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    names = {"eos_token": "</s>", "eot_token": "<|system|>", "chat_template": template}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | names))
    assert ends_of(path) == {7, 8, 9, 2, 3, 5}
    assert ends_of(path, skip_tokenizer_init=True) == {7, 8, 9}


def test_a_chat_ends_though_the_metadata_name_another_token(smollm2: str, tmp_path: Path):
    """SmolLM2 whose eos is the base model's: <|im_end|> ends the turn, unless ignore_eos or min_tokens say no."""
    path = rewritten(smollm2, tmp_path / "wrong.gguf", {"tokenizer.ggml.eos_token_id": 0})
    with LLM(str(path), device="cpu", max_model_len=256) as llm:
        assert set(llm.inputs.eos_token_ids) == {0, 2}
        hi = [{"role": "user", "content": "Say hi."}]
        params = [SamplingParams(temperature=0.0, max_tokens=60, **more) for more in ({}, {"min_tokens": 30}, {"ignore_eos": True})]
        first, longer, on = (output.outputs[0] for output in llm.chat([hi] * 3, params, use_tqdm=False))
    assert first.finish_reason == "stop" and first.token_ids[-1] == 2 and "im_end" not in first.text
    assert not {0, 2} & set(longer.token_ids[:30]) and 2 in on.token_ids and len(on.token_ids) == 60
