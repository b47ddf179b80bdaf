"""HTTP: routes, protocol, chat templates, tool calls, reasoning, server-sent events."""
