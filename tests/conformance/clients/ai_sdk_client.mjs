// The AI SDK with its openai-compatible provider against a server: text, stream, tools, objects. Arguments: URL/v1 and model.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const options = { name: "headrace", baseURL: url, apiKey: "x", includeUsage: true, supportsStructuredOutputs: true };
const provider = createOpenAICompatible(options);
const ask = { model: provider(name), prompt: "What is the capital of France?", temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

const whole = await generateText(ask);
const stream = streamText(ask);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
assert.ok(whole.text.length > 0);
assert.equal(streamed, whole.text);
assert.ok((await stream.usage).outputTokens === whole.usage.outputTokens && whole.usage.outputTokens > 0);

const weather = tool({ description: "Weather", inputSchema: z.object({ city: z.string().max(12) }) });
for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
  const called = await generateText({ ...ask, maxOutputTokens: 300, tools: { weather }, toolChoice });
  assert.equal(typeof called.toolCalls[0].input.city, "string");
  const live = streamText({ ...ask, maxOutputTokens: 300, tools: { weather }, toolChoice });
  assert.deepEqual((await live.toolCalls)[0].input, called.toolCalls[0].input);
}

const schema = z.object({ name: z.string().max(12), large: z.boolean() });
const typed = await generateText({ ...ask, maxOutputTokens: 300, output: Output.object({ schema }) });
assert.equal(typeof typed.output.large, "boolean");

const { embeddings } = await embedMany({ model: provider.textEmbeddingModel(name), values: ["a", "b"] });
assert.equal(embeddings.length, 2);
await assert.rejects(generateText({ ...ask, model: provider("other") }), (e) => e.statusCode === 404);
console.log("AI SDK, openai-compatible provider: text, stream, tools, objects, embeddings, errors");
