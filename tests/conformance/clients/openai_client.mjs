// The openai package for Node against a server: chat, streams, tools, responses, embeddings, errors. Arguments: URL/v1 and model.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "x", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const short = { model, temperature: 0, max_tokens: 24 };
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

const whole = await client.chat.completions.create({ ...short, messages });
const text = whole.choices[0].message.content;
let streamed = "", last;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...short, messages, ...options })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  last = chunk;
}
assert.equal(streamed, text);
assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
assert.equal(await client.chat.completions.stream({ ...short, messages }).finalContent(), text);

const called = await client.chat.completions.create({ ...short, max_tokens: 300, messages, tools, tool_choice: "required" });
assert.ok("city" in JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));
const runner = client.chat.completions.stream({ ...short, max_tokens: 300, messages, tools, tool_choice: "required" });
assert.equal((await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function.name, "get_weather");

const ask = { model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 24 };
const response = await client.responses.create(ask);
let pieces = "";
const events = client.responses.stream(ask).on("response.output_text.delta", (e) => (pieces += e.delta));
assert.equal((await events.finalResponse()).output_text, response.output_text);
assert.equal(pieces, response.output_text);

assert.ok((await client.completions.create({ ...short, prompt: "Once" })).choices[0].text);
const vectors = (await client.embeddings.create({ model, input: ["a", "b"] })).data;
assert.ok(vectors.length === 2 && Math.abs(vectors[0].embedding.reduce((s, v) => s + v * v, 0) - 1) < 1e-3);
assert.ok((await client.models.list()).data.some((m) => m.id === model));

await assert.rejects(client.chat.completions.create({ ...short, messages, temperature: 5 }), OpenAI.BadRequestError);
await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
const left = await client.chat.completions.create({ ...short, messages, stream: true });
for await (const _ of left) break; // a stream that is left
console.log("openai for Node: chat, streams, tools, responses, completions, embeddings, errors");
