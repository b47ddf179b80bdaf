"""Switches of known templates; in a file of its own, for options: whoever reads these needs no template.

What `chat_template_kwargs` of a request may set unless the operator says otherwise. The arguments that are Headrace's own
(messages, tools, documents, add_generation_prompt, the special tokens) never.
"""

from __future__ import annotations

ALLOWED_KWARGS = (
    "enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking", "clear_thinking",
    "keep_past_thinking", "truncate_history_thinking", "skip_thinking", "date_string", "model_identity",
    "builtin_tools", "custom_tools", "tools_in_user_message",
)  # fmt: skip
