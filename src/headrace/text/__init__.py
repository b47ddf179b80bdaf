"""Between token ids and text: prompts in, whole characters out, strings found in a stream."""
