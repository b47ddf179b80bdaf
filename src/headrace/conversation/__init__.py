"""What a chat is, without HTTP: templates and their sandbox, tools, reasoning, and the events of an answer."""
